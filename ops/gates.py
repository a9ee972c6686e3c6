"""Feed-forwards between their linears, as one operator forward and one backward: of a gated one (Shazeer, GLU
Variants Improve Transformer, 2020) the product of an activated gate and what it lets through, of another the
activation of a sum with the first linear's bias. And gates of what attention puts out, by heads.

Nothing is kept for the backward but the operand: the activation is computed anew from it.

Shapes: F width; a row of a gate's `x` [..., 2F] holds the F gates and then the F others.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ops.kernels.choice import as_rows, takes_kernel
from ops.operators import operator
from ops.totals import totals_of


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
FUNCTIONS: Mapping[str, Pointwise] = {kind: forward for kind, (forward, _) in _KINDS.items()}


def gated(x: torch.Tensor, kind: str, clamp: float | None = None, offset: float = 0.0) -> torch.Tensor:
    """x [..., 2F] → FUNCTIONS[kind](gate) · (other + offset) [..., F].

    With `clamp` gates are at most that, and others between minus that and that, before anything else.
    """
    out: torch.Tensor = _Gated.apply(x, kind, clamp, offset)
    return out


def biased(x: torch.Tensor, bias: torch.Tensor, kind: str) -> torch.Tensor:
    """x [..., F] and bias [F] → FUNCTIONS[kind](x + bias).

    The gradient of the bias is a sum over what that of x is made of, so it costs no pass of its own. It is
    added to `main_grad`, where the bias has one.
    """
    out: torch.Tensor = _Biased.apply(x, bias, kind)
    return out


def let_through(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x [T, K · G · H] and gate [T, K, G, H], contiguous in its last two dimensions → x · sigmoid(gate)."""
    out: torch.Tensor = _LetThrough.apply(x, gate)
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
        return _GATED_BACKWARD(grads[0], x, *ctx.settings), None, None, None


class _Biased(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.save_for_backward(x)
        # The parameter itself: hooks on saved tensors, which move them, bring back another object.
        ctx.bias, ctx.kind = bias, kind
        out: torch.Tensor = _BIASED(x, bias, kind)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        (x,), ((total,), (of_bias,)) = ctx.saved_tensors, totals_of([ctx.bias])
        return _BIASED_BACKWARD(grads[0], x, ctx.bias, ctx.kind, total), of_bias, None


class _LetThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, gate)
        out: torch.Tensor = _LET_THROUGH(x, gate)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both: tuple[torch.Tensor, torch.Tensor] = _LET_THROUGH_BACKWARD(grads[0], *ctx.saved_tensors)
        return both


def _gated(x: torch.Tensor, kind: str, clamp: float | None, offset: float) -> torch.Tensor:
    """As `gated` says, in torch where no kernel is taken."""
    if takes_kernel(x):
        from ops.kernels import gates

        return gates.gated(as_rows(x), kind, clamp, offset).unflatten(0, x.shape[:-1])
    gate, other = _halves(x, clamp)
    return FUNCTIONS[kind](gate) * (other + offset if offset else other)


def _gated_backward(
    grad: torch.Tensor, x: torch.Tensor, kind: str, clamp: float | None, offset: float
) -> torch.Tensor:
    """The gradient of x [..., 2F] from that of the product [..., F]."""
    if takes_kernel(x):
        from ops.kernels import gates

        return gates.gated_backward(as_rows(grad), as_rows(x), kind, clamp, offset).view_as(x)
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


def _biased(x: torch.Tensor, bias: torch.Tensor, kind: str) -> torch.Tensor:
    """As `biased` says, in torch where no kernel is taken."""
    if takes_kernel(x):
        from ops.kernels import gates

        return gates.biased(as_rows(x), bias, kind).view_as(x)
    return FUNCTIONS[kind](x + bias)


def _biased_backward(
    grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, kind: str, total: torch.Tensor
) -> torch.Tensor:
    """The gradient of x [..., F]; that of the bias is added to `total` [F]."""
    if takes_kernel(x):
        from ops.kernels import gates

        return gates.biased_backward(as_rows(grad), as_rows(x), bias, kind, total).view_as(x)
    of_x = _KINDS[kind][1](grad, x + bias)
    total.add_(of_x.flatten(0, -2).sum(0, dtype=_exact(x)))
    return of_x


def _let_through(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """As `let_through` says, in torch where no kernel is taken."""
    if takes_kernel(x):
        from ops.kernels import gates

        return gates.let_through(x.contiguous(), gate)
    return (x.view(gate.shape) * torch.sigmoid(gate.to(_exact(x)))).to(x.dtype).view(x.shape)


def _let_through_backward(
    grad: torch.Tensor, x: torch.Tensor, gate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x [T, K · G · H] and gate [T, K, G, H]."""
    if takes_kernel(x):
        from ops.kernels import gates

        return gates.let_through_backward(grad.contiguous(), x.contiguous(), gate)
    share = torch.sigmoid(gate.to(_exact(x)))
    grad, x = grad.view(gate.shape), x.view(gate.shape)
    of_gate = grad * x * share * (1 - share)
    return (grad * share).to(x.dtype).flatten(1), of_gate.to(x.dtype)


def _exact(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _product(x: torch.Tensor, *settings: Any) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _gradient(grad: torch.Tensor, x: torch.Tensor, *settings: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _activation(x: torch.Tensor, bias: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.empty_like(x)


def _shares(grad: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), gate.new_empty(gate.shape)


_GATED = operator(_gated, _product)
_GATED_BACKWARD = operator(_gated_backward, _gradient)
_BIASED = operator(_biased, _activation)
_BIASED_BACKWARD = operator(_biased_backward, _gradient, changed=("total",))
_LET_THROUGH = operator(_let_through, lambda x, gate: x.new_empty(x.shape))
_LET_THROUGH_BACKWARD = operator(_let_through_backward, _shares)
