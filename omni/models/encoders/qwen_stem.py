"""The embedding of Qwen's vision towers, its work and its module: a linear of each patch, and a table.

The table is a square grid of learned vectors, stretched over a picture of any sides, corners on corners. A
patch is given the four vectors around its place, weighted by how near they are (bilinear). The place follows
from the patch's row and column and the sides of its grid, so a rank computes it of any part of an item.

Shapes: T patches, V values of a patch, E width of the tower.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from omni.models.pieces import plain
from parallel.work import FP32, INDEX, Grad, Load, Weight, Work

if TYPE_CHECKING:
    from parallel.packed import PackedTokens

CORNERS = 4


@dataclass(frozen=True)
class InterpolatedTable:
    """A table of `side` by `side` vectors [E], of which each token adds four, weighted, to the stream."""

    side: int
    hidden: int
    element: int

    def weights(self) -> tuple[Weight, ...]:
        """All vectors."""
        return plain(self.side**2 * self.hidden)

    def forward(self, load: Load) -> Work:
        """It keeps which vectors and how much of each; the sum is made in fp32."""
        kept = CORNERS * (INDEX + FP32) * load.tokens * (not load.frozen)
        return Work(kept=kept, workspace=load.tokens * self.hidden * (2 * FP32 + self.element))

    def backward(self, load: Load, grad: Grad) -> Work:
        """Gradients of the sum and of one vector of each token, and of the table."""
        if grad is Grad.WEIGHT or load.frozen:
            return Work()
        of_tokens = load.tokens * self.hidden * (2 * FP32 + self.element)
        return Work(workspace=of_tokens + 2 * self.side**2 * self.hidden * self.element)


@dataclass(frozen=True)
class Reordered:
    """Rows of `tokens` tokens each, [R, D], that are put into another order."""

    tokens: int
    width: int
    element: int

    def weights(self) -> tuple[Weight, ...]:
        """None."""
        return ()

    def forward(self, load: Load) -> Work:
        """Rows before, while those after are made."""
        return Work(workspace=load.tokens // self.tokens * self.width * self.element)

    def backward(self, load: Load, grad: Grad) -> Work:
        """The same of gradients."""
        return self.forward(load) if grad is not Grad.WEIGHT else Work()


class PatchLinear(torch.nn.Module):
    """A linear of all values of a patch, with a weight [E, channels, frames, rows, columns] as published."""

    def __init__(self, shape: tuple[int, ...], hidden: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden, *shape, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(hidden, dtype=dtype)) if bias else None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[T, V] → [T, E]."""
        return F.linear(values, self.weight.flatten(1), self.bias)


class QwenStem(torch.nn.Module):
    """A linear, and what a table of `side` by `side` says of places, none if 0."""

    def __init__(
        self, shape: tuple[int, ...], hidden: int, bias: bool, side: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.side = side
        self.patch_linear = PatchLinear(shape, hidden, bias, dtype)
        if side:
            self.position_embedding = torch.nn.Embedding(side**2, hidden, dtype=dtype)

    def forward(self, values: torch.Tensor, positions: torch.Tensor, packed: "PackedTokens") -> torch.Tensor:
        """values [T, V], positions [T, 4]: (row, column, rows, columns) → [T, E]."""
        hidden: torch.Tensor = self.patch_linear(values)
        if not self.side:
            return hidden
        places, shares = corners(positions, self.side)
        added = sum(
            self.position_embedding(places[:, corner]) * shares[:, corner, None] for corner in range(CORNERS)
        )
        return hidden + added.to(hidden.dtype)


def corners(positions: torch.Tensor, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of (row, column, rows, columns), int64 [T, 4], the numbers of the four vectors around each place in a
    table of `side` by `side`, int64 [T, 4], and the share of each, float32 [T, 4].
    """
    place = positions[:, :2].float() * (side - 1) / (positions[:, 2:] - 1).clamp(min=1)
    low = place.floor()
    above = place - low
    near = torch.stack([low.long(), (low.long() + 1).clamp(max=side - 1)])  # [2, T, 2]
    share = torch.stack([1 - above, above])
    numbers = near[:, None, :, 0] * side + near[None, :, :, 1]  # [2, 2, T]
    shares = share[:, None, :, 0] * share[None, :, :, 1]
    return numbers.flatten(0, 1).T, shares.flatten(0, 1).T
