"""Bounded local search over divisions of samples: moves and swaps, counted and never timed."""

import numpy as np

from dataloader.balance.costs import Ints

_MINE = 32  # samples of a fullest bin that are tried
_OTHERS = 128  # samples of other bins to swap with


def sum_by_bin(work: Ints, chosen: Ints, count: int) -> Ints:
    """Add up the work [n, P] of samples by bin [count, P]."""
    loads = np.zeros((count, work.shape[1]), np.int64)
    np.add.at(loads, chosen, work)
    return loads


def improve(work: Ints, chosen: Ints, count: int, floors: Ints, rounds: int) -> Ints:
    """Shorten a step that waits for its fullest bin in each of P phases, by at most so many changes.

    `work` [n, P] is what samples take; the largest load of a phase counts as no less than its floor [P]. In
    each round, of all moves and swaps that take a sample from the fullest bin of a phase, of samples taken
    evenly from those there are, the one with the least sum of the phases' largest loads is made; it ends
    where none lessens it. O(rounds (2¹² + 32 count + n)).
    """
    chosen = chosen.copy()
    loads = sum_by_bin(work, chosen, count)
    for _ in range(rounds):
        least = int(np.maximum(loads.max(0), floors).sum())
        found = (least, -1, -1, -1)
        for full in dict.fromkeys(loads.argmax(0).tolist()):
            found = min(found, _best_change(work, chosen, loads, floors, full), key=lambda one: one[0])
        value, sample, other, to = found
        if value >= least:
            break
        full = int(chosen[sample])
        change = work[sample] - (work[other] if other >= 0 else 0)
        loads[full] -= change
        loads[to] += change
        chosen[sample] = to
        if other >= 0:
            chosen[other] = full
    return chosen


def _best_change(work: Ints, chosen: Ints, loads: Ints, floors: Ints, full: int) -> tuple[int, int, int, int]:
    """The best change that takes a sample from bin `full`: the sum of the phases' largest loads after it, the
    sample, the one that it is swapped with or -1, and the bin that it goes to.
    """
    mine = _some(np.flatnonzero(chosen == full), _MINE)
    others = _some(np.flatnonzero(chosen != full), _OTHERS)
    emptied = np.delete(np.arange(len(loads)), full)
    to = np.concatenate([chosen[others], emptied])
    if not len(mine) or not len(to):
        return int(np.iinfo(np.int64).max), -1, -1, -1
    given = np.concatenate([work[others], np.zeros((len(emptied), work.shape[1]), np.int64)])
    value = np.zeros((len(mine), len(to)), np.int64)
    for phase, floor in enumerate(floors.tolist()):
        change = work[mine, phase][:, None] - given[:, phase]
        after = np.maximum(loads[full, phase] - change, loads[to, phase] + change)
        rest = _largest_but(loads[:, phase], full)[to]
        value += np.maximum(np.maximum(after, rest), floor)
    row, column = divmod(int(value.argmin()), len(to))
    other = int(others[column]) if column < len(others) else -1
    return int(value[row, column]), int(mine[row]), other, int(to[column])


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
