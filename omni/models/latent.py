"""Multi-head latent attention (DeepSeek-V2, section 2.1.2) as a statement: linears, weights, what it keeps.

    queries  D → q_rank → N · (nope + rope), or D → N · (nope + rope) where q_rank is 0
    keys     D → kv_rank + rope; kv_rank → N · (nope + value): each head's keys without rotation, and values;
             the rope rotated numbers are those of all heads
    output   N · value → D

Both compressed vectors are normed. Of tensor-parallel ranks each has all of what compresses, for its tokens,
and its heads of the rest; what they gather is the compressed. No module computes this yet: what is kept
follows from the equations, and no rehearsal has checked it.
"""

from dataclasses import dataclass

from parallel.work import FP32, Weight


@dataclass(frozen=True)
class Latent:
    """Sizes, of N = `heads` heads in front of a stream of width `hidden`."""

    hidden: int
    heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def key_dim(self) -> int:
        """Numbers of a head of queries and keys."""
        return self.nope_dim + self.rope_dim

    def compressing(self) -> tuple[tuple[int, int], ...]:
        """Linears that every tensor-parallel rank has whole."""
        keys = (self.hidden, self.kv_rank + self.rope_dim)
        return ((self.hidden, self.q_rank), keys) if self.q_rank else (keys,)

    def linears(self) -> tuple[tuple[int, int], ...]:
        """All linears, inputs and outputs, of all ranks together; that of the output is the last."""
        queries = (self.q_rank or self.hidden, self.heads * self.key_dim)
        keys = (self.kv_rank, self.heads * (self.nope_dim + self.value_dim))
        return (*self.compressing(), queries, keys, (self.heads * self.value_dim, self.hidden))

    @property
    def gathered(self) -> int:
        """Numbers of a token that tensor-parallel ranks gather in front of what they divide."""
        return (self.q_rank or self.hidden) + self.kv_rank + self.rope_dim

    def weights(self, tp: int, norms: int, partial: bool) -> tuple[Weight, ...]:
        """Parameters on one of `tp` ranks, each norm with so many vectors; `partial` as for `Weight`."""
        whole = tuple(Weight(i * o, partial=partial) for i, o in self.compressing())
        divided = tuple(Weight(i * o // tp, matrix=True) for i, o in self.linears()[len(whole) :])
        ranks = (self.q_rank, self.kv_rank) if self.q_rank else (self.kv_rank,)
        normed = tuple(Weight(rank, partial=partial) for rank in ranks for _ in range(norms))
        return (*whole, *normed, *divided)

    def pair_flops(self) -> int:
        """Forward FLOPs of a query and a key that it sees: QKᵀ and PV of all heads."""
        return 2 * self.heads * (self.key_dim + self.value_dim)

    def token_numbers(self) -> int:
        """Numbers of a token that attention reads and writes: queries, keys, values, output."""
        return 2 * self.heads * (self.key_dim + self.value_dim)

    def kept(self, tokens: int, between: int, tp: int, element: int) -> int:
        """Bytes that a rank keeps of `tokens` in attention and of `between` in the stream: the compressed
        before and after its norms, queries and keys with their rotated numbers, what keys and values are
        parts of, the output, what softmax divided by, and what the norms divided by.
        """
        heads = self.heads // tp
        compressed = 2 * (self.q_rank + self.kv_rank) + self.rope_dim
        of_heads = 2 * self.key_dim + self.nope_dim + 2 * self.value_dim
        again = (self.gathered - self.rope_dim) * (tp > 1)  # as gathered
        numbers = between * compressed + tokens * (heads * of_heads + again)
        return numbers * element + tokens * heads * FP32 + 2 * between * FP32

    def put_off(self, tokens: int, between: int, tp: int, element: int) -> int:
        """Bytes held until gradients of weights are made: inputs of linears and gradients of outputs."""
        whole = sum(outputs for _, outputs in self.compressing()) + self.hidden
        inner = sum(outputs for _, outputs in self.linears()[len(self.compressing()) : -1])
        divided = (inner + self.heads * self.value_dim) // tp
        return (between * (whole + self.q_rank + self.kv_rank) + tokens * (divided + self.hidden)) * element
