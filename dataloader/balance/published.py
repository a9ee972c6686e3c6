"""Policies of balance as published systems have them, each with what it departs in.

Their other halves are policies of packing and pairing. Those systems cut no long sequence between replicas,
and none of them has the last step of those here that even out one sum: a few changes where a phase is worse
than in turn (`ease`).
"""

from collections.abc import Sequence

import numpy as np

from dataloader.balance.costs import Bins, SampleCosts
from dataloader.balance.easing import ease, steady
from dataloader.balance.phases import phases_ns
from dataloader.balance.policy import BalancePolicy
from dataloader.balance.search import Limits
from parallel.least_loaded import longest_first, place


def assign_disttrain(samples: SampleCosts, bins: Bins) -> list[int]:
    """Intra-microbatch reordering (DistTrain, Zhang et al., 2025, algorithm 1): each sample, from the
    costliest, to the bin with the least so far that is not full.

    Replicas there train equally many sequences, so no bin takes more than ⌈n / count⌉ samples. In which order
    a replica trains them is a policy of pairing. O(n log count).
    """
    most = -(-len(samples) // bins.count)
    chosen = _capped(samples.total_ns, [1] * len(samples), most, bins.count)
    assert chosen is not None, "bins have room for all"
    own = steady(samples.total_ns, chosen, bins)
    amounts = np.stack([own.amounts[:, 0], np.ones(len(samples), np.int64)], 1)
    return ease(samples, bins, chosen, Limits(amounts, np.array([own.most[0], most], np.int64)))


def assign_orchmllm(samples: SampleCosts, bins: Bins) -> list[int]:
    """Post-balancing by phase (OrchMLLM, Zheng et al., 2025, its variant without padding): the LLM's phase by
    its own cost, quadratic term and all, longest processing time first.

    Encoders' phases are balanced apart, here as there: over all slots of a domain, whichever replica a sample
    is on. There a phase is rearranged over the whole world; here items stay in the domain of their sample, so
    domains take the encoder work as it comes. The LLM's largest sum is at most 4/3 - 1/(3 count) of the best
    possible. O(n log count).
    """
    llm_ns = samples.ns[:, 0].tolist()
    chosen, _ = longest_first(llm_ns, bins.count)
    return ease(samples, bins, chosen, steady(llm_ns, chosen, bins))


def assign_wlb(samples: SampleCosts, bins: Bins) -> list[int]:
    """Workload-balanced division (WLB-LLM, Wang et al., 2025): by the LLM's predicted time, the longest
    first, each to the bin with the least so far that has room for its tokens: an eighth more than the mean,
    or the longest sample. Where tokens find no room so, without that bound, as `orchmllm`.

    There bins are microbatches and outliers wait for a later step. A step's samples are given here, so all go
    now; how they share microbatches is a policy of packing. O(n log count).
    """
    tokens, llm_ns = samples.tokens.tolist(), samples.ns[:, 0].tolist()
    room = max([*tokens, sum(tokens) * 9 // (8 * bins.count)])
    chosen = _capped(llm_ns, tokens, room, bins.count)
    if chosen is None:
        return assign_orchmllm(samples, bins)
    return ease(samples, bins, chosen, Limits(samples.tokens[:, None], np.array([room], np.int64)))


def assign_entrain(samples: SampleCosts, bins: Bins) -> list[int]:
    """Stratified assignment (Entrain, Jang and Chowdhury, 2026): samples by encoder work in strata of
    `count`, of which each bin takes one, the costliest the bin with the least encoder work so far.

    Two bins differ in encoder work by at most the largest of a sample. Samples without encoder work then even
    out the LLM's load, longest processing time first. Deferring the LLM's work of samples is a policy of
    packing; layouts are chosen before, by `omni plan`, where there a macroscopic profile says. O(n log n).
    """
    work = phases_ns(samples).tolist()
    llm, encoders = [0] * bins.count, [0] * bins.count
    order = sorted((i for i, (_, ns) in enumerate(work) if ns), key=lambda i: (-work[i][1], -work[i][0]))
    chosen = [0] * len(work)
    for start in range(0, len(order), bins.count):
        emptiest = sorted(range(bins.count), key=lambda b: (encoders[b], llm[b]))
        for sample, number in zip(order[start : start + bins.count], emptiest, strict=False):
            chosen[sample] = number
            llm[number] += work[sample][0]
            encoders[number] += work[sample][1]
    rest = sorted((i for i, (_, ns) in enumerate(work) if not ns), key=lambda i: -work[i][0])
    for sample, number in zip(rest, place([work[i][0] for i in rest], llm) or (), strict=True):
        chosen[sample] = number
    return chosen


def _capped(costs: Sequence[int], sizes: Sequence[int], room: int, count: int) -> list[int] | None:
    """Longest processing time first into bins with room for so much; None if some sample finds none."""
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    bins = place([costs[i] for i in order], [0] * count, [sizes[i] for i in order], [room] * count)
    if bins is None:
        return None
    chosen = [0] * len(costs)
    for sample, number in zip(order, bins, strict=True):
        chosen[sample] = number
    return chosen


DISTTRAIN = BalancePolicy("disttrain", assign_disttrain)
ENTRAIN = BalancePolicy("entrain", assign_entrain)
ORCHMLLM = BalancePolicy("orchmllm", assign_orchmllm)
WLB = BalancePolicy("wlb", assign_wlb)
