"""The last step of policies that even out one sum: no phase is left worse than in turn if that can be.

A division that is even in one sum says nothing of another. Where few samples have encoder work, the costliest
of them may meet by chance more than in turn, and a step waits for its slowest rank in each phase.
"""

from collections.abc import Sequence

import numpy as np

from dataloader.balance.costs import Bins, SampleCosts
from dataloader.balance.phases import floors_ns, phases_ns
from dataloader.balance.search import Limits, improve, sum_by_bin

_ROUNDS = 32
_SLACK = 6  # the part of the least possible largest sum by which that may be above it


def ease(samples: SampleCosts, bins: Bins, chosen: Sequence[int], limits: Limits) -> list[int]:
    """Take work from the fullest bin of a phase that has more than the fullest has in turn (`none`), by at
    most 32 moves and swaps.

    Each makes both phases' largest sums together smaller, as far as they are above those in turn, and keeps
    to the `limits`. Encoders count where bins work alone. O(n).
    """
    work, into = phases_ns(samples), np.array(chosen, np.int64)
    if not all(bins.alone[1:]):
        work[:, 1] = 0
    in_turn = sum_by_bin(work, np.arange(len(work)) % bins.count, bins.count).max(0)
    largest = sum_by_bin(work, into, bins.count).max(0)
    # What is below its floor may rise to it: a phase that is better than in turn stays as it is.
    floors = np.maximum(floors_ns(samples, bins.width), np.minimum(in_turn, largest))
    eased: list[int] = improve(work, into, bins.count, floors, _ROUNDS, limits).tolist()
    return eased


def steady(evened: Sequence[int], chosen: Sequence[int], bins: Bins) -> Limits:
    """Keep the largest sum of what a policy evened out, [n], or let it rise to a sixth above the mean, or
    above the largest sample if that is more: no division has less, so bounds by 7/6 of the best possible or
    more hold as they did. That is what longest processing time first has with two bins, its least.
    """
    amounts = np.array(evened, np.int64)[:, None]
    sums = sum_by_bin(amounts, np.array(chosen, np.int64), bins.count)
    least = np.maximum(sums.sum(0) // bins.count, amounts.max(0, initial=0))
    return Limits(amounts, np.maximum(sums.max(0), least + least // _SLACK))
