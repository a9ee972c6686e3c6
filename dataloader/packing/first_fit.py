"""Packing samples without padding into few packs, by first-fit-decreasing."""

from collections.abc import Sequence

from dataloader.balance import SampleCosts
from dataloader.packing.policy import PackingPolicy, Packs


def pack(lengths: Sequence[int], budget: int) -> Packs:
    """Bins of sample indices whose lengths add up to at most `budget` tokens each, by first-fit-decreasing.

    A longer sample has a bin of its own. The others are placed from the longest (ties by index) into the
    first bin with room, O(n log n): at most 11/9 of the fewest possible bins, plus one. Bins are ordered by
    their smallest index, indices ascend within. ValueError if a length is below 1.
    """
    for i, size in enumerate(lengths):
        if size < 1:
            raise ValueError(f"sample {i} has {size} tokens: it must have at least 1")
    if not lengths:
        return ()
    # A heap-shaped tree over the n bins that may be needed: each node holds the largest room below it.
    leaves = 1 << (len(lengths) - 1).bit_length()
    room = [budget] * (2 * leaves)
    bins: list[list[int]] = [[] for _ in lengths]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    num_long = sum(size > budget for size in lengths)
    for i in order[num_long:]:
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= lengths[i] else 2 * node + 1
        bins[node - leaves].append(i)
        room[node] -= lengths[i]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    longer = [(i,) for i in order[:num_long]]
    return tuple(sorted([*longer, *(tuple(sorted(members)) for members in bins if members)]))


def pack_first_fit(samples: SampleCosts, budget: int) -> Packs:
    """As few packs as first-fit-decreasing makes of the samples' tokens, whatever they cost."""
    return pack(samples.tokens.tolist(), budget)


FIRST_FIT_DECREASING = PackingPolicy("first_fit_decreasing", pack_first_fit)
