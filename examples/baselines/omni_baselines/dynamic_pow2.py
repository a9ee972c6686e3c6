"""Sequences over powers of two of ranks, cut evenly: what the platform's `dynamic` gains by any number.

It is `dynamic` with fewer choices, made of its parts, which are not kept stable as `omni.policies` is.
"""

from collections.abc import Sequence

import numpy as np

from omni.policies import Pool, SequenceLayout, SharingPolicy
from parallel.policies.dynamic import best_even, case_of, layout_of
from parallel.policies.pool import NEVER, degree_times


def shard_dynamic_pow2(lengths: Sequence[int], pool: Pool) -> SequenceLayout:
    """Each sequence over as many ranks as it needs, a power of two of them."""
    if not lengths:
        return SequenceLayout(pool.num_cp_ranks, ())
    times, degrees = degree_times(lengths, pool), np.arange(1, pool.num_cp_ranks + 1)
    times[:, degrees & (degrees - 1) > 0] = NEVER
    case = case_of(lengths, pool, times)
    return layout_of(case, [best_even(case)])


DYNAMIC_POW2 = SharingPolicy("dynamic_pow2", shard_dynamic_pow2, finds_room=True)
