"""Normalisation layers that megatron-core's specs accept, on any device.

Between two halves of a layer the sum with what went around the first, and the norm ahead of the second, are
one operator, and so is their gradient; so are the norm behind a half and the sum that follows.

Shapes: t tokens, D model width.
"""

from typing import Any

import torch
import torch.nn.functional as F

from ops.kernels.choice import as_rows, takes_kernel
from ops.names import NORMS
from ops.operators import operator
from ops.totals import totals_of

_WIDEST = 16384  # of which a kernel holds a row
Normed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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

    def enter(self, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A stream [..., D] → itself, to go around what follows, and its norm: the gradients of both are
        summed with the norm's.
        """
        found: tuple[torch.Tensor, torch.Tensor] = _Entered.apply(
            stream, self.weight, self.bias, self.eps, self.offset
        )
        return found

    def enter_sum(
        self, stream: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `enter`, of stream + (out + bias), which are [..., D] and [D]."""
        found: tuple[torch.Tensor, torch.Tensor] = _EnteredSum.apply(
            stream, out, bias, self.weight, self.bias, self.eps, self.offset
        )
        return found

    def leave(self, stream: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """stream [..., D] + the norm of out + bias, which are [..., D] and [D]."""
        out = out if bias is None else out + bias
        total: torch.Tensor = _Left.apply(stream, out, self.weight, self.bias, self.eps, self.offset)
        return total


def with_bias(stream: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """stream + (out + bias), which are [..., D] and [D]."""
    if bias is None:
        return stream + out
    total: torch.Tensor = _Summed.apply(stream, out, bias)
    return total


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        stream: torch.Tensor,
        weight: torch.Tensor,
        shift: torch.Tensor | None,
        eps: float,
        offset: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, mean, scale = _NORM(stream, weight, shift, eps, offset)
        ctx.save_for_backward(stream, mean, scale)
        ctx.parameters, ctx.offset = (weight, shift, None), offset
        return stream.view_as(stream), normed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad, of_weight, of_shift, _ = _normed_gradients(ctx, grads[1], grads[0])
        return grad, of_weight, of_shift, None, None


class _EnteredSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        stream: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        weight: torch.Tensor,
        shift: torch.Tensor | None,
        eps: float,
        offset: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, normed, mean, scale = _ADD_NORM(stream, out, bias, weight, shift, eps, offset)
        ctx.save_for_backward(total, mean, scale)
        ctx.parameters, ctx.offset = (weight, shift, bias), offset
        return total, normed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad, of_weight, of_shift, of_bias = _normed_gradients(ctx, grads[1], grads[0])
        return grad, grad, of_bias, of_weight, of_shift, None, None


def _normed_gradients(
    ctx: Any, of_normed: torch.Tensor, around: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of what was normed, and of the norm's weight, its shift and the bias in what was normed: None
    where there is none, or where `main_grad` has taken it.
    """
    total, mean, scale = ctx.saved_tensors
    totals, (of_weight, of_shift, of_bias) = totals_of(ctx.parameters)
    grad = _NORM_BACKWARD(of_normed, around, total, mean, scale, ctx.parameters[0], ctx.offset, totals)
    return grad, of_weight, of_shift, of_bias


class _Left(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        stream: torch.Tensor,
        out: torch.Tensor,
        weight: torch.Tensor,
        shift: torch.Tensor | None,
        eps: float,
        offset: float,
    ) -> torch.Tensor:
        total, mean, scale = _NORM_ADD(stream, out, weight, shift, eps, offset)
        ctx.save_for_backward(out, mean, scale)
        ctx.parameters, ctx.offset = (weight, shift, None), offset
        result: torch.Tensor = total
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_out, of_weight, of_shift, _ = _normed_gradients(ctx, grads[0], None)
        return grads[0], of_out, of_weight, of_shift, None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: torch.Tensor, out: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = _WITH_BIAS(stream, out, bias)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (grad,) = grads
        return grad, grad, grad.flatten(0, -2).sum(0)


def norm(
    x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor | None, eps: float, offset: float
) -> Normed:
    """x [..., D] → its norm, the means [t], none of an RMSNorm, and the factors [t], in single precision at
    least, that it divides by.
    """
    if _takes_kernel(x):
        from ops.kernels import norms

        normed, mean, scale = norms.norm(as_rows(x), weight, shift, eps, offset)
        return normed.view_as(x), mean, scale
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    weight = weight.to(exact.dtype) + offset if offset else weight
    if shift is not None:
        normed, mean, scale = torch.native_layer_norm(x, x.shape[-1:], weight.to(x.dtype), shift, eps)
        return normed, mean.flatten().to(exact.dtype), scale.flatten().to(exact.dtype)
    scale = exact.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (exact * scale * weight).to(x.dtype), scale.new_empty(0), scale.flatten()


def _add_norm(
    stream: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """stream + (out + bias), rounded to their precision, and as `norm` of it."""
    if _takes_kernel(stream):
        from ops.kernels import norms

        both = as_rows(stream), as_rows(out)
        total, normed, mean, scale = norms.add_norm(*both, bias, weight, shift, eps, offset)
        return total.view_as(stream), normed.view_as(stream), mean, scale
    total = stream + (out if bias is None else out + bias)
    return total, *norm(total, weight, shift, eps, offset)


def _norm_add(
    stream: torch.Tensor,
    out: torch.Tensor,
    weight: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float,
    offset: float,
) -> Normed:
    """stream + the norm of out, which are [..., D], and what else `norm` returns of out."""
    if _takes_kernel(out):
        from ops.kernels import norms

        total, mean, scale = norms.norm_add(as_rows(stream), as_rows(out), weight, shift, eps, offset)
        return total.view_as(out), mean, scale
    normed, mean, scale = norm(out, weight, shift, eps, offset)
    return normed.add_(stream), mean, scale


def norm_backward(
    grad: torch.Tensor,
    around: torch.Tensor | None,
    x: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    offset: float,
    totals: list[torch.Tensor],
) -> torch.Tensor:
    """The gradient of x [..., D], with the one from `around` the norm if there is one. Added to `totals`,
    each [D], are those of the weight, of the shift if there are means and, if there is one more, of a bias
    that was added to x.
    """
    if x.numel() == 0:
        return torch.empty_like(x)
    if _takes_kernel(x):
        from ops.kernels import norms

        around = None if around is None else as_rows(around)
        given = as_rows(grad), around, as_rows(x), mean, scale
        return norms.norm_backward(*given, weight, offset, totals).view_as(x)
    grad, exact, scale = grad.flatten(0, -2).to(scale.dtype), x.flatten(0, -2).to(scale.dtype), scale[:, None]
    shifted = len(mean) > 0
    normed = (exact - mean.unsqueeze(1) if shifted else exact) * scale
    sums = [(grad * normed).sum(0), *((grad.sum(0),) if shifted else ())]
    grad = grad * (weight.to(grad.dtype) + offset)
    of_exact = grad - normed * (grad * normed).mean(1, keepdim=True)
    if shifted:
        of_exact -= grad.mean(1, keepdim=True)
    of_exact = of_exact.mul_(scale).view_as(x)
    of_x = (of_exact if around is None else of_exact.add_(around)).to(x.dtype)
    sums.append(of_x.flatten(0, -2).sum(0, dtype=scale.dtype))
    for total, own in zip(totals, sums, strict=False):
        total.add_(own)
    return of_x


def _with_bias(stream: torch.Tensor, out: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """As `with_bias`."""
    if takes_kernel(stream):
        from ops.kernels import sums

        return sums.summed(as_rows(stream), as_rows(out), bias).view_as(stream)
    return stream + (out + bias)


def _takes_kernel(x: torch.Tensor) -> bool:
    return x.shape[-1] <= _WIDEST and takes_kernel(x)


def _rows(x: torch.Tensor) -> int:
    return x.numel() // x.shape[-1]


def _made(
    x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor | None, eps: float, offset: float
) -> Normed:
    exact = torch.promote_types(x.dtype, torch.float32)
    mean, scale = (x.new_empty(rows, dtype=exact) for rows in (_rows(x) * (shift is not None), _rows(x)))
    return torch.empty_like(x), mean, scale


def _total_made(
    stream: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *of_norm: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(stream), *_made(stream, *of_norm)


def _left_made(stream: torch.Tensor, out: torch.Tensor, *of_norm: Any) -> Normed:
    return _made(out, *of_norm)


def _sum_made(stream: torch.Tensor, out: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(stream)


_NORM = operator(norm, _made)
_ADD_NORM = operator(_add_norm, _total_made)
_NORM_ADD = operator(_norm_add, _left_made)
_NORM_BACKWARD = operator(
    norm_backward, lambda grad, around, x, *others: torch.empty_like(x), changed=("totals",)
)
_WITH_BIAS = operator(_with_bias, _sum_made)
