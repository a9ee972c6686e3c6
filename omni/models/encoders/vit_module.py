"""The module of the image encoder: embedding, transformer, merging of windows, projector.

Shapes: T patches, P values of a patch, E width of the encoder, R rows, D width of the LLM.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from omni.models.encoders.vit import ViTConfig
from omni.models.layers import encoder_config, layer_submodules
from ops.norm import Norm
from parallel.megatron import ProcessGroupCollection, TransformerBlock
from parallel.packed import PackedTokens


class ViT(torch.nn.Module):
    """Patches to rows: linear embedding, transformer, merging of windows, two-layer projector."""

    def __init__(
        self, config: ViTConfig, width: int, dtype: torch.dtype, groups: ProcessGroupCollection
    ) -> None:
        super().__init__()
        self.sizes = config
        self.width = width
        self.dtype = dtype
        self.config = encoder_config(config, dtype, groups.tp.size())
        patch_values = config.patch**2 * config.channels
        merged = config.hidden * config.merge**2
        self.patch_linear = torch.nn.Linear(patch_values, config.hidden, dtype=dtype)
        self.row_embedding = torch.nn.Embedding(config.max_side, config.hidden, dtype=dtype)
        self.column_embedding = torch.nn.Embedding(config.max_side, config.hidden, dtype=dtype)
        edges = [0, *config.taps, config.layers]
        blocks = [
            TransformerBlock(
                self.config,
                layer_submodules(stop - start, config.norm, causal=False),
                post_layer_norm=False,
                pg_collection=groups,
            )
            for start, stop in pairwise(edges)
        ]
        self.block, self.tapped = blocks[0], torch.nn.ModuleList(blocks[1:])
        self.final_norm = Norm(self.config, config.hidden)
        self.projector_in = torch.nn.Linear(merged, merged, dtype=dtype)
        self.projector_out = torch.nn.Linear(merged, width, dtype=dtype)
        self.tap_projectors = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {
                    "norm": Norm(self.config, config.hidden),
                    "linear_in": torch.nn.Linear(merged, merged, dtype=dtype),
                    "linear_out": torch.nn.Linear(merged, width, dtype=dtype),
                }
            )
            for _ in config.taps
        )

    def forward(self, values: torch.Tensor, positions: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        """values [T, P], positions [T, 2] of packed images → rows [R, D], image by image, and as many again
        for each tap.
        """
        hidden: Any = self.patch_linear(values.to(self.dtype))
        hidden = hidden + self.row_embedding(positions[:, 0]) + self.column_embedding(positions[:, 1])
        hidden = self.block(hidden.unsqueeze(1), None, packed_seq_params=packed)
        tapped = []
        for projector, block in zip(self.tap_projectors, self.tapped, strict=True):
            assert isinstance(projector, torch.nn.ModuleDict)
            tapped.append(self._rows(hidden.squeeze(1), *projector.values()))
            hidden = block(hidden, None, packed_seq_params=packed)
        rows = self._rows(hidden.squeeze(1), self.final_norm, self.projector_in, self.projector_out)
        return torch.cat([rows, *tapped]) if tapped else rows

    def _rows(self, hidden: torch.Tensor, norm: Any, linear_in: Any, linear_out: Any) -> torch.Tensor:
        """Patches [T, E] → rows [R, D], a merge window each."""
        merged = norm(hidden).reshape(-1, self.sizes.hidden * self.sizes.merge**2)
        rows: torch.Tensor = linear_out(F.gelu(linear_in(merged)))
        return rows
