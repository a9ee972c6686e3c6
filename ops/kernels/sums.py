"""The sum of a stream and what is added to it.

Shapes: T tokens, D model width.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # numbers of a row that a program has


@triton.jit
def _add(stream, out, bias, total, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = row * width + column
    added = tl.load(out + place, inside).to(tl.float32) + tl.load(bias + column, inside).to(tl.float32)
    numbers = tl.load(stream + place, inside).to(tl.float32) + added
    tl.store(total + place, numbers.to(total.dtype.element_ty), inside)


def summed(stream: torch.Tensor, out: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """stream [T, D] and out [T, D], contiguous, and bias [D] → stream + (out + bias), rounded once."""
    rows, width = stream.shape
    total = torch.empty_like(stream)
    if total.numel():
        _add[(rows, triton.cdiv(width, _BLOCK))](stream, out, bias, total, width, _BLOCK)
    return total
