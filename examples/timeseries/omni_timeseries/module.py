"""The module of the time-series encoder, in plain torch but for attention, which is the platform's.

Shapes: T tokens, P values of a token, E width of the encoder, N heads, H head size, R rows, D width of the
LLM.
"""

import torch
import torch.nn.functional as F
from torch import nn

from omni.encoder_modules import (
    PackedCoreAttention,
    PackedTokens,
    ProcessGroupCollection,
    TransformerConfig,
    transformer_config,
)
from omni_timeseries.encoder import TimeSeriesConfig, layer_sizes


class TimeSeriesTransformer(nn.Module):
    """Patches to rows: linear embedding, transformer, merging of neighbours, two-layer projector.

    The platform draws the initial weights by parameter name, so that they do not depend on the layout: what
    has one dimension becomes 0, or 1 for weights with "norm" in their name; `linear_proj` and `linear_fc2`,
    which add to the residual stream, are scaled down by depth. It reads depth and precision from `config`.
    """

    def __init__(
        self, sizes: TimeSeriesConfig, width: int, dtype: torch.dtype, groups: ProcessGroupCollection
    ) -> None:
        super().__init__()
        self.merge = sizes.merge
        self.config = transformer_config(layer_sizes(sizes), dtype)
        merged = sizes.hidden * sizes.merge
        self.patch_linear = nn.Linear(sizes.patch * sizes.channels, sizes.hidden, dtype=dtype)
        self.layers = nn.ModuleList(Layer(self.config, dtype, groups) for _ in range(sizes.layers))
        self.final_norm = nn.RMSNorm(sizes.hidden, 1e-5, dtype=dtype)
        self.projector_in = nn.Linear(merged, merged, dtype=dtype)
        self.projector_out = nn.Linear(merged, width, dtype=dtype)

    def forward(self, values: torch.Tensor, positions: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        """values [T, P] of packed series → rows [R, D], series by series. `packed` holds the positions."""
        hidden = self.patch_linear(values.to(self.patch_linear.weight.dtype))
        for layer in self.layers:
            hidden = layer(hidden, packed)
        merged = self.final_norm(hidden).unflatten(0, (-1, self.merge)).flatten(1)
        rows: torch.Tensor = self.projector_out(F.gelu(self.projector_in(merged)))
        return rows


class Layer(nn.Module):
    """A transformer layer, norms first. The platform's attention applies rotary and keeps items apart."""

    def __init__(self, config: TransformerConfig, dtype: torch.dtype, groups: ProcessGroupCollection) -> None:
        super().__init__()
        width, ffn = config.hidden_size, config.ffn_hidden_size
        self.heads = config.num_attention_heads
        self.attention_norm = nn.RMSNorm(width, 1e-5, dtype=dtype)
        self.linear_qkv = nn.Linear(width, 3 * width, dtype=dtype)
        self.attention = PackedCoreAttention(config, pg_collection=groups)
        self.linear_proj = nn.Linear(width, width, dtype=dtype)
        self.mlp_norm = nn.RMSNorm(width, 1e-5, dtype=dtype)
        self.linear_fc1 = nn.Linear(width, ffn, dtype=dtype)
        self.linear_fc2 = nn.Linear(ffn, width, dtype=dtype)

    def forward(self, hidden: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        """[T, E] → [T, E]."""
        qkv = self.linear_qkv(self.attention_norm(hidden)).unflatten(1, (3, self.heads, -1))
        query, key, value = qkv.unbind(1)  # each [T, N, H]
        hidden = hidden + self.linear_proj(self.attention(query, key, value, None, packed_seq_params=packed))
        return hidden + self.linear_fc2(F.gelu(self.linear_fc1(self.mlp_norm(hidden))))
