"""Cross entropy of next tokens by its two passes over the logits, each one operator: what is summed up of a
row, and the gradient.

On a GPU no copy of the logits in another precision is made. Logits and their gradient are in the model's
precision, each rounded once, and all between is computed in fp32, for fp64 logits in fp64: megatron-core's
fused cross entropy rounds the gradient to bfloat16 whatever the model's precision, which costs an fp32 run
three digits. The loss of a token is log(total) - (target - largest) of its sums, in that order: the
difference of two logits that are close is exact. Whoever has only a part of each row brings the sums of all
parts together between both passes.

Shapes: T tokens, v columns of the vocabulary, ids `first` to `first + own`; columns behind pad it.
"""

from typing import Any

import torch

from ops.kernels.choice import takes_kernel
from ops.operators import operator


def _logit_sums(logits: torch.Tensor, labels: torch.Tensor, first: int, own: int) -> torch.Tensor:
    """logits [T, v], contiguous, labels [T] → of the ids of each row the largest logit, the sum of
    exponentials less it, and the label's logit, 0 where that is none of these ids: [3, T].

    Of no ids the largest logit is the least number.
    """
    if takes_kernel(logits):
        from ops.kernels import logits as kernels

        return kernels.logit_sums(logits, labels, first, own)
    sums = _sums(logits)
    if own:
        exact, (place, inside) = logits[:, :own].to(sums.dtype), _places(labels, first, own)
        sums[0] = exact.amax(1)
        sums[1] = (exact - sums[0].unsqueeze(1)).exp_().sum(1)
        sums[2] = exact.gather(1, place).squeeze(1).masked_fill_(~inside, 0)
    else:
        sums[0], sums[1:] = torch.finfo(sums.dtype).min, 0
    return sums


def _logit_gradients(
    grads: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, sums: torch.Tensor, first: int, own: int
) -> torch.Tensor:
    """Gradients of the losses [T], and `sums` [3, T] of all columns, wherever they are → those of the logits
    [T, v], in their dtype: grads · (exp(logit - largest) / total - [is the label]), and 0 for padding.
    """
    if takes_kernel(logits):
        from ops.kernels import logits as kernels

        return kernels.logit_gradients(grads, logits, labels, sums, first, own)
    out = torch.zeros_like(logits)
    if own:
        largest, total, _ = sums.unsqueeze(2)
        place, inside = _places(labels, first, own)
        powers = (logits[:, :own].to(sums.dtype) - largest).exp_()
        powers.mul_(grads.unsqueeze(1) / total).scatter_add_(1, place, -(grads * inside).unsqueeze(1))
        out[:, :own] = powers
    return out


def _places(labels: torch.Tensor, first: int, own: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of each label [T, 1], any where it is elsewhere, and whether it is here [T]."""
    place = labels - first
    return place.clamp(0, own - 1).unsqueeze(1), (place >= 0) & (place < own)


def _sums(logits: torch.Tensor, *given: Any) -> torch.Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(3, len(logits), dtype=dtype)


def _gradients(grads: torch.Tensor, logits: torch.Tensor, *given: Any) -> torch.Tensor:
    return torch.empty_like(logits)


logit_sums = operator(_logit_sums, _sums)
logit_gradients = operator(_logit_gradients, _gradients)
