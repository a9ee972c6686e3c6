"""A norm of all heads of queries, or of keys, together, which tensor-parallel ranks divide among them.

Shapes: T tokens, N heads of this rank in any number of dimensions, H head size.
"""

from typing import Any

import torch
import torch.distributed as dist

from ops.totals import totals_of


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
        """[T, N, H] → the same."""
        settings = self.offset, self.eps, self.width, self.group
        normed: torch.Tensor = _Normed.apply(x, self.weight, *settings)
        return normed


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        offset: float,
        eps: float,
        width: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        own = _exact(x)
        scale = torch.rsqrt(_summed(own.square(), group) / width + eps)
        ctx.save_for_backward(x, scale)
        ctx.weight, ctx.offset, ctx.width, ctx.group = weight, offset, width, group
        return (own * scale).mul_(weight.to(own.dtype) + offset).to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        grad, normed = _exact(grads[0]), _exact(x) * scale
        (total,), (of_weight,) = totals_of([ctx.weight])
        total.add_((grad * normed).sum(0))
        grad = grad * (ctx.weight.to(grad.dtype) + ctx.offset)
        along = _summed(grad * normed, ctx.group) / ctx.width
        of_x = grad.sub_(normed.mul_(along)).mul_(scale).to(x.dtype).view(x.shape)
        return of_x, of_weight, None, None, None, None


def _exact(x: torch.Tensor) -> torch.Tensor:
    """[T, N, H] → [T, N · H] in single precision at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).flatten(1)


def _summed(numbers: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[T, n] → the sums of all ranks of the group, [T, 1]."""
    sums = numbers.sum(-1, keepdim=True)
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    return sums
