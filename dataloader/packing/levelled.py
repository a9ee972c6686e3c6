"""Packs of about equal work of the LLM, of any number of tokens up to the budget."""

from dataloader.balance import SampleCosts
from dataloader.packing.first_fit import pack
from dataloader.packing.policy import PackingPolicy, Packs


def pack_wlb(samples: SampleCosts, budget: int) -> Packs:
    """Variable-length packing of WLB-LLM (Wang et al., 2025, OSDI; its heuristic for the pipeline's level).

    Samples join, from the longest on, the pack with the least LLM work, or where that lacks room the one with
    the fewest tokens. There are as many packs as first-fit-decreasing makes, and one more as often as a
    sample finds room in neither. Packs are ordered by their first sample. O(n · packs) for each number tried.

    WLB-LLM keeps outliers in queues until there is one for each microbatch of a later step. Here the samples
    of a step are fixed, so an outlier is put off to another microbatch of its own step at most: as from a
    full queue, the longest are dealt one to each pack.
    """
    count = len(pack(samples.tokens.tolist(), budget))
    while (packs := _lightest(samples, budget, count)) is None:
        count += 1
    return tuple(sorted(tuple(sorted(members)) for members in packs if members))


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


WLB = PackingPolicy("wlb", pack_wlb)
