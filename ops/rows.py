"""Row gather and scatter by index: the tensor arithmetic of the boundary.

Shapes: T tokens, R rows, D model width.
"""

import torch


def gather_rows(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """values [T, D], index [R] → [R, D], contiguous, in the order of `index`."""
    return values.index_select(0, index)


def scatter_rows(base: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return `base` [T, D] with `rows` [R, D] written at `index` [R] (distinct): differentiable in both."""
    return base.index_copy(0, index, rows)
