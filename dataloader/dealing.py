"""Which group of domains gets which samples of a step: the one decision about samples that all ranks make."""

from collections.abc import Sequence

import numpy as np


def deal(lengths: Sequence[int], num_domains: int, group_size: int) -> list[int]:
    """Deal samples to groups of `group_size` neighbouring domains (the last may be smaller), by length.

    From the longest on, samples are dealt to the domains there and back (0, 1, …, D - 1, D - 1, …, 0, 0, …),
    and a group gets what its domains are dealt. Two domains differ by at most the longest sample, in tokens,
    and by one in samples, or by two where there and back ends early; so two groups of as many domains differ
    by at most that for each of their domains. O(n log n) in numpy: at 8,192 samples about a millisecond.
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    turn = np.arange(len(lengths)) % (2 * num_domains)
    domain = np.minimum(turn, 2 * num_domains - 1 - turn)
    groups = np.empty(len(lengths), np.int64)
    groups[order] = domain // group_size
    out: list[int] = groups.tolist()
    return out
