"""RMSNorm and LayerNorm of a stream, alone or with what is added before or behind it, and their gradients.

Numbers are computed in fp32 and rounded once. A program holds whole rows: one that is wide, or several that
are not. How wide they are is compiled in, for loads are as broad as the width divides.

Shapes: T tokens, D model width, P programs of a backward, n parameters that it makes gradients of.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ops.kernels.columns import add_columns

_NUMBERS = 4096  # numbers that a program has at once, where a row has no more
WIDEST = 16384  # rows that a program holds
_PROGRAMS = 264  # that walk the rows of a backward: two for each multiprocessor of an H100


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, out, bias, around, weight, shift, total, normed, mean, rstd, rows, eps, offset,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    in_rows, in_width = row < rows, column < WIDTH
    inside = in_rows[:, None] & in_width[None, :]
    place = row[:, None] * WIDTH + column[None, :]
    numbers = tl.load(x + place, inside, 0.0).to(tl.float32)
    if out is not None:
        added = tl.load(out + place, inside, 0.0).to(tl.float32)
        if bias is not None:
            added += tl.load(bias + column, in_width, 0.0).to(tl.float32)[None, :]
        # What is normed is what the backward reads again: the sum as it is stored.
        rounded = (numbers + added).to(total.dtype.element_ty)
        tl.store(total + place, rounded, inside)
        numbers = rounded.to(tl.float32)
    if shift is not None:
        middle = tl.sum(numbers, 1) / WIDTH
        tl.store(mean + row, middle, in_rows)
        numbers = tl.where(inside, numbers - middle[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(numbers * numbers, 1) / WIDTH + eps)
    tl.store(rstd + row, scale, in_rows)
    factor = tl.load(weight + column, in_width, 0.0).to(tl.float32) + offset
    result = numbers * scale[:, None] * factor[None, :]
    if shift is not None:
        result += tl.load(shift + column, in_width, 0.0).to(tl.float32)[None, :]
    if around is not None:
        result += tl.load(around + place, inside, 0.0).to(tl.float32)
    tl.store(normed + place, result.to(normed.dtype.element_ty), inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    grad, around, total, mean, rstd, weight, of_total, partials, rows, offset,
    LAYER: tl.constexpr, BIASED: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    in_width = column < WIDTH
    factor = tl.load(weight + column, in_width, 0.0).to(tl.float32) + offset
    of_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    of_shift = tl.zeros([ROWS, BLOCK], tl.float32)
    of_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = tl.arange(0, ROWS).to(tl.int64) + first
        in_rows = row < rows
        inside = in_rows[:, None] & in_width[None, :]
        place = row[:, None] * WIDTH + column[None, :]
        # Outside, `of_normed` and `scale` are 0, so nothing there gets into a sum.
        of_normed = tl.load(grad + place, inside, 0.0).to(tl.float32)
        numbers = tl.load(total + place, inside, 0.0).to(tl.float32)
        scale = tl.load(rstd + row, in_rows, 0.0)[:, None]
        if LAYER:
            numbers -= tl.load(mean + row, in_rows, 0.0)[:, None]
            of_shift += of_normed
        numbers *= scale
        of_weight += of_normed * numbers
        of_normed *= factor[None, :]
        along = tl.sum(of_normed * numbers, 1)[:, None] / WIDTH
        result = of_normed - numbers * along
        if LAYER:
            result -= tl.sum(of_normed, 1)[:, None] / WIDTH
        result *= scale
        if around is not None:
            result += tl.load(around + place, inside, 0.0).to(tl.float32)
        if BIASED:
            of_bias += result
        tl.store(of_total + place, result.to(of_total.dtype.element_ty), inside)
    partial = partials + tl.program_id(0) * (1 + LAYER + BIASED) * WIDTH + column
    tl.store(partial, tl.sum(of_weight, 0), in_width)
    if LAYER:
        tl.store(partial + WIDTH, tl.sum(of_shift, 0), in_width)
    if BIASED:
        tl.store(partial + (1 + LAYER) * WIDTH, tl.sum(of_bias, 0), in_width)


def norm(
    x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor | None, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, D], contiguous → its norm [T, D] and its rows' means [T] and reciprocal deviations [T] in fp32.

    With `shift` [D] it is a LayerNorm, without it an RMSNorm, whose means are [0]. The norm is multiplied by
    weight [D] + offset.
    """
    _, normed, mean, rstd = _launched(x, None, None, None, weight, shift, eps, offset)
    return normed, mean, rstd


def add_norm(
    stream: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """stream + (out + bias) [T, D], and what `norm` returns of it; all are contiguous."""
    return _launched(stream, out, bias, None, weight, shift, eps, offset)


def norm_add(
    stream: torch.Tensor,
    out: torch.Tensor,
    weight: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """stream + the norm of out [T, D], and what else `norm` returns of out; both are contiguous."""
    _, total, mean, rstd = _launched(out, None, None, stream, weight, shift, eps, offset)
    return total, mean, rstd


def norm_backward(
    grad: torch.Tensor,
    around: torch.Tensor | None,
    total: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    offset: float,
    totals: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return the gradient of a norm's operand `total` [T, D], T > 0, from that of the norm, plus the one from
    `around` it [T, D] if there is one; and add to `totals` [D] the gradients of parameters: of weight, of
    shift if there are means, and of what the operand was biased by, if there is one more. All are contiguous.

    Sums over rows are added up in an order that depends on T and D alone.
    """
    rows, width = total.shape
    layer = mean.numel() > 0
    count = len(totals)
    of_total = torch.empty_like(total)
    at_once, block, warps = _tile(width)
    programs = min(_PROGRAMS, triton.cdiv(rows, at_once))
    partials = torch.empty(programs, count, width, dtype=torch.float32, device=total.device)
    _backward[(programs,)](
        grad, around, total, mean, rstd, weight, of_total, partials, rows, offset,
        layer, count > 1 + layer, width, at_once, block, num_warps=warps,
    )  # fmt: skip
    add_columns(partials, totals)
    return of_total


def _launched(
    x: torch.Tensor,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    around: torch.Tensor | None,
    weight: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum of x and what is added to it, which is x if nothing is, and what `norm` returns of it, the norm
    with what goes `around` it.
    """
    rows, width = x.shape
    total = x if out is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if shift is not None else rstd.new_empty(0)
    if x.numel():
        at_once, block, warps = _tile(width)
        _forward[(triton.cdiv(rows, at_once),)](
            x, out, bias, around, weight, shift, total, normed, mean, rstd, rows, eps, offset,
            width, at_once, block, num_warps=warps,
        )  # fmt: skip
    return total, normed, mean, rstd


def _tile(width: int) -> tuple[int, int, int]:
    """Rows that a program has at once, their width rounded up to a power of two, and its warps."""
    assert width <= WIDEST, f"rows of {width} numbers: a program holds at most {WIDEST}"
    block = triton.next_power_of_2(width)
    return max(_NUMBERS // block, 1), block, 8 if block <= _NUMBERS else 16
