"""Pieces that statements of layers are made of: weights and FLOPs of linears, and exchanges of attention."""

from ops.linear import linear_flops
from parallel.work import Attended, Collective, Weight, all_to_all

Linears = tuple[tuple[int, int], ...]
"""Inputs and outputs of linear layers."""


def plain(*elements: int) -> tuple[Weight, ...]:
    """Parameters of so many elements, the same on all tensor-parallel ranks or divided among them."""
    return tuple(Weight(count) for count in elements)


def linear_weights(inputs: int, outputs: int, bias: int) -> tuple[Weight, ...]:
    """A linear layer's weight and, unless it has none, its bias of so many elements."""
    return (Weight(inputs * outputs, matrix=True), *plain(*(bias,) * bool(bias)))


def norm_weights(hidden: int, norm: str, partial: bool = False) -> tuple[Weight, ...]:
    """Parameters of one norm; `partial` where tensor-parallel ranks see different tokens."""
    return (Weight(hidden, partial=partial),) * (2 if norm == "LayerNorm" else 1)


def linears_flops(linears: Linears, tokens: int, tp: int) -> int:
    """Forward FLOPs of linears on each of `tp` ranks that share them."""
    return sum(linear_flops(tokens, inputs, outputs) for inputs, outputs in linears) // tp


def exchanges(seen: Attended, element: int, layers: int, *, forward: bool) -> tuple[Collective, ...]:
    """The two exchanges of shared sequences in each layer's attention, or their transposes."""
    counts = (seen.into, seen.out) if forward else (seen.out_back, seen.into_back)
    return tuple(
        exchange
        for of in counts
        if of
        for exchange in all_to_all("pool", [count * element for count in of], layers)
    )
