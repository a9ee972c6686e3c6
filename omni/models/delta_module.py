"""The gated delta net as a layer's first half, in the place of attention: packed, by heads.

One linear makes all that the rule reads of a token, and a gate; the rule's output is normed by head, gated
and brought back to the stream (Gated Delta Networks, Yang et al., 2024, section 3.4, with its gates in full).

Tensor-parallel ranks divide the heads of keys, each with its values. The rows of `linear_in` and of the
convolution lie head of keys by head of keys, so a rank's are neighbours: of each head its query, key and
values, then b, a, and the gates of its values; the convolution has channels for the first three.

Shapes: T tokens, D width; the others as in `ops/delta.py`, G being the heads of this rank.
"""

from typing import Any

import torch
import torch.nn.functional as F

from ops.delta import continued_delta
from ops.delta_shape import DeltaHeads
from parallel.megatron import (
    ColumnParallelLinear,
    MegatronModule,
    ProcessGroupCollection,
    RowParallelLinear,
    TransformerConfig,
)
from parallel.packed import PackedTokens
from parallel.sharded_delta import sharded_delta


class GatedNorm(torch.nn.Module):
    """RMSNorm of each head of values, times SiLU of its gate. Tensor-parallel ranks norm different heads, so
    the gradient of the weight, which all heads share, is summed over them.
    """

    def __init__(self, config: TransformerConfig, size: int) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """[..., V] → [..., V]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps) * F.silu(gate)


class GatedDeltaNet(MegatronModule):
    """The first half of a layer. `heads` are those of the whole model."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        heads: DeltaHeads,
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        shape, own = heads.shape, heads.over(pg_collection.tp.size())
        self.heads, self.pool = own, getattr(pg_collection, "pool", None)
        linear = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "tp_group": pg_collection.tp,
        }
        rows = heads.count * (shape.width + shape.out)
        self.linear_in = ColumnParallelLinear(config.hidden_size, rows, gather_output=False, **linear)
        self.conv_weight = _divided(config, own.count * shape.channels, 1, shape.taps)
        self.A_log = _divided(config, own.count * shape.values)
        self.dt_bias = _divided(config, own.count * shape.values)
        self.norm = GatedNorm(config, shape.value_dim)
        self.linear_proj = RowParallelLinear(
            heads.count * shape.out,
            config.hidden_size,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedTokens,
        **unused: Any,
    ) -> tuple[torch.Tensor, None]:
        """[T / tp, 1, D] → the same, and no bias, as megatron's attention returns them."""
        plan, count, shape = packed_seq_params.delta, self.heads.count, self.heads.shape
        assert plan is not None, "the pack is not described for layers with a delta net"
        mixed, _ = self.linear_in(hidden_states)
        x, gate = mixed.squeeze(1).unflatten(-1, (count, -1)).split([shape.width, shape.out], -1)
        conv, a_log, dt_bias = (
            of.unflatten(0, (count, -1)) for of in (self.conv_weight.squeeze(1), self.A_log, self.dt_bias)
        )
        if (recalled := packed_seq_params.recalled) is None:
            out = sharded_delta(x, conv, a_log, dt_bias, plan, self.pool)
        else:  # no ranks share a sequence that passes continue
            before = recalled.recall(self)
            out, after = continued_delta(x, conv, a_log, dt_bias, plan.local, shape, before)
            recalled.keep(self, after)
        values = (shape.values, shape.value_dim)
        normed = self.norm(out.unflatten(-1, values), gate.unflatten(-1, values))
        projected, _ = self.linear_proj(normed.flatten(1).unsqueeze(1))
        return projected, None


def _divided(config: TransformerConfig, *size: int) -> torch.nn.Parameter:
    """A weight whose rows tensor-parallel ranks divide, marked as `mark_parallel` marks those of linears."""
    parameter = torch.nn.Parameter(torch.zeros(*size, dtype=config.params_dtype))
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.partition_dim = 0  # type: ignore[attr-defined]
    return parameter
