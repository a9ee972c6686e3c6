"""Gated feed-forwards between their linears (Shazeer, GLU Variants Improve Transformer, 2020): the product of
an activated gate and what it lets through, as one operator forward and one backward.

Nothing is kept for the backward but the operand: the activation is computed anew from it.

Shapes: F width; a row of `x` [..., 2F] holds the F gates and then the F others.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ops.kernels.choice import takes_kernel
from ops.operators import operator


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x · sigmoid(1.702 x), which OpenAI's CLIP and gpt-oss take for a GELU."""
    return x * torch.sigmoid(1.702 * x)


def _quick_gelu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    share = torch.sigmoid(1.702 * x)
    return grad * share * (1 + 1.702 * x * (1 - share))


Pointwise = Callable[..., torch.Tensor]
_KINDS: Mapping[str, tuple[Pointwise, Pointwise]] = {
    "silu": (F.silu, torch.ops.aten.silu_backward),
    "gelu": (F.gelu, torch.ops.aten.gelu_backward),
    "gelu_tanh": (
        partial(F.gelu, approximate="tanh"),
        partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    ),
    "quick_gelu": (quick_gelu, _quick_gelu_backward),
}
ACTIVATIONS: Mapping[str, Pointwise] = {kind: forward for kind, (forward, _) in _KINDS.items()}


def gated(x: torch.Tensor, kind: str, clamp: float | None = None, offset: float = 0.0) -> torch.Tensor:
    """x [..., 2F] → ACTIVATIONS[kind](gate) · (other + offset) [..., F].

    With `clamp` gates are at most that, and others between minus that and that, before anything else.
    """
    out: torch.Tensor = _Gated.apply(x, kind, clamp, offset)
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *settings: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.settings = settings
        product: torch.Tensor = _GATED(x, *settings)
        return product

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        return _GATED_BACKWARD(grads[0].contiguous(), x, *ctx.settings), None, None, None


def _gated(x: torch.Tensor, kind: str, clamp: float | None, offset: float) -> torch.Tensor:
    """As `gated` says, in torch where no kernel is taken; x is contiguous."""
    if takes_kernel(x):
        from ops.kernels import gates

        return gates.gated(x.flatten(0, -2), kind, clamp, offset).unflatten(0, x.shape[:-1])
    gate, other = _halves(x, clamp)
    return ACTIVATIONS[kind](gate) * (other + offset if offset else other)


def _gated_backward(
    grad: torch.Tensor, x: torch.Tensor, kind: str, clamp: float | None, offset: float
) -> torch.Tensor:
    """The gradient of x [..., 2F] from that of the product [..., F]."""
    if takes_kernel(x):
        from ops.kernels import gates

        rows = grad.flatten(0, -2), x.flatten(0, -2)
        return gates.gated_backward(*rows, kind, clamp, offset).view_as(x)
    gate, other = _halves(x, clamp)
    out = torch.empty_like(x)
    of_gate, of_other = out.chunk(2, dim=-1)
    forward, backward = _KINDS[kind]
    of_gate.copy_(backward(grad * (other + offset if offset else other), gate))
    torch.mul(grad, forward(gate), out=of_other)
    if clamp is not None:
        raw_gate, raw_other = x.chunk(2, dim=-1)
        of_gate.masked_fill_(raw_gate > clamp, 0)
        of_other.masked_fill_(raw_other.abs() > clamp, 0)
    return out


def _halves(x: torch.Tensor, clamp: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    gate, other = x.chunk(2, dim=-1)
    if clamp is not None:
        gate, other = gate.clamp(max=clamp), other.clamp(min=-clamp, max=clamp)
    return gate, other


def _product(x: torch.Tensor, kind: str, clamp: float | None, offset: float) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _gradient(
    grad: torch.Tensor, x: torch.Tensor, kind: str, clamp: float | None, offset: float
) -> torch.Tensor:
    return torch.empty_like(x)


_GATED = operator(_gated, _product)
_GATED_BACKWARD = operator(_gated_backward, _gradient)
