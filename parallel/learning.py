"""What measured passes teach the cost table: from op times of many ranks to new laws, in exact integers.

A statement divides a pass's time into what tokens take, what attention takes and what any pass takes. Learnt
is by what each of the three is to be multiplied, for each part and direction: the least squares of errors
relative to what the table in effect says. A rank brings its samples to sums of small integers; these are
added up over ranks, in any order, and every rank solves the same equations in fractions. So tables are equal
wherever the sums are.

Noise has a say in proportion: a statement counts as much as a little of one sample (a ridge: Hoerl and
Kennard, 1970), so what passes of one size cannot tell apart stays in the statement's proportion; a factor is
never negative; samples that stand out are left out (`undisturbed`).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import product
from typing import NamedTuple

import numpy as np

from parallel.costs import CostTable, WorkCost
from parallel.laws import DIRECTIONS, FS_PER_NS, Direction, Law, Laws

_UNIT = 1 << 12  # the time that the table in effect gives a pass
_MOST = 64  # a pass that takes longer than so many times that counts as so long
_ALIKE = 7  # passes that are alike, among which one that was disturbed stands out
_LEAST = 8  # samples from which on something is learnt
_PRIOR = Fraction(1, 4096)  # of a sample: what a statement counts
_WORTH = 50  # a table is new if it times some kind of pass differently by one in so many
_TERMS = range(3)
_PAIRS = tuple((i, j) for i in _TERMS for j in _TERMS if i <= j)
NUM_SUMS = 1 + len(_PAIRS) + len(_TERMS)
"""Integers that sum up the samples of one part and direction: their number, and the moments of their terms
with each other and with the times.
"""


class Sample(NamedTuple):
    """One pass through a part, and the nanoseconds of compute that it was measured to take."""

    part: str
    direction: Direction
    tokens: int
    squares: int
    ns: int


class _Shares(NamedTuple):
    """A sample in `_UNIT`ths of the time that the table in effect gives it: stated terms, and its time."""

    terms: tuple[int, ...]
    time: int


def sums_of(samples: Iterable[Sample], table: CostTable) -> list[int]:
    """Sum up samples for `table`, the one in effect: NUM_SUMS integers for each of its parts and each of
    DIRECTIONS, in that order.

    Sums of 10**7 samples over all ranks stay in 64 bits.
    """
    found: dict[tuple[str, Direction], list[_Shares]] = defaultdict(list)
    for sample in samples:
        if shares := _shares(sample, table.parts[sample.part]):
            found[sample.part, sample.direction].append(shares)
    return [
        number
        for name, direction in product(table.parts, DIRECTIONS)
        for number in _moments(undisturbed(found[name, direction]))
    ]


def _shares(sample: Sample, cost: WorkCost) -> _Shares | None:
    """None for a pass that is stated to take no time, and for a time that cannot be."""
    load = sample.tokens, sample.squares
    terms = cost.stated.of(sample.direction).terms_fs(*load)
    size = max(sum(cost.laws.of(sample.direction).terms_fs(*load)), sum(terms) // _MOST)
    if size <= 0 or sample.ns <= 0:
        return None
    time = min(sample.ns * FS_PER_NS, _MOST * size)
    return _Shares(tuple(_rounded(term, size) for term in terms), _rounded(time, size))


def _rounded(part: int, whole: int) -> int:
    return (2 * _UNIT * part + whole) // (2 * whole)


def undisturbed(samples: Sequence[_Shares]) -> list[_Shares]:
    """Leave out samples that took more than twice as long as the median of those that are most alike.

    What disturbs a pass makes it longer. Two passes are alike if tokens, attention and the fixed cost have
    similar shares in them: any linear law then corrects both alike.
    """
    if not samples:
        return []
    terms = np.array([sample.terms for sample in samples], np.int64)
    times = np.array([sample.time for sample in samples], np.int64)
    distances = np.abs(terms[:, None] - terms).sum(-1)
    alike = np.sort(times[np.argsort(distances, axis=1, kind="stable")[:, :_ALIKE]])
    medians = alike[:, (alike.shape[1] - 1) // 2]
    return [sample for sample, keep in zip(samples, times <= 2 * medians, strict=True) if keep]


def _moments(samples: Sequence[_Shares]) -> list[int]:
    return [
        len(samples),
        *(sum(sample.terms[i] * sample.terms[j] for sample in samples) for i, j in _PAIRS),
        *(sum(sample.terms[i] * sample.time for sample in samples) for i in _TERMS),
    ]


def learn(table: CostTable, sums: Sequence[int]) -> CostTable:
    """Return what the sums of all ranks for `table` teach, as the table of the next number; `table` itself if
    it times all that was measured within 2 % of that.

    What too few samples were measured of keeps its laws. Where backwards ran whole, their halves are
    corrected alike.
    """
    blocks = [sums[at : at + NUM_SUMS] for at in range(0, len(sums), NUM_SUMS)]
    measured = dict(zip(product(table.parts, DIRECTIONS), blocks, strict=True))
    learnt, is_new = dict(table.learnt), False
    for name, cost in table.parts.items():
        own = {direction: measured[name, direction] for direction in DIRECTIONS}
        own = {direction: block for direction, block in own.items() if block[0] >= _LEAST}
        if own:
            learnt[name] = _laws(cost, own)
            is_new |= any(_differs(cost, learnt[name], direction, own[direction]) for direction in own)
    return table.with_laws(table.number + 1, learnt) if is_new else table


def _laws(cost: WorkCost, own: Mapping[Direction, Sequence[int]]) -> Laws:
    stated, current = cost.stated, cost.laws
    factors = {direction: _factors(block) for direction, block in own.items()}
    forward, whole, of_inputs, of_weights = map(factors.get, DIRECTIONS)

    return Laws(
        _scaled(stated.forward, forward) or current.forward,
        _scaled(stated.input, of_inputs or whole) or current.input,
        _scaled(stated.weight, of_weights or whole) or current.weight,
    )


def _scaled(law: Law, factors: tuple[Fraction, ...] | None) -> Law | None:
    if factors is None:
        return None
    return Law(*(int(of * factor) for of, factor in zip(law.coefficients, factors, strict=True)))


def _factors(block: Sequence[int]) -> tuple[Fraction, ...]:
    """By what the three terms are to be multiplied: the best among solutions that have no negative factor,
    found by holding every set of factors at 0 in turn (three unknowns have eight).
    """
    matrix, right = _equations(block)
    for i in _TERMS:
        matrix[i][i] += _PRIOR * _UNIT * _UNIT
        right[i] += _PRIOR * _UNIT * _UNIT
    candidates = []
    for free in product((True, False), repeat=len(_TERMS)):
        solution = _solve(matrix, right, [i for i in _TERMS if free[i]])
        if min(solution) >= 0:
            error = sum(
                solution[i] * (sum(matrix[i][j] * solution[j] for j in _TERMS) - 2 * right[i]) for i in _TERMS
            )
            candidates.append((error, solution))
    return min(candidates)[1]


def _equations(block: Sequence[int]) -> tuple[list[list[Fraction]], list[Fraction]]:
    matrix = [[Fraction(0)] * len(_TERMS) for _ in _TERMS]
    for (i, j), moment in zip(_PAIRS, block[1:], strict=False):
        matrix[i][j] = matrix[j][i] = Fraction(moment)
    return matrix, [Fraction(moment) for moment in block[1 + len(_PAIRS) :]]


def _solve(
    matrix: Sequence[Sequence[Fraction]], right: Sequence[Fraction], free: Sequence[int]
) -> tuple[Fraction, ...]:
    """Solve a positive definite system for the `free` unknowns, the others 0, by elimination."""
    rows = [[*(matrix[i][j] for j in free), right[i]] for i in free]
    for at, pivot in enumerate(rows):
        pivot[:] = [value / pivot[at] for value in pivot]
        for row in rows:
            if row is not pivot:
                row[:] = [value - row[at] * of for value, of in zip(row, pivot, strict=True)]
    out = [Fraction(0)] * len(_TERMS)
    for i, row in zip(free, rows, strict=True):
        out[i] = row[-1]
    return tuple(out)


def _differs(cost: WorkCost, learnt: Laws, direction: Direction, block: Sequence[int]) -> bool:
    """Whether laws time the samples of a block, all together, differently by one in _WORTH."""
    matrix, _ = _equations(block)
    before, after = (_relative(laws.of(direction), cost.stated.of(direction)) for laws in (cost.laws, learnt))
    # Terms times their factors in effect are a whole, so these are the sums of each term.
    sums = [sum((own * of for own, of in zip(row, before, strict=True)), Fraction(0)) for row in matrix]
    old, new = (sum((x * y for x, y in zip(sums, of, strict=True)), Fraction(0)) for of in (before, after))
    return abs(new - old) * _WORTH > old


def _relative(law: Law, stated: Law) -> list[Fraction]:
    pairs = zip(law.coefficients, stated.coefficients, strict=True)
    return [Fraction(own, of) if of else Fraction(0) for own, of in pairs]
