"""Feed-forwards: megatron-core's, with what is between their linears in one operator.

Shapes: T tokens, D width, F feed-forward.
"""

from typing import Any

import torch

from ops.gates import FUNCTIONS, biased, gated
from parallel.megatron import MLP, SharedExpertMLP, TransformerConfig

_NAMES = {activation: name for name, activation in FUNCTIONS.items()}


def activated(inner: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """What a first linear puts out, [..., F] or [..., 2F], gates first and what they let through after → what
    the second takes, [..., F].
    """
    if not config.gated_linear_unit:
        out: torch.Tensor = config.activation_func(inner)
        return out
    kind = _NAMES[config.activation_func]
    return gated(inner, kind, config.activation_func_clamp_value, config.glu_linear_offset)


class FeedForward(MLP):
    """megatron-core's. Its first bias is in the product if it is gated, else the activation adds it, which
    then has the sum of its gradients at hand.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.linear_fc1.skip_bias_add = not config.gated_linear_unit

    def forward(self, hidden_states: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[t, 1, D] → the same, and a bias that is still to be added."""
        inner, bias = self.linear_fc1(hidden_states)
        if bias is None:
            inner = activated(inner, self.config)
        else:
            inner = biased(inner, bias, _NAMES[self.config.activation_func])
        out, bias = self.linear_fc2(inner)
        return out, bias


class SharedExpert(SharedExpertMLP, FeedForward):
    """megatron-core's expert that takes every token, as such a feed-forward."""
