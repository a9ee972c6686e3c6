"""Which ranks hold which tokens of each sequence: the kind of policy that serves the LLM and the encoders."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from parallel.policies.dhp import shard_dhp
from parallel.policies.dynamic import shard_dynamic
from parallel.policies.pool import Pool
from parallel.policies.simple import (
    shard_all,
    shard_hybrid_pow2,
    shard_long_short,
    shard_none,
    shard_uniform,
)
from parallel.policy import Policy
from parallel.sequence import SequenceLayout


@dataclass(frozen=True)
class SharingPolicy(Policy):
    """How the ranks of a pool share the sequences of a microbatch.

    `decide(lengths, pool)` gives the shards of each sequence, cut at multiples of `pool.unit`; no rank holds
    more than `pool.tokens_per_rank` tokens, if that is not None. ValueError if they find no room.

    within_replica   each replica's sequences are shared over its own cp ranks, which are the pool; else the
                     pool is all cp ranks of the domain's replicas, and its sequences those of all of them.
                     Items belong to no replica, so encoders cannot take such a policy
    cuts             a sequence may be cut at all; without it, encoders spread whole items over several
                     microbatches at once, which no decision about one microbatch can
    forced           items are shared even where whole ones would let the step take less time
    finds_room       every token of a full pool finds its place, so `pool.tokens_per_rank` may be the LLM's
                     budget; others get None, as they would have to refuse some steps
    """

    group: ClassVar[str] = "omni.sharing"
    decide: Callable[[Sequence[int], Pool], SequenceLayout]
    within_replica: bool = False
    cuts: bool = True
    forced: bool = False
    finds_room: bool = False

    def __call__(self, lengths: Sequence[int], pool: Pool) -> SequenceLayout:
        """Return the shards of each sequence."""
        with self.asked():
            layout = self.decide(lengths, pool)
            self._check(layout, lengths, pool)
        return layout

    def _check(self, layout: SequenceLayout, lengths: Sequence[int], pool: Pool) -> None:
        self.require(
            layout.num_cp_ranks == pool.num_cp_ranks and layout.lengths == tuple(lengths),
            f"{len(lengths)} sequences are laid out over {pool.num_cp_ranks} ranks, each with all its tokens",
        )
        self.require(
            all(shard.start % pool.unit == 0 for shards in layout.shards for shard in shards),
            f"sequences are cut at multiples of {pool.unit}",
        )
        self.require(
            pool.tokens_per_rank is None
            or all(
                layout.local_tokens(cp_rank) <= pool.tokens_per_rank for cp_rank in range(pool.num_cp_ranks)
            ),
            f"a rank holds at most {pool.tokens_per_rank} tokens",
        )
        self.require(self.cuts or all(len(shards) == 1 for shards in layout.shards), "sequences stay whole")


UNIFORM = SharingPolicy("uniform", shard_uniform, within_replica=True)
NONE = SharingPolicy("none", shard_none, cuts=False)
ALL = SharingPolicy("all", shard_all, forced=True)
LONG_SHORT = SharingPolicy("long_short", shard_long_short)
HYBRID_POW2 = SharingPolicy("hybrid_pow2", shard_hybrid_pow2)
DHP = SharingPolicy("dhp", shard_dhp, finds_room=True)
DYNAMIC = SharingPolicy("dynamic", shard_dynamic, finds_room=True)
