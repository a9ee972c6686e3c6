"""Balance and packing as WLB-LLM has them (Wang et al., 2025, OSDI): by the LLM's predicted time.

There outliers wait for a later step. A step's samples are given here, so all of them go now.
"""

import numpy as np

from omni.policies import (
    BalancePolicy,
    Bins,
    Limits,
    PackingPolicy,
    SampleCosts,
    ease,
    first_fit_decreasing,
    longest_first_within,
)
from omni_baselines.orchmllm import assign_orchmllm


def assign_wlb(samples: SampleCosts, bins: Bins) -> list[int]:
    """Workload-balanced division: by the LLM's predicted time, the longest first, each to the bin with the
    least so far that has room for its tokens: an eighth more than the mean, or the longest sample. Where
    tokens find no room so, without that bound, as `orchmllm`. Then a few changes within it where a phase is
    worse than in turn (`ease`), which the source has not.

    There bins are microbatches; how samples share those is a policy of packing here. O(n log count).
    """
    tokens, llm_ns = samples.tokens.tolist(), samples.ns[:, 0].tolist()
    room = max([*tokens, sum(tokens) * 9 // (8 * bins.count)])
    chosen = longest_first_within(llm_ns, bins.count, tokens, room)
    if chosen is None:
        return assign_orchmllm(samples, bins)
    return ease(samples, bins, chosen, Limits(samples.tokens[:, None], np.array([room], np.int64)))


def pack_wlb(samples: SampleCosts, budget: int) -> list[list[int]]:
    """Variable-length packing, the heuristic for the pipeline's level: packs of about equal work of the LLM,
    of any number of tokens up to the budget.

    Samples join, from the longest on, the pack with the least LLM work, or where that lacks room the one with
    the fewest tokens. There are as many packs as first-fit-decreasing makes, and one more as often as a
    sample finds room in neither. Packs are ordered by their first sample. O(n · packs) for each number tried.

    WLB-LLM keeps outliers in queues until there is one for each microbatch of a later step. Here an outlier
    is put off to another microbatch of its own step at most: as from a full queue, the longest are dealt one
    to each pack.
    """
    count = len(first_fit_decreasing(samples.tokens.tolist(), budget))
    while (packs := _lightest(samples, budget, count)) is None:
        count += 1
    return sorted(sorted(members) for members in packs if members)


def _lightest(samples: SampleCosts, budget: int, count: int) -> list[list[int]] | None:
    """Each sample in the lightest or the shortest of `count` packs; None if one has no room in either."""
    tokens, work = samples.tokens.tolist(), samples.ns[:, 0].tolist()
    packs: list[list[int]] = [[] for _ in range(count)]
    held, spent = [0] * count, [0] * count
    for sample in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        candidates = (min(range(count), key=spent.__getitem__), min(range(count), key=held.__getitem__))
        for at in candidates:
            if not held[at] or held[at] + tokens[sample] <= budget:
                break
        else:
            return None
        packs[at].append(sample)
        held[at] += tokens[sample]
        spent[at] += work[sample]
    return packs


BALANCE = BalancePolicy("wlb", assign_wlb)
PACKING = PackingPolicy("wlb", pack_wlb)
