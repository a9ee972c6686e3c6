"""Normalisation layers that megatron-core's specs accept, on any device.

Shapes: T tokens, D model width.
"""

from typing import Any

import torch
import torch.nn.functional as F

from ops.names import NORMS


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm over the last dimension, as `config.normalization` says.

    Its parameters are marked `sequence_parallel` when the layout shards the tokens of a tensor-parallel
    group: each rank then sees only part of their gradient, and finalisation sums them. megatron's own
    CPU norm lacks the mark, so its gradients would be silently partial. With `layernorm_zero_centered_gamma`
    it multiplies by 1 + weight.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        if config.normalization not in NORMS:
            raise ValueError(f"normalization={config.normalization!r}: choose one of {', '.join(NORMS)}")
        self.shape = (hidden_size,)
        self.eps = eps
        self.offset = float(getattr(config, "layernorm_zero_centered_gamma", False))
        start = torch.full((hidden_size,), 1.0 - self.offset, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(start)
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] → [..., D]."""
        weight = self.weight + self.offset if self.offset else self.weight
        if self.bias is None:
            return F.rms_norm(x, self.shape, weight, self.eps)
        return F.layer_norm(x, self.shape, weight, self.bias, self.eps)
