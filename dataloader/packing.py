"""Packing samples into microbatches without padding."""

from collections.abc import Sequence


def pack(lengths: Sequence[int], budget: int) -> tuple[tuple[int, ...], ...]:
    """Bins of sample indices whose lengths add up to at most `budget` tokens each, by first-fit-decreasing.

    Samples are placed from the longest (ties by index) into the first bin with room, O(n log n). At most
    11/9 of the fewest possible bins, plus one. Bins are ordered by their smallest index, indices ascend
    within. ValueError if a length is not in 1..budget.
    """
    for i, size in enumerate(lengths):
        if not 1 <= size <= budget:
            raise ValueError(
                f"sample {i} has {size} tokens, a microbatch holds 1 to {budget}: raise the budget, or let "
                "long samples be dropped or truncated"
            )
    if not lengths:
        return ()
    # A heap-shaped tree over the n bins that may be needed: each node holds the largest room below it.
    leaves = 1 << (len(lengths) - 1).bit_length()
    room = [budget] * (2 * leaves)
    bins: list[list[int]] = [[] for _ in lengths]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= lengths[i] else 2 * node + 1
        bins[node - leaves].append(i)
        room[node] -= lengths[i]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return tuple(sorted(tuple(sorted(members)) for members in bins if members))
