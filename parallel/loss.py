"""Cross entropy over a vocabulary that tensor-parallel ranks share, in chunks of tokens.

Each rank holds the logits of its part of the vocabulary. Only three numbers a token cross between ranks: the
largest logit, the sum of exponentials and the target's logit (Shoeybi et al., Megatron-LM, 2019, section 3).
Logits are the largest tensor of a step, so above `chunk` tokens they are made, used and dropped a chunk at a
time, and made again in the backward pass.

Shapes: T tokens, D width, v rows of the vocabulary on this rank. Of the rows of all ranks the first `ids` are
ids of the model; the others pad it, and take no part in any loss or choice.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ops.loss import token_losses


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
    logits = F.linear(hidden, weight)
    if group.size() == 1 and ids >= len(weight):
        return token_losses(logits, labels)
    exact = logits if logits.dtype == torch.float64 else logits.float()
    losses: torch.Tensor = _VocabParallelLoss.apply(exact, labels, group, ids)
    return losses


def _own_ids(size: int, group: dist.ProcessGroup, ids: int) -> int:
    """How many of this rank's `size` rows are ids: all but on the last ranks."""
    return min(max(ids - group.rank() * size, 0), size)


class _VocabParallelLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup, ids: int
    ) -> torch.Tensor:
        size = logits.shape[1]
        own = _own_ids(size, group, ids)
        local = labels - group.rank() * size
        inside = (local >= 0) & (local < size)
        local = local.clamp(0, size - 1).unsqueeze(1)
        lowest = torch.finfo(logits.dtype).min
        largest = logits[:, :own].amax(1) if own else logits.new_full((len(logits),), lowest)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - largest.unsqueeze(1)
        powers = shifted.exp()
        powers[:, own:] = 0
        sums = torch.stack([powers.sum(1), shifted.gather(1, local).squeeze(1) * inside])
        dist.all_reduce(sums, group=group)
        total, target = sums
        ctx.save_for_backward(powers.div_(total.unsqueeze(1)), local, inside)
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probabilities, local, inside = ctx.saved_tensors
        grad = grads[0].unsqueeze(1)
        return (probabilities * grad).scatter_add_(1, local, -(grad * inside.unsqueeze(1))), None, None, None


def linear_argmax(
    hidden: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, ids: int
) -> torch.Tensor:
    """hidden [T, D], weight [v, D] → the likeliest token ids [T], the lowest of equals, on every rank."""
    logits = F.linear(hidden, weight).float()
    logits[:, _own_ids(len(weight), group, ids) :] = -torch.inf
    value, token = logits.max(1)
    if group.size() == 1:
        return token
    token = token + group.rank() * weight.shape[0]
    values = value.new_empty(group.size() * len(value))
    tokens = token.new_empty(group.size() * len(token))
    dist.all_gather_into_tensor(values, value, group=group)
    dist.all_gather_into_tensor(tokens, token, group=group)
    best = values.view(group.size(), -1).argmax(0, keepdim=True)
    return tokens.view(group.size(), -1).gather(0, best).squeeze(0)
