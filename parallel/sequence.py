"""Where the tokens of each packed sequence live.

Invariant: the shards of a sequence are in token order, do not overlap and cover it. A short sequence is one
shard on one rank; a long one may be cut over any number of ranks. Layers that work token by token see a
rank's tokens one after the other, in sequence order, and need nothing else; attention and the boundary are
planned from this description alone, so every rank knows what every other rank holds.

A member of the pool that may share sequences is a rank. With tensor parallelism it stands for `tp`
ranks: they divide its tokens evenly between attention layers (sequence parallelism; Korthikanti et al., 2022,
section 4.2.2), so its tokens are padded to a multiple of tp, and to at least tp: no rank of the LLM is empty.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True)
class Shard:
    """Tokens [start, start + length) of one sequence, held by `member` (its number in the pool)."""

    member: int
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
    """The shards of every sequence of one packed microbatch over a pool of `num_members`."""

    num_members: int
    shards: tuple[tuple[Shard, ...], ...]

    def __post_init__(self) -> None:
        for number, pieces in enumerate(self.shards):
            expected = 0
            for piece in pieces:
                assert 0 <= piece.member < self.num_members, (
                    f"sequence {number}: member {piece.member} not in the pool"
                )
                assert piece.start == expected, f"sequence {number}: token {expected} is not covered once"
                assert piece.length >= 0, f"sequence {number}: negative length"
                expected += piece.length

    @classmethod
    def whole(cls, lengths: Sequence[int], members: Sequence[int], num_members: int) -> "SequenceLayout":
        """Each sequence whole: sequence i of `lengths[i]` tokens on `members[i]`."""
        return cls(num_members, tuple((Shard(m, 0, n),) for n, m in zip(lengths, members, strict=True)))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(sum(piece.length for piece in pieces) for pieces in self.shards)

    @cached_property
    def _held(self) -> tuple[int, ...]:
        held = [0] * self.num_members
        for pieces in self.shards:
            for piece in pieces:
                held[piece.member] += piece.length
        return tuple(held)

    def local_tokens(self, member: int) -> int:
        """Tokens that `member` holds."""
        return self._held[member]

    def padded_tokens(self, member: int, tp: int = 1) -> int:
        """Tokens that `member` computes on: rounded up to a multiple of `tp`, at least `tp`."""
        return max(tp, -(-self._held[member] // tp) * tp)

    def intervals(self, tp: int = 1) -> Iterator[Interval]:
        """Yield where each run of the packed axis lives, in packed order.

        The ranks of the intervals are `tp` for each member: rank m·tp + t holds the t-th of tp equal parts of
        the padded tokens of m.
        """
        start = 0
        filled = [0] * self.num_members
        shares = [self.padded_tokens(member, tp) // tp for member in range(self.num_members)]
        for pieces in self.shards:
            for piece in pieces:
                member, left, share = piece.member, piece.length, shares[piece.member]
                while left:
                    part, local = divmod(filled[member], share)
                    length = min(left, share - local)
                    yield Interval(start, length, member * tp + part, local)
                    start += length
                    filled[member] += length
                    left -= length
