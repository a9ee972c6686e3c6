"""A norm of all heads of queries, or of keys, together, which tensor-parallel ranks divide among them."""

from typing import Any

import torch
import torch.distributed as dist

from parallel.megatron import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region


class WideNorm(torch.nn.Module):
    """RMSNorm over `heads` heads, of which this rank of `group` holds its part, as of the weight.

    The squares of each token are summed over the group, and so are the gradients of that sum.
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float,
        heads: int,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__()
        self.group, self.eps, self.width = group, eps, heads * hidden_size
        self.offset = float(config.layernorm_zero_centered_gamma)
        own = torch.full((self.width // group.size(),), 1.0 - self.offset, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(own)
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.weight.partition_dim = 0  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 1, N, H], this rank's heads → the same."""
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        own = x.flatten(-2).to(exact)
        squares = own.square().sum(-1, keepdim=True)
        if self.group.size() > 1:
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self.group)
        normed = own * torch.rsqrt(squares / self.width + self.eps)
        return (normed * (self.weight.to(exact) + self.offset)).to(x.dtype).view_as(x)
