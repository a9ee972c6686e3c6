"""Products of rows in groups, each group with a matrix of its own: the linears of experts.

On a GPU it is torch's grouped product, which takes as many launches for many groups as for one, and reads on
the device where groups end. Elsewhere, and for numbers that torch's does not take, one product a group says
the same.

Shapes: R rows, E groups, n inputs, m outputs; `ends` [E] int32, not falling: group e has the rows from the
end of the one before it (0 for the first) to ends[e], and the last ends at R. Groups may be empty.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from ops.operators import operator

_ALIGNED = 16  # bytes: rows begin at a multiple, for the device's copies of tiles


def is_one_product(dtype: torch.dtype, *widths: int) -> bool:
    """Whether this machine's GPU multiplies rows of these widths in one product, whatever the groups. torch's
    kernel is for Hopper and later (GroupMM.cu).
    """
    even = all(width * dtype.itemsize % _ALIGNED == 0 for width in widths)
    return dtype == torch.bfloat16 and even and torch.cuda.get_device_capability() >= (9, 0)


def grouped_linear(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """rows [R, n], weights [E, m, n] → [R, m]: each row by the matrix of its group."""
    return grouped_mm(rows, weight.transpose(1, 2), ends)


def grouped_inputs(grads: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Gradients of outputs [R, m], weights [E, m, n] → those of rows [R, n]."""
    return grouped_mm(grads, weight, ends)


def grouped_weights(rows: torch.Tensor, grads: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """rows [R, n], gradients of outputs [R, m] → those of weights [E, m, n], zero where a group is empty."""
    return grouped_mm(grads.t(), rows, ends)


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """a [R, n], b [E, n, m] → [R, m], groups of rows; or a [m, R], b [R, n] → [E, m, n], groups of what is
    summed.
    """
    if a.numel() == 0:  # no row came here
        return torch.zeros_like(_empty(a, b, ends))
    if a.is_cuda and a.dtype == torch.bfloat16 and _is_aligned(a) and _is_aligned(b):
        return F.grouped_mm(a, b, offs=ends)
    out = _empty(a, b, ends)
    for group, (start, stop) in enumerate(pairwise([0, *ends.tolist()])):
        if b.dim() == 3:
            torch.mm(a[start:stop], b[group], out=out[start:stop])
        else:
            torch.mm(a[:, start:stop], b[start:stop], out=out[group])
    return out


def _empty(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    shape = (a.shape[0], b.shape[2]) if b.dim() == 3 else (len(ends), a.shape[0], b.shape[1])
    return a.new_empty(shape)


grouped_mm = operator(_grouped_mm, _empty)


@register_flop_formula(torch.ops.omni.grouped_mm)
def _flops(a: tuple[int, ...], b: tuple[int, ...], ends: tuple[int, ...], **unused: Any) -> int:
    return 2 * a[0] * a[1] * b[-1]


def _is_aligned(x: torch.Tensor) -> bool:
    return all(step == 1 or step * x.element_size() % _ALIGNED == 0 for step in x.stride())
