"""Cross entropy over a vocabulary that tensor-parallel ranks share, in chunks of tokens.

Each rank holds the logits of its part of the vocabulary. Only three numbers a token cross between ranks: the
largest logit, the sum of exponentials and the target's logit (Shoeybi et al., Megatron-LM, 2019, section 3).
Logits are the largest tensor of a step. They are kept in the model's precision, and above `chunk` tokens not
at all: then they are made, used and dropped a chunk at a time, and made again in the backward pass, which has
the three numbers and asks no other rank. The gradient of the weight is added to its `main_grad` by the
product itself where megatron's DistributedDataParallel has given it one.

Shapes: T tokens, D width, v rows of the vocabulary on this rank. Of the rows of all ranks the first `ids` are
ids of the model; the others pad it, and take no part in any loss or choice.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ops.linear import add_weight_gradient
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
    losses: torch.Tensor = _LinearLosses.apply(hidden, weight, labels, group, chunk, ids)
    return losses


class _LinearLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        group: dist.ProcessGroup,
        chunk: int,
        ids: int,
    ) -> torch.Tensor:
        columns = _columns(len(weight), group, ids)
        anew = len(hidden) > chunk
        # Not saved as tensors are, which would live until all of the backward pass is done.
        ctx.logits = []
        if anew:
            pieces = zip(hidden.split(chunk), labels.split(chunk), strict=True)
            sums = torch.cat([logit_sums(F.linear(h, weight), of, *columns) for h, of in pieces], 1)
        else:
            ctx.logits.append(F.linear(hidden, weight))
            sums = logit_sums(ctx.logits[0], labels, *columns)
        if group.size() > 1:
            _bring_together(sums, group)
        # The parameter itself: hooks on saved tensors, which move them, bring back another object.
        ctx.weight, ctx.columns, ctx.chunk = weight, columns, chunk
        ctx.save_for_backward(labels, sums, *(hidden,) * (anew or ctx.needs_input_grad[1]))
        largest, total, target = sums
        return (largest - target).add_(total.log())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (labels, sums, *hidden), weight, chunk = ctx.saved_tensors, ctx.weight, ctx.chunk
        of_hidden = of_weight = total = None
        if ctx.needs_input_grad[1]:
            total = vars(weight).get("main_grad")
            if total is None:
                total = of_weight = torch.zeros_like(weight)
        for start in range(0, max(len(labels), 1), chunk):
            rows = slice(start, start + chunk)
            logits = ctx.logits.pop() if ctx.logits else F.linear(hidden[0][rows], weight)
            of_logits = logit_gradients(
                grads[0][rows].contiguous(), logits, labels[rows], sums[:, rows].contiguous(), *ctx.columns
            )
            del logits  # before there is more
            if of_hidden is None:
                of_hidden = weight.new_empty(len(labels), weight.shape[1])
            torch.mm(of_logits, weight, out=of_hidden[rows])
            if total is not None:
                add_weight_gradient(hidden[0][rows], of_logits, total)
            del of_logits
        return of_hidden, of_weight, None, None, None, None


def _columns(size: int, group: dist.ProcessGroup, ids: int) -> tuple[int, int]:
    """The id of the first of this rank's `size` rows, and how many of them are ids: all but on the last
    ranks.
    """
    first = group.rank() * size
    return first, min(max(ids - first, 0), size)


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
