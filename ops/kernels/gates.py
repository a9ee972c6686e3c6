"""The product of a gate and what it lets through, and its gradient.

Shapes: T tokens, F width; a row of `x` [T, 2F] holds the F gates and then the F others.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # numbers of a row that a program has


@triton.jit
def _normal(x):  # type: ignore[no-untyped-def]
    """The share of a normal distribution below x."""
    return 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _activated(gate, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The activation of a gate and its derivative."""
    if KIND == "silu":
        share = tl.sigmoid(gate)
        slope = share * (1.0 + gate * (1.0 - share))
    elif KIND == "quick_gelu":
        share = tl.sigmoid(1.702 * gate)
        slope = share * (1.0 + 1.702 * gate * (1.0 - share))
    elif KIND == "gelu":
        share = _normal(gate)
        slope = share + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    else:
        tl.static_assert(KIND == "gelu_tanh")
        bent = _tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))
        share = 0.5 * (1.0 + bent)
        slope = share + 0.5 * gate * (1.0 - bent * bent) * 0.7978845608028654 * (1.0 + 0.134145 * gate * gate)
    return gate * share, slope


@triton.jit
def _clamped(gate, other, most):  # type: ignore[no-untyped-def]
    """Both within their bounds, as they are where they are no numbers: a minimum would hide that."""
    gate = tl.where(gate > most, most, gate)
    return gate, tl.where(other > most, most, tl.where(other < -most, -most, other))


@triton.jit
def _forward(x, out, width, most, offset, KIND: tl.constexpr, CLAMPED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    gate = tl.load(x + row * 2 * width + place, inside).to(tl.float32)
    other = tl.load(x + (row * 2 + 1) * width + place, inside).to(tl.float32)
    if CLAMPED:
        gate, other = _clamped(gate, other, most)
    product = _activated(gate, KIND)[0] * (other + offset)
    tl.store(out + row * width + place, product.to(out.dtype.element_ty), inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    grad, x, out, width, most, offset, KIND: tl.constexpr, CLAMPED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    gate = tl.load(x + row * 2 * width + place, inside).to(tl.float32)
    other = tl.load(x + (row * 2 + 1) * width + place, inside).to(tl.float32)
    of_product = tl.load(grad + row * width + place, inside).to(tl.float32)
    raw_gate, raw_other = gate, other
    if CLAMPED:
        gate, other = _clamped(gate, other, most)
    activated, slope = _activated(gate, KIND)
    of_gate = of_product * (other + offset) * slope
    of_other = of_product * activated
    if CLAMPED:
        of_gate = tl.where(raw_gate > most, 0.0, of_gate)
        of_other = tl.where((raw_other > most) | (raw_other < -most), 0.0, of_other)
    tl.store(out + row * 2 * width + place, of_gate.to(out.dtype.element_ty), inside)
    tl.store(out + (row * 2 + 1) * width + place, of_other.to(out.dtype.element_ty), inside)


def gated(x: torch.Tensor, kind: str, clamp: float | None, offset: float) -> torch.Tensor:
    """x [T, 2F], contiguous → [T, F]. See `ops.gates.gated`."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    if out.numel():
        most = clamp or 0.0
        _forward[(rows, triton.cdiv(width, _BLOCK))](
            x, out, width, most, offset, kind, clamp is not None, _BLOCK
        )
    return out


def gated_backward(
    grad: torch.Tensor, x: torch.Tensor, kind: str, clamp: float | None, offset: float
) -> torch.Tensor:
    """grad [T, F] of the product and x [T, 2F], contiguous → the gradient of x."""
    rows, width = grad.shape
    out = torch.empty_like(x)
    if out.numel():
        most = clamp or 0.0
        grid = (rows, triton.cdiv(width, _BLOCK))
        _backward[grid](grad, x, out, width, most, offset, kind, clamp is not None, _BLOCK)
    return out
