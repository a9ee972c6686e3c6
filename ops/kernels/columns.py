"""Sums over columns of what the programs of a backward leave for parameters.

Shapes: P programs, n parameters of D numbers each.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_SUMMED = (64, 32)  # rows and columns of partial sums that a program reads at once
_MOST = 4  # parameters


@triton.jit
def _add(total, column, in_width, numbers):  # type: ignore[no-untyped-def]
    before = tl.load(total + column, in_width, 0.0).to(tl.float32)
    tl.store(total + column, (before + numbers).to(total.dtype.element_ty), in_width)


@triton.jit
def _add_columns(  # type: ignore[no-untyped-def]
    partials, first, second, third, fourth, rows, width,
    COUNT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    parameter = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_width = column < width
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, rows, ROWS):
        row = tl.arange(0, ROWS) + start
        inside = (row < rows)[:, None] & in_width[None, :]
        place = (row * COUNT + parameter) * width
        sums += tl.load(partials + place[:, None] + column[None, :], inside, 0.0)
    numbers = tl.sum(sums, 0)
    if parameter == 0:
        _add(first, column, in_width, numbers)
    elif parameter == 1:
        if second is not None:
            _add(second, column, in_width, numbers)
    elif parameter == 2:
        if third is not None:
            _add(third, column, in_width, numbers)
    elif fourth is not None:
        _add(fourth, column, in_width, numbers)


def add_columns(partials: torch.Tensor, totals: Sequence[torch.Tensor]) -> None:
    """Add to the n `totals` [D] what programs left for each, [P, n, D] in fp32, contiguous and not empty; the
    order of the sums depends on P and D alone.
    """
    programs, count, width = partials.shape
    assert count == len(totals) <= _MOST
    given = [*totals, *[None] * (_MOST - count)]
    _add_columns[(triton.cdiv(width, _SUMMED[1]), count)](partials, *given, programs, width, count, *_SUMMED)
