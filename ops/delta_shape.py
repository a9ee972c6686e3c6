"""Sizes of the gated delta rule, what it computes and moves, as plans state them: no tensors.

Letters as in `ops/delta.py`.
"""

from dataclasses import dataclass

CHUNK = 64  # tokens that are computed together, C


@dataclass(frozen=True)
class DeltaShape:
    """Sizes of one head of keys and its heads of values: P, R, V and J."""

    key_dim: int
    values: int
    value_dim: int
    taps: int

    @property
    def channels(self) -> int:
        """Numbers of a token that the convolution sees: a query, a key, R values."""
        return 2 * self.key_dim + self.values * self.value_dim

    @property
    def width(self) -> int:
        """Numbers of a token that the rule reads: those, then R numbers b and R numbers a."""
        return self.channels + 2 * self.values

    @property
    def out(self) -> int:
        """Numbers of a token that the rule puts out, as many as those of its gate."""
        return self.values * self.value_dim


@dataclass(frozen=True)
class DeltaHeads:
    """`count` heads of keys, each with its values: all of a model, or a rank's share of them."""

    count: int
    shape: DeltaShape

    def over(self, tp: int) -> "DeltaHeads":
        """The share of one of `tp` ranks."""
        return DeltaHeads(self.count // tp, self.shape)


def delta_flops(tokens: int, heads: int, shape: DeltaShape) -> int:
    """Forward FLOPs of the rule over `tokens` with `heads` of keys, full chunks taken.

    Of each key head two products of a chunk's tokens with each other; of each of its value heads the
    triangular system with P + V right sides, the product with its corrections, and three with the state.
    """
    p, v = shape.key_dim, shape.value_dim
    of_value = CHUNK * (p + v) + 2 * CHUNK * v + 6 * p * v
    return tokens * heads * (4 * CHUNK * p + shape.values * of_value + 2 * shape.taps * shape.channels)


def delta_workspace(tokens: int, sequences: int, heads: int, shape: DeltaShape) -> int:
    """Bytes that a backward of the rule needs for the moment, about: it makes in fp32 what the chunks of all
    tokens need, the last of each sequence half filled, seven and a half times, and keeps the state of each
    chunk.
    """
    places = tokens + sequences * CHUNK // 2
    keys, values = shape.key_dim, shape.value_dim
    numbers = 15 * (CHUNK + keys + values) // 2 + 3 * keys * values // CHUNK
    return 4 * places * heads * shape.values * numbers


def delta_bytes(tokens: int, heads: int, shape: DeltaShape, element: int) -> int:
    """Bytes that the rule must read and write: what it reads of a token and what it puts out, once each, and
    in fp32 the state of each chunk, written and read.
    """
    states = 2 * 4 * shape.key_dim * shape.out // CHUNK
    return tokens * heads * ((shape.width + shape.out) * element + states)
