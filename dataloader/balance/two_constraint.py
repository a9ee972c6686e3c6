"""Encoder work and LLM work balanced at once: a step waits for its slowest rank in both phases."""

import numpy as np

from dataloader.balance.costs import Bins, SampleCosts
from dataloader.balance.phases import floors_ns, phases_ns
from dataloader.balance.policy import BalancePolicy
from dataloader.balance.search import improve, sum_by_bin
from dataloader.balance.simple import assign_lpt, assign_none
from ops.ints import Ints
from parallel.least_loaded import longest_first

_BITS = 30  # of a bin's load, so that sums of products stay in int64
_ROUNDS = 32


def assign_two_constraint(samples: SampleCosts, bins: Bins) -> list[int]:
    """Divide samples so that the LLM's largest sum and the encoders' largest sum are least together.

    A bin of `width` replicas shares what its samples may be cut over, so only sums count, down to what cannot
    be split and makes some bin wait anyhow: below that, a phase asks for nothing. Nor do encoders where bins
    are replicas of a domain that share its tp groups.

    Two divisions are made: longest processing time first over the sum of both phases, and each sample, from
    the costliest, to the bin with the least Σ load · cost over the phases, the bins' loads in the direction
    of the sample (the dot-product rule of vector packing; Panigrahy et al., 2011). The better one goes on
    through at most 32 moves and swaps (`search.improve`); where `lpt` is ahead of that, `lpt` does instead.

    The two largest sums together, floors counted, are never more than with `lpt` or `none`. O(n count).
    """
    work, floors = phases_ns(samples), np.array(floors_ns(samples, bins.width), np.int64)
    if not all(bins.alone[1:]):
        work[:, 1] = 0

    def value(chosen: Ints) -> int:
        return int(np.maximum(sum_by_bin(work, chosen, bins.count).max(0), floors).sum())

    divisions = (
        dot_product(work, bins.count),
        np.array(longest_first(samples.total_ns, bins.count)[0], np.int64),
        np.array(assign_none(samples, bins), np.int64),
    )
    best = improve(work, min(divisions, key=value), bins.count, floors, _ROUNDS)
    # `lpt` ends with changes of its own, which may lead further in rare cases.
    eased = np.array(assign_lpt(samples, bins), np.int64)
    if value(eased) < value(best):
        best = improve(work, eased, bins.count, floors, _ROUNDS)
    chosen: list[int] = best.tolist()
    return chosen


def dot_product(work: Ints, count: int) -> Ints:
    """Each sample of `work` [n, P], from the costliest, to the bin with the least Σ load · cost; ties to the
    smaller sample and bin.
    """
    scaled = work >> max(0, int(work.sum(0).max(initial=0)).bit_length() - _BITS)
    loads = np.zeros((count, work.shape[1]), np.int64)
    chosen = np.zeros(len(work), np.int64)
    for sample in np.argsort(-work.sum(1), kind="stable").tolist():
        bin_ = int((loads @ scaled[sample]).argmin())
        chosen[sample] = bin_
        loads[bin_] += scaled[sample]
    return chosen


TWO_CONSTRAINT = BalancePolicy("two_constraint", assign_two_constraint)
