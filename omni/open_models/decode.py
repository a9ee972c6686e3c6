"""From the numbers of a file to ours: experts out of one tensor, and quantised numbers."""

import torch

from omni.open_models.rules import Slab

# The eight values of E2M1, and the same below zero (OCP Microscaling Formats 1.0, section 5.3.3).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of E8M0 scales


def out_of_slab(theirs: torch.Tensor, slab: Slab) -> torch.Tensor:
    """Ours, of what a slab holds of one expert: a matrix or a vector."""
    rows = theirs.t() if slab.transposed else theirs
    return torch.cat([rows[part :: slab.parts] for part in range(slab.parts)])


def into_slab(ours: torch.Tensor, slab: Slab) -> torch.Tensor:
    """Undo `out_of_slab`."""
    rows = torch.stack(ours.chunk(slab.parts), dim=1).flatten(0, 1)
    return rows.t() if slab.transposed else rows


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Blocks [..., n, 16] and scales [..., n] of bytes → [..., 32 · n] in fp32. The low four bits of a byte
    come first; every value is exact in bf16.
    """
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    numbers = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    found = torch.ldexp(values[numbers.int()], (scales.int() - _BIAS).unsqueeze(-1))
    return found.flatten(-2)


def times_scales(
    values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], first: tuple[int, int]
) -> torch.Tensor:
    """Numbers [m, n] of which the first is row and column `first` of a matrix, times its blocks' scales."""
    rows, columns = (
        torch.arange(start, start + size) // of
        for start, size, of in zip(first, values.shape, block, strict=True)
    )
    return values.float() * scales.float()[rows][:, columns]
