"""Which ranks of a pool hold which tokens: policies of sequence sharding, from lengths to a layout.

All are pure and integer, with ties to the smaller number. Who attends to what follows from the layout
(`parallel.schemes.choose_tiles`).

Invariant: cuts are multiples of the pool's unit, and no rank holds more tokens than the pool allows.
"""

from collections.abc import Mapping
from functools import partial

from parallel.policies.dynamic import shard_dynamic
from parallel.policies.pool import Pool, SequencePolicy, make_pool
from parallel.policies.simple import shard_all, shard_hybrid_pow2, shard_long_short, shard_none

POLICIES: Mapping[str, SequencePolicy] = {
    "none": shard_none,
    "all": shard_all,
    "long_short": shard_long_short,
    "hybrid_pow2": shard_hybrid_pow2,
    "dynamic": shard_dynamic,
    "dynamic_pow2": partial(shard_dynamic, powers_of_two=True),
}

__all__ = ["POLICIES", "Pool", "SequencePolicy", "make_pool"]
