"""Policies of balance as published systems have them, each with what it departs in.

Their other halves are policies of packing and pairing. Those systems cut no long sequence between replicas,
and DistTrain has no last step as `disttrain` has here: a few changes where a phase is worse than in turn
(`ease`).
"""

import numpy as np

from dataloader.balance.costs import Bins, SampleCosts
from dataloader.balance.easing import ease, steady
from dataloader.balance.phases import phases_ns
from dataloader.balance.policy import BalancePolicy
from dataloader.balance.search import Limits
from parallel.least_loaded import longest_first_within, place


def assign_disttrain(samples: SampleCosts, bins: Bins) -> list[int]:
    """Intra-microbatch reordering (DistTrain, Zhang et al., 2025, algorithm 1): each sample, from the
    costliest, to the bin with the least so far that is not full.

    Replicas there train equally many sequences, so no bin takes more than ⌈n / count⌉ samples. In which order
    a replica trains them is a policy of pairing. O(n log count).
    """
    most = -(-len(samples) // bins.count)
    chosen = longest_first_within(samples.total_ns, bins.count, [1] * len(samples), most)
    assert chosen is not None, "bins have room for all"
    own = steady(samples.total_ns, chosen, bins)
    amounts = np.stack([own.amounts[:, 0], np.ones(len(samples), np.int64)], 1)
    return ease(samples, bins, chosen, Limits(amounts, np.array([own.most[0], most], np.int64)))


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


DISTTRAIN = BalancePolicy("disttrain", assign_disttrain)
ENTRAIN = BalancePolicy("entrain", assign_entrain)
