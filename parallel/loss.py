"""Cross entropy over a vocabulary that tensor-parallel ranks share, in chunks of tokens.

Each rank holds the logits of its part of the vocabulary. Only three numbers a token cross between ranks: the
largest logit, the sum of exponentials and the target's logit (Shoeybi et al., Megatron-LM, 2019, section 3).
Logits are the largest tensor of a step, so they are kept in the model's precision alone, and above `chunk`
tokens they are made, used and dropped a chunk at a time, and made again in the backward pass.

Shapes: T tokens, D width, v rows of the vocabulary on this rank. Of the rows of all ranks the first `ids` are
ids of the model; the others pad it, and take no part in any loss or choice.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ops.loss import logit_gradients, logit_sums


def linear_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    group: dist.ProcessGroup,
    chunk: int,
    ids: int,
) -> torch.Tensor:
    """hidden [T, D], weight [v, D], labels [T] → the loss of each token [T], in fp32 (fp64 for fp64 models).

    Every rank of `group` calls it with the same hidden states and labels and gets the same losses; the
    gradient of `hidden` is this rank's part of a sum over the group.
    """
    if len(hidden) <= chunk:
        return _chunk_losses(hidden, weight, labels, group, ids)
    pieces = zip(hidden.split(chunk), labels.split(chunk), strict=True)
    return torch.cat(
        [checkpoint(_chunk_losses, h, weight, l, group, ids, use_reentrant=False) for h, l in pieces]  # noqa: E741
    )


def _chunk_losses(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup, ids: int
) -> torch.Tensor:
    losses: torch.Tensor = _LogitLosses.apply(F.linear(hidden, weight), labels, group, ids)
    return losses


def _columns(size: int, group: dist.ProcessGroup, ids: int) -> tuple[int, int]:
    """The id of the first of this rank's `size` rows, and how many of them are ids: all but on the last
    ranks.
    """
    first = group.rank() * size
    return first, min(max(ids - first, 0), size)


class _LogitLosses(torch.autograd.Function):
    """Losses [T] of logits [T, v], which are kept as they are; ranks bring their sums together."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup, ids: int
    ) -> torch.Tensor:
        ctx.columns = _columns(logits.shape[1], group, ids)
        sums = logit_sums(logits, labels, *ctx.columns)
        if group.size() > 1:
            _bring_together(sums, group)
        ctx.save_for_backward(logits, labels, sums)
        largest, total, target = sums
        return (largest - target).add_(total.log())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return logit_gradients(grads[0].contiguous(), *ctx.saved_tensors, *ctx.columns), None, None, None


def _bring_together(sums: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Make of each rank's sums [3, T] those of all."""
    largest = sums[0].clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums[1].mul_(sums[0].sub_(largest).exp_())
    sums[0] = largest
    dist.all_reduce(sums[1:], group=group)


def linear_argmax(
    hidden: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, ids: int
) -> torch.Tensor:
    """hidden [T, D], weight [v, D] → the likeliest token ids [T], the lowest of equals, on every rank."""
    first, own = _columns(len(weight), group, ids)
    logits = F.linear(hidden, weight).float()
    logits[:, own:] = -torch.inf
    value, token = logits.max(1)
    if group.size() == 1:
        return token
    token = token + first
    values = value.new_empty(group.size() * len(value))
    tokens = token.new_empty(group.size() * len(token))
    dist.all_gather_into_tensor(values, value, group=group)
    dist.all_gather_into_tensor(tokens, token, group=group)
    best = values.view(group.size(), -1).argmax(0, keepdim=True)
    return tokens.view(group.size(), -1).gather(0, best).squeeze(0)
