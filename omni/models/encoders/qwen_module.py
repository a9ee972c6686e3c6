"""The module of Qwen's vision towers: a transformer encoder whose rows may come in the order of windows.

Shapes: T tokens, V values of a token, R rows, D width of the LLM.
"""

from dataclasses import dataclass

import torch

from omni.models.encoders.transformer_module import TransformerModule
from parallel.packed import PackedTokens


@dataclass
class InWindows(PackedTokens):
    """Packed items whose tokens are in the order of windows; `order` [R] says which row is the first of a
    picture, the second, and so on.
    """

    order: torch.Tensor | None = None


class QwenViTModule(TransformerModule):
    """Layers and projectors; rows go back to their places."""

    def forward(self, values: torch.Tensor, positions: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        """values [T, V], positions [T, 4] of packed items → rows [R, D], item by item and row by row of each
        picture, and as many again for each tap.
        """
        rows = super().forward(values, positions, packed)
        if not isinstance(packed, InWindows):
            return rows
        assert packed.order is not None
        return rows.unflatten(0, (-1, len(packed.order))).index_select(1, packed.order).flatten(0, 1)
