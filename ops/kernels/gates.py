"""What is between the linears of a feed-forward, and its gradients: the product of a gate and what it lets
through, or the activation of a sum with a bias; and gates of what attention puts out. Numbers are computed in
fp32 and rounded once.

Shapes: T tokens, F width, P programs that walk the rows of a backward; a row of a gate's `x` [T, 2F] holds
the F gates and then the F others.
"""

import torch
import triton
import triton.language as tl

from ops.kernels.columns import add_columns

_BLOCK = 1024  # numbers of a row that a program has
_PROGRAMS = 528  # of a backward that sums over rows: four for each multiprocessor of an H100
_WALKED = (8, 256)  # rows and columns that such a program has at once
_WARPS = 8  # of such a program, so that a thread has two loads of eight numbers under way


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


@triton.jit
def _biased(x, bias, out, width, KIND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = row * width + column
    total = tl.load(x + place, inside).to(tl.float32) + tl.load(bias + column, inside).to(tl.float32)
    tl.store(out + place, _activated(total, KIND)[0].to(out.dtype.element_ty), inside)


@triton.jit
def _biased_backward(  # type: ignore[no-untyped-def]
    grad, x, bias, out, partials, rows, width, KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_width = column < width
    shift = tl.load(bias + column, in_width, 0.0).to(tl.float32)[None, :]
    of_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = tl.arange(0, ROWS).to(tl.int64) + first
        inside = (row < rows)[:, None] & in_width[None, :]
        place = row[:, None] * width + column[None, :]
        # Outside, `of_out` is 0, so nothing there gets into a sum.
        of_out = tl.load(grad + place, inside, 0.0).to(tl.float32)
        total = tl.load(x + place, inside, 0.0).to(tl.float32) + shift
        result = of_out * _activated(total, KIND)[1]
        of_bias += result
        tl.store(out + place, result.to(out.dtype.element_ty), inside)
    tl.store(partials + tl.program_id(0) * width + column, tl.sum(of_bias, 0), in_width)


@triton.jit
def _let_through(  # type: ignore[no-untyped-def]
    x, gate, grad, out, of_gate, width, by_token, by_group, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """What gates let through of x or, where there is `grad`, of that, with the gradient of the gates. Gates
    of a token lie in groups of GROUP numbers.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = token * width + column
    at = gate + token * by_token + column // GROUP * by_group + column % GROUP
    share = tl.sigmoid(tl.load(at, inside).to(tl.float32))
    numbers = tl.load(x + place, inside).to(tl.float32)
    if grad is None:
        tl.store(out + place, (numbers * share).to(out.dtype.element_ty), inside)
    else:
        of_product = tl.load(grad + place, inside).to(tl.float32)
        tl.store(out + place, (of_product * share).to(out.dtype.element_ty), inside)
        of_share = of_product * numbers * share * (1.0 - share)
        tl.store(of_gate + place, of_share.to(of_gate.dtype.element_ty), inside)


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


def biased(x: torch.Tensor, bias: torch.Tensor, kind: str) -> torch.Tensor:
    """x [T, F], contiguous, and bias [F] → [T, F]. See `ops.gates.biased`."""
    rows, width = x.shape
    out = torch.empty_like(x)
    if out.numel():
        _biased[(rows, triton.cdiv(width, _BLOCK))](x, bias, out, width, kind, _BLOCK)
    return out


def biased_backward(
    grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, kind: str, total: torch.Tensor
) -> torch.Tensor:
    """grad [T, F] of the activation and x [T, F], contiguous, and bias [F] → the gradient of x; that of the
    bias is added to `total` [F].

    Sums over rows are added up in an order that depends on T and F alone.
    """
    rows, width = x.shape
    out = torch.empty_like(x)
    if not out.numel():
        return out
    at_once, block = _WALKED
    blocks = triton.cdiv(width, block)
    programs = min(max(_PROGRAMS // blocks, 1), triton.cdiv(rows, at_once))
    partials = torch.empty(programs, 1, width, dtype=torch.float32, device=x.device)
    _biased_backward[(programs, blocks)](
        grad, x, bias, out, partials, rows, width, kind, at_once, block, num_warps=_WARPS
    )
    add_columns(partials, [total])
    return out


def let_through(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x [T, K·G·H], contiguous, and gate [T, K, G, H], in its last two dimensions → x · sigmoid(gate)."""
    out = torch.empty_like(x)
    _launch(x, gate, None, out, None)
    return out


def let_through_backward(
    grad: torch.Tensor, x: torch.Tensor, gate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """grad and x [T, K·G·H], contiguous, and gate as in `let_through` → the gradients of x and gate."""
    out, of_gate = torch.empty_like(x), gate.new_empty(gate.shape)
    _launch(x, gate, grad, out, of_gate)
    return out, of_gate


def _launch(
    x: torch.Tensor,
    gate: torch.Tensor,
    grad: torch.Tensor | None,
    out: torch.Tensor,
    of_gate: torch.Tensor | None,
) -> None:
    rows, width = x.shape
    if x.numel():
        steps = gate.stride()[:2]
        _let_through[(rows, triton.cdiv(width, _BLOCK))](
            x, gate, grad, out, of_gate, width, *steps, gate.shape[2] * gate.shape[3], _BLOCK
        )
