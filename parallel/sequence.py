"""Where the tokens of each packed sequence live.

Invariant: the shards of a sequence are in token order, do not overlap and cover it. A short sequence is one
shard on one rank; a long one may be cut over any number of ranks. Layers that work token by token see a
rank's tokens one after the other, in sequence order, and need nothing else; attention and the boundary are
planned from this description alone, so every rank knows what every other rank holds.

A cp rank of the pool that may share sequences is a rank. With tensor parallelism it stands for `tp`
ranks: they divide its tokens evenly between attention layers (sequence parallelism; Korthikanti et al., 2022,
section 4.2.2), so its tokens are padded to a multiple of tp, and to at least tp: no rank of the LLM is empty.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True)
class Shard:
    """Tokens [start, start + length) of one sequence, held by `cp_rank` (its number in the pool)."""

    cp_rank: int
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
    """The shards of every sequence of one packed microbatch over a pool of `num_cp_ranks`."""

    num_cp_ranks: int
    shards: tuple[tuple[Shard, ...], ...]

    def __post_init__(self) -> None:
        for number, pieces in enumerate(self.shards):
            expected = 0
            for piece in pieces:
                assert 0 <= piece.cp_rank < self.num_cp_ranks, (
                    f"sequence {number}: member {piece.cp_rank} not in the pool"
                )
                assert piece.start == expected, f"sequence {number}: token {expected} is not covered once"
                assert piece.length >= 0, f"sequence {number}: negative length"
                expected += piece.length

    @classmethod
    def whole(cls, lengths: Sequence[int], cp_ranks: Sequence[int], num_cp_ranks: int) -> "SequenceLayout":
        """Each sequence whole: sequence i of `lengths[i]` tokens on `cp_ranks[i]`."""
        return cls(num_cp_ranks, tuple((Shard(m, 0, n),) for n, m in zip(lengths, cp_ranks, strict=True)))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(sum(piece.length for piece in pieces) for pieces in self.shards)

    @property
    def is_cut(self) -> bool:
        """Whether several cp ranks hold a sequence together."""
        return any(len(pieces) > 1 for pieces in self.shards)

    @cached_property
    def _held(self) -> tuple[int, ...]:
        held = [0] * self.num_cp_ranks
        for pieces in self.shards:
            for piece in pieces:
                held[piece.cp_rank] += piece.length
        return tuple(held)

    def local_tokens(self, cp_rank: int) -> int:
        """Tokens that `cp_rank` holds."""
        return self._held[cp_rank]

    def padded_tokens(self, cp_rank: int, tp: int = 1) -> int:
        """Tokens that `cp_rank` computes on: rounded up to a multiple of `tp`, at least `tp`."""
        return max(tp, -(-self._held[cp_rank] // tp) * tp)

    def intervals(self, tp: int = 1) -> Iterator[Interval]:
        """Yield where each run of the packed axis lives, in packed order.

        The ranks of the intervals are `tp` for each cp rank: rank m·tp + t holds the t-th of tp equal parts
        of the padded tokens of m.
        """
        start = 0
        filled = [0] * self.num_cp_ranks
        shares = [self.padded_tokens(cp_rank, tp) // tp for cp_rank in range(self.num_cp_ranks)]
        for pieces in self.shards:
            for piece in pieces:
                cp_rank, left, share = piece.cp_rank, piece.length, shares[piece.cp_rank]
                while left:
                    part, local = divmod(filled[cp_rank], share)
                    length = min(left, share - local)
                    yield Interval(start, length, cp_rank * tp + part, local)
                    start += length
                    filled[cp_rank] += length
                    left -= length
