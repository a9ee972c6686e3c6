"""Attention sinks: a number of each head that takes part in its softmax, and has no value to add.

With scores x and a sink s, the weights are exp(x_j) / (Σ exp(x) + exp(s)): those without it times
sigmoid(log Σ exp(x) - s). So any kernel will do, if the log-sum-exp of its scores is known.

Shapes: T query tokens, C context tokens, N query heads, K key/value heads, H head size.
"""

from collections.abc import Callable
from typing import Any

import torch

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of one call: query [T, N, H], key and value [C, K, H] → [T, N, H]."""

_ROWS = 1024


class LogSumExp(torch.autograd.Function):
    """The log-sum-exp [T, N] of the scores of `query` and `key`, of which the values are `known`.

    The gradient of a query is its keys weighted by the softmax, so attention with the keys as values; that of
    a key is what such values would get. Both come from `attend`, whatever kernel it is.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, known: torch.Tensor, scale: float, attend: Attend
    ) -> torch.Tensor:
        """Return what is known."""
        ctx.save_for_backward(query, key)
        ctx.scale, ctx.attend = scale, attend
        return known

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        """Of queries and keys."""
        query, key = ctx.saved_tensors
        weight = (grads[0] * ctx.scale).unsqueeze(-1)
        with torch.enable_grad():
            values = key.detach().requires_grad_()
            attended = ctx.attend(query.detach(), key.detach(), values)
        of_query = attended.detach() * weight
        (of_key,) = torch.autograd.grad(attended, values, (query * weight).to(attended.dtype))
        return of_query.to(query.dtype), of_key, None, None, None


def with_sinks(out: torch.Tensor, log_sum: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Outputs [T, N, H] without sinks and log-sums [T, N] → outputs with `sinks`, [N] or [T, N]."""
    share = torch.sigmoid(log_sum - sinks.to(log_sum.dtype))
    return out * share.unsqueeze(-1).to(out.dtype)


@torch.no_grad()
def scores_log_sum(
    query: torch.Tensor, key: torch.Tensor, scale: float, causal: bool, mask: torch.Tensor | None
) -> torch.Tensor:
    """The log-sum-exp [B, N, T] of scores of query [B, N, T, H] and key [B, K, C, H], some rows at a time.

    Under `causal` row i sees keys up to i; under a `mask` [T, C] those where it is true. In fp32, or fp64.
    """
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    query, keys = query.to(exact), key.to(exact).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    places = torch.arange(keys.shape[2], device=key.device)
    found = []
    for first in range(0, query.shape[2], _ROWS):
        rows = query[:, :, first : first + _ROWS]
        scores = rows @ keys.transpose(2, 3) * scale
        seen = mask[first : first + _ROWS] if mask is not None else None
        if causal:
            seen = places <= places[first : first + rows.shape[2]].unsqueeze(1)
        if seen is not None:
            scores = scores.masked_fill(~seen, float("-inf"))
        found.append(scores.logsumexp(-1))
    return torch.cat(found, dim=2)
