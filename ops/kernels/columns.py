"""Sums over columns of what the programs of a backward leave for parameters.

Shapes: P programs, N numbers of each.
"""

import torch
import triton
import triton.language as tl

_SUMMED = (64, 32)  # rows and columns of partial sums that a program reads at once


@triton.jit
def _column_sums(partials, out, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_width = column < width
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, rows, ROWS):
        row = tl.arange(0, ROWS) + first
        inside = (row < rows)[:, None] & in_width[None, :]
        total += tl.load(partials + row[:, None] * width + column[None, :], inside, 0.0)
    tl.store(out + column, tl.sum(total, 0), in_width)


def column_sums(partials: torch.Tensor) -> torch.Tensor:
    """[P, N] in fp32, contiguous, neither of them 0 → [N], added up in an order that P and N settle."""
    programs, numbers = partials.shape
    out = partials.new_empty(numbers)
    _column_sums[(triton.cdiv(numbers, _SUMMED[1]),)](partials, out, programs, numbers, *_SUMMED)
    return out
