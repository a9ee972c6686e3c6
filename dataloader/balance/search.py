"""Bounded local search over divisions of samples: moves and swaps, counted and never timed."""

from dataclasses import dataclass

import numpy as np

from ops.ints import Ints

_MINE = 32  # samples of a fullest bin that are tried
_OTHERS = 128  # samples of other bins to swap with
_NEVER = int(np.iinfo(np.int64).max)


def sum_by_bin(work: Ints, chosen: Ints, count: int) -> Ints:
    """Add up the work [n, P] of samples by bin [count, P]."""
    loads = np.zeros((count, work.shape[1]), np.int64)
    np.add.at(loads, chosen, work)
    return loads


@dataclass(frozen=True)
class Limits:
    """What a search keeps to: the sums of `amounts` [n, Q] of samples stay within `most` [Q] in every bin."""

    amounts: Ints
    most: Ints


def improve(
    work: Ints, chosen: Ints, count: int, floors: Ints, rounds: int, limits: Limits | None = None
) -> Ints:
    """Shorten a step that waits for its fullest bin in each of P phases, by at most so many changes.

    `work` [n, P] is what samples take; the largest load of a phase counts as no less than its floor [P]. In
    each round, of all moves and swaps that take a sample from the fullest bin of a phase and keep to the
    limits, of samples taken evenly from those that have work of that phase, the one with the least sum of the
    phases' largest loads is made; it ends where none lessens it. O(rounds (2¹² + 32 count + n)).
    """
    chosen = chosen.copy()
    loads = sum_by_bin(work, chosen, count)
    if limits is None:
        limits = Limits(np.zeros((len(work), 0), np.int64), np.zeros(0, np.int64))
    held = sum_by_bin(limits.amounts, chosen, count)
    for _ in range(rounds):
        least = int(np.maximum(loads.max(0), floors).sum())
        found = (least, -1, -1, -1)
        for phase, full in enumerate(loads.argmax(0).tolist()):
            mine = _some(np.flatnonzero((chosen == full) & (work[:, phase] > 0)), _MINE)
            changes = _Changes(mine, _some(np.flatnonzero(chosen != full), _OTHERS), chosen, full, count)
            found = min(found, changes.best(work, loads, floors, held, limits), key=lambda one: one[0])
        value, sample, other, to = found
        if value >= least:
            break
        full = int(chosen[sample])
        for amounts, sums in ((work, loads), (limits.amounts, held)):
            change = amounts[sample] - (amounts[other] if other >= 0 else 0)
            sums[full] -= change
            sums[to] += change
        chosen[sample] = to
        if other >= 0:
            chosen[other] = full
    return chosen


class _Changes:
    """Ways to take one of `mine` from bin `full`: swapped with one of `others`, or moved to another bin."""

    def __init__(self, mine: Ints, others: Ints, chosen: Ints, full: int, count: int) -> None:
        elsewhere = np.delete(np.arange(count), full)
        self.mine, self.others, self.full = mine, others, full
        self.to = np.concatenate([chosen[others], elsewhere])

    def best(
        self, work: Ints, loads: Ints, floors: Ints, held: Ints, limits: Limits
    ) -> tuple[int, int, int, int]:
        """The best: the sum of the phases' largest loads after it, the sample, the one that it is swapped
        with or -1, and the bin that it goes to.
        """
        if not len(self.mine) or not len(self.to):
            return _NEVER, -1, -1, -1
        value = np.zeros((len(self.mine), len(self.to)), np.int64)
        for phase, floor in enumerate(floors.tolist()):
            rest = _largest_but(loads[:, phase], self.full)[self.to]
            value += np.maximum(np.maximum(self._after(work[:, phase], loads[:, phase]), rest), floor)
        for column, most in enumerate(limits.most.tolist()):
            value[self._after(limits.amounts[:, column], held[:, column]) > most] = _NEVER
        row, column = divmod(int(value.argmin()), len(self.to))
        other = int(self.others[column]) if column < len(self.others) else -1
        return int(value[row, column]), int(self.mine[row]), other, int(self.to[column])

    def _after(self, amounts: Ints, sums: Ints) -> Ints:
        """The larger sum of the two bins of each change, after it [mine, to]."""
        given = np.zeros(len(self.to), np.int64)
        given[: len(self.others)] = amounts[self.others]
        change = amounts[self.mine][:, None] - given
        larger: Ints = np.maximum(sums[self.full] - change, sums[self.to] + change)
        return larger


def _largest_but(loads: Ints, full: int) -> Ints:
    """For each bin the largest load of those that are neither it nor `full`, 0 if there is none."""
    rest = loads.copy()
    rest[full] = 0
    first = int(rest.argmax())
    out = np.full(len(loads), rest[first])
    rest[first] = 0
    out[first] = rest.max()
    return out


def _some(numbers: Ints, most: int) -> Ints:
    """At most so many of the numbers, at even distances."""
    if len(numbers) <= most:
        return numbers
    return numbers[np.arange(most) * len(numbers) // most]
