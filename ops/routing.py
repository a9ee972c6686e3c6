"""Rows in the order of experts and back: the host does not wait, and sums have a fixed order.

A token sends a row to each of k experts. Rows are sorted by expert, those of one expert by token; what comes
back is put where the token's choices lie and summed there, so that no two rows are added at once.

Shapes: T tokens, k experts that each takes, R = T · k rows, D width, E experts.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RowOrder:
    """Rows [R] in the order of experts: `slots` says which of the tokens' choices, token by token, each is,
    `tokens` whose it is; `ends` [E] int32 is where the rows of each expert end.
    """

    slots: torch.Tensor
    tokens: torch.Tensor
    ends: torch.Tensor


def expert_numbers(experts: int) -> torch.Tensor:
    """The numbers of experts [E], in as few bits as hold them: a sort takes a pass for 8 bits."""
    assert experts <= 2**15, f"{experts} experts have no numbers of 16 bits"
    return torch.arange(experts, dtype=torch.uint8 if experts <= 256 else torch.int16)


def order_rows(chosen: torch.Tensor, numbers: torch.Tensor) -> RowOrder:
    """The order of the rows of `chosen` experts [T, k]; `numbers` [E] are `expert_numbers`."""
    experts, slots = chosen.flatten().to(numbers.dtype).sort(stable=True)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    return RowOrder(slots, slots // chosen.shape[1], ends)


def rows_of(tokens: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """tokens [T, D] → rows [R, D]."""
    rows: torch.Tensor = _RowsOf.apply(tokens, order)
    return rows


def sums_of(rows: torch.Tensor, order: RowOrder, tokens: int) -> torch.Tensor:
    """rows [R, D] of so many tokens T → their sums by token [T, D]."""
    sums: torch.Tensor = _SumsOf.apply(rows, order, tokens)
    return sums


def weights_of(probs: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """Probabilities of the choices [T, k] → those of rows [R]."""
    weights: torch.Tensor = _WeightsOf.apply(probs, order)
    return weights


def weighed(product: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """product [R, F] and its weights [R] in fp32 → [R, F] in the precision of the product, rounded once."""
    out: torch.Tensor = _Weighed.apply(product, weights.unsqueeze(1))
    return out


def _summed(rows: torch.Tensor, slots: torch.Tensor, tokens: int) -> torch.Tensor:
    apart = torch.empty_like(rows).index_copy_(0, slots, rows)
    return apart.view(tokens, -1 if tokens else 1, rows.shape[1]).sum(1)


class _RowsOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, order: RowOrder) -> torch.Tensor:
        ctx.save_for_backward(order.slots)
        ctx.tokens = len(tokens)
        return tokens.index_select(0, order.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (slots,) = ctx.saved_tensors
        return _summed(grads[0], slots, ctx.tokens), None


class _SumsOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: RowOrder, tokens: int) -> torch.Tensor:
        ctx.save_for_backward(order.tokens)
        return _summed(rows, order.slots, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (of,) = ctx.saved_tensors
        return grads[0].index_select(0, of), None, None


class _WeightsOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor, order: RowOrder) -> torch.Tensor:
        ctx.save_for_backward(order.slots)
        ctx.shape = probs.shape
        return probs.flatten().index_select(0, order.slots)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (slots,) = ctx.saved_tensors
        return torch.empty_like(grads[0]).index_copy_(0, slots, grads[0]).view(ctx.shape), None


class _Weighed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(product, weights)
        return torch.mul(product, weights, out=torch.empty_like(product))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (grad,), (product, weights) = grads, ctx.saved_tensors
        of_weights = grad.to(weights.dtype, copy=True).mul_(product).sum(1, keepdim=True)
        return torch.mul(grad, weights, out=torch.empty_like(product)), of_weights
