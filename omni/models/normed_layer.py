"""A transformer layer that norms what attention and feed-forward put out, before it is added to the stream.

megatron-core's layer has norms ahead of both alone. Gemma 3 has four norms a layer; OLMo 2 and 3 have these
two, and none ahead.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ops.norm import Norm
from parallel.megatron import TransformerConfig, TransformerLayer


class NormedLayer(TransformerLayer):
    """megatron-core's layer, with a norm of each half's output."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_attention_layernorm, self.post_mlp_layernorm = (
            Norm(config, config.hidden_size, eps=config.layernorm_epsilon) for _ in range(2)
        )
        for half, norm in (
            ("self_attn_bda", self.post_attention_layernorm),
            ("mlp_bda", self.post_mlp_layernorm),
        ):
            setattr(self, half, partial(_normed, norm, getattr(self, half)))


def _normed(norm: Norm, adding: Callable[..., Any], training: bool, fused: bool) -> Callable[..., Any]:
    """Return what adds a half's output, with its bias, to the stream, normed."""
    add = adding(training, fused)

    def adds(
        output: tuple[torch.Tensor, torch.Tensor | None], stream: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        x, bias = output
        added: torch.Tensor = add((norm(x if bias is None else x + bias), None), stream, dropout)
        return added

    return adds
