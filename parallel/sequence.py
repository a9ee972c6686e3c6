"""Where the tokens of each packed sequence live.

Invariant: the shards of a sequence are in token order, do not overlap and cover it. A short sequence is one
shard on one rank; a long one may be cut over any number of ranks. Layers that work token by token see a
rank's tokens one after the other, in sequence order, and need nothing else; attention and the boundary are
planned from this description alone, so every rank knows what every other rank holds.

A "rank" here is a member of the pool that may share sequences. With tensor parallelism it stands for `tp`
ranks: they divide its tokens evenly between attention layers (sequence parallelism; Korthikanti et al., 2022,
section 4.2.2), so its tokens are padded to a multiple of tp, and to at least tp: no rank of the LLM is empty.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True)
class Shard:
    """Tokens [start, start + length) of one sequence, held by `rank` (an index into the parent group)."""

    rank: int
    start: int
    length: int


class Interval(NamedTuple):
    """Where a run of packed tokens lives: [start, start + length) of the packed axis, at `local_start`
    among the tokens of `rank`.
    """

    start: int
    length: int
    rank: int
    local_start: int


@dataclass(frozen=True)
class SequenceLayout:
    """The shards of every sequence of one packed microbatch over a parent group of `num_ranks`."""

    num_ranks: int
    shards: tuple[tuple[Shard, ...], ...]

    def __post_init__(self) -> None:
        for number, pieces in enumerate(self.shards):
            expected = 0
            for piece in pieces:
                assert 0 <= piece.rank < self.num_ranks, f"sequence {number}: rank {piece.rank} not in group"
                assert piece.start == expected, f"sequence {number}: token {expected} is not covered once"
                assert piece.length >= 0, f"sequence {number}: negative length"
                expected += piece.length

    @classmethod
    def whole(cls, lengths: Sequence[int], ranks: Sequence[int], num_ranks: int) -> "SequenceLayout":
        """Each sequence on one rank: sequence i of `lengths[i]` tokens on `ranks[i]`."""
        return cls(num_ranks, tuple((Shard(r, 0, n),) for n, r in zip(lengths, ranks, strict=True)))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(sum(piece.length for piece in pieces) for pieces in self.shards)

    @cached_property
    def _held(self) -> tuple[int, ...]:
        held = [0] * self.num_ranks
        for pieces in self.shards:
            for piece in pieces:
                held[piece.rank] += piece.length
        return tuple(held)

    def local_tokens(self, rank: int) -> int:
        """Tokens that `rank` holds."""
        return self._held[rank]

    def padded_tokens(self, rank: int, tp: int = 1) -> int:
        """Tokens that `rank` computes on: rounded up to a multiple of `tp`, at least `tp`."""
        return max(tp, -(-self._held[rank] // tp) * tp)

    def intervals(self, tp: int = 1) -> Iterator[Interval]:
        """Yield where each run of the packed axis lives, in packed order.

        The ranks of the intervals are `tp` for each rank of the layout: rank r·tp + t holds the t-th of tp
        equal parts of the padded tokens of r.
        """
        start = 0
        filled = [0] * self.num_ranks
        shares = [self.padded_tokens(rank, tp) // tp for rank in range(self.num_ranks)]
        for pieces in self.shards:
            for piece in pieces:
                rank, left, share = piece.rank, piece.length, shares[piece.rank]
                while left:
                    part, local = divmod(filled[rank], share)
                    length = min(left, share - local)
                    yield Interval(start, length, rank * tp + part, local)
                    start += length
                    filled[rank] += length
                    left -= length
