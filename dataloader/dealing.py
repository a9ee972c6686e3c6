"""Which group of domains gets which samples of a step: the one decision about samples that all ranks make."""

from collections.abc import Sequence

import numpy as np


def deal(lengths: Sequence[int], num_domains: int, group_size: int) -> list[int]:
    """Deal samples to groups of `group_size` neighbouring domains (the last may be smaller), by length.

    From the longest on, samples are dealt in rounds to one domain of each group, to the groups there and back
    (0, 1, …, G - 1, G - 1, …, 0, 0, …), and when all domains have had one, to the domains back again. A group
    gets what its domains are dealt. Two groups of as many domains, and any two domains, differ by at most the
    longest sample, in tokens, and by one in samples; a smaller group has one less in rounds that its domains
    have no part in. O(n log n) in numpy: at 8,192 samples about a millisecond.
    """
    domains = np.arange(num_domains)
    rounds, group_of = domains % group_size, domains // group_size
    # Dealt to domain after domain instead, the first group would get the longest samples of all.
    turns = group_of[np.lexsort((np.where(rounds % 2, -group_of, group_of), rounds))]
    turns = np.concatenate([turns, turns[::-1]])
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    groups = np.empty(len(lengths), np.int64)
    groups[order] = turns[np.arange(len(lengths)) % (2 * num_domains)]
    out: list[int] = groups.tolist()
    return out
