"""A transformer layer: megatron-core's modules, with what is between its halves in few operators.

megatron-core's layer has norms ahead of both halves alone. Gemma 3 has four norms a layer, OLMo 2 and 3 have
two, of what the halves put out before it is added to the stream, and none ahead.

Shapes: t tokens of a rank between halves, D width.
"""

from dataclasses import replace
from typing import Any

import torch

from omni.models.feed_forward import FeedForward
from ops.norm import Norm, with_bias
from parallel.megatron import (
    MLP,
    IdentityOp,
    ModuleSpec,
    ProcessGroupCollection,
    TransformerConfig,
    TransformerLayer,
)
from parallel.packed import PackedTokens


class PackedLayer(TransformerLayer):
    """A layer whose norms are ahead of its halves."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        *args: Any,
        pg_collection: ProcessGroupCollection,
        **kwargs: Any,
    ) -> None:
        if submodules.mlp.module is MLP:
            spec = ModuleSpec(FeedForward, {"tp_group": pg_collection.tp}, submodules.mlp.submodules)
            submodules = replace(submodules, mlp=spec)
        super().__init__(config, submodules, *args, pg_collection=pg_collection, **kwargs)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedTokens,
        padding_mask: torch.Tensor | None = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, None]:
        """[t, 1, D] → the same, and no context. The tail under `padding_mask` is not counted by experts."""
        stream, normed = self.input_layernorm.enter(hidden_states)
        attended = self.self_attention(normed, packed_seq_params=packed_seq_params)
        del normed  # each goes as soon as nobody needs it
        stream, normed = self.pre_mlp_layernorm.enter_sum(stream, *attended)
        del attended
        out = self.mlp(normed, padding_mask=padding_mask)
        del normed
        return with_bias(stream, *out), None


class NormedLayer(PackedLayer):
    """A layer that norms what its halves put out; ahead of them it has norms or does nothing."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_attention_layernorm, self.post_mlp_layernorm = (
            Norm(config, config.hidden_size, eps=config.layernorm_epsilon) for _ in range(2)
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedTokens,
        padding_mask: torch.Tensor | None = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, None]:
        """As that of a `PackedLayer`."""
        stream, normed = _enter(self.input_layernorm, hidden_states)
        attended = self.self_attention(normed, packed_seq_params=packed_seq_params)
        del normed  # each goes as soon as nobody needs it
        stream = self.post_attention_layernorm.leave(stream, *attended)
        del attended
        stream, normed = _enter(self.pre_mlp_layernorm, stream)
        fed = self.mlp(normed, padding_mask=padding_mask)
        del normed
        return self.post_mlp_layernorm.leave(stream, *fed), None


def _enter(norm: Norm | IdentityOp, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A stream [t, 1, D], to go around a half of the layer and into it, through a norm if there is one."""
    return norm.enter(stream) if isinstance(norm, Norm) else (stream, stream)
