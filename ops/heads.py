"""Heads of queries and keys, normed, rotated by the positions of their tokens, or both, in one operator, and
so is their gradient. They come out of the one tensor of their linear, or by themselves.

Shapes: T tokens, K heads of keys and of values, G of queries for each of them, N = K · G, H head size. In the
tensor of the linear [T, K, G + 2, H] a key's queries come first, then the key, then its value; with gates of
what attention puts out, [T, K, 2G + 2, H], these stand behind the queries.
"""

from typing import Any

import torch

from ops.kernels.choice import takes_kernel
from ops.norm import Norm, norm, norm_backward
from ops.operators import operator
from ops.totals import totals_of

Table = tuple[torch.Tensor, torch.Tensor]
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def split_heads(joined: torch.Tensor, gated: bool) -> Heads:
    """Views of `joined`: queries [T, K, G, H], keys and values [T, K, H] and, where it has them, gates, which
    are as many as queries.
    """
    groups = (joined.shape[2] - 2) // (1 + gated)
    query, *gates, key, value = joined.split([groups] * (1 + gated) + [1, 1], dim=2)
    return query, key.squeeze(2), value.squeeze(2), gates[0] if gated else None


def made_heads(
    joined: torch.Tensor, table: Table | None, norms: tuple[Norm, Norm] | None, gated: bool
) -> Heads:
    """Queries [T, N, H] and keys [T, K, H] out of `joined`, normed by the norm of each if there are `norms`,
    then rotated if there is a `table` of `rotary_table`; values, and gates if it has them, are views.
    """
    if table is None and norms is None:
        query, key, value, gate = split_heads(joined, gated)
        return query.flatten(1, 2), key, value, gate
    parameters = [parameter for of in norms or () for parameter in of.parameters()]
    eps, offset = (norms[0].eps, norms[0].offset) if norms else (0.0, 0.0)
    heads: Heads = _Made.apply(joined, table or (), eps, offset, gated, *parameters)
    return heads


def rotated(query: torch.Tensor, key: torch.Tensor, table: Table) -> tuple[torch.Tensor, torch.Tensor]:
    """query [T, N, H] and key [T, K, H] → both rotated by a table from `rotary_table`."""
    both: tuple[torch.Tensor, torch.Tensor] = _Rotated.apply(query, key, *table)
    return both


class _Made(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        joined: torch.Tensor,
        angles: tuple[torch.Tensor, ...],
        eps: float,
        offset: float,
        gated: bool,
        *parameters: torch.Tensor,
    ) -> Heads:
        ctx.save_for_backward(joined if parameters else None, *angles)
        ctx.parameters, ctx.settings, ctx.gated = parameters, (eps, offset), gated
        query, key, value, gate = split_heads(joined, gated)
        return *_HEADS(query, key, angles, parameters, eps, offset, 1), value, gate

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        joined, *angles = ctx.saved_tensors
        operands = (None, None) if joined is None else split_heads(joined, ctx.gated)[:2]
        totals, handed = totals_of(ctx.parameters)
        of_joined = _HEADS_BACKWARD(*grads, *operands, angles, ctx.parameters, *ctx.settings, totals)
        return of_joined, None, None, None, None, *handed


class _Rotated(torch.autograd.Function):
    """The backward is the rotation by the opposite angle."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, *angles: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(*angles)
        both: tuple[torch.Tensor, torch.Tensor] = _HEADS(query, key, angles, [], 0.0, 0.0, 1)
        return both

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_HEADS(*grads, ctx.saved_tensors, [], 0.0, 0.0, -1), None, None


def _heads(
    query: torch.Tensor,
    key: torch.Tensor,
    angles: list[torch.Tensor],
    parameters: list[torch.Tensor],
    eps: float,
    offset: float,
    sign: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [T, N, H] or [T, K, G, H] and keys [T, K, H] → [T, N, H] and [T, K, H], normed and then
    rotated, by the opposite angles if the sign is -1. `angles` are cos and sin [T, 1, n/2], none if nothing
    is rotated; `parameters` those of the norm of queries and then of keys, if any: a weight, and a
    LayerNorm's shift.
    """
    if takes_kernel(key):
        from ops.kernels import heads

        query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
        return heads.heads(query, key, angles, parameters, eps, offset, sign)
    made = []
    for x, own in zip((query, key), _by_norm(parameters, key), strict=True):
        exact = x.to(_exact(x))
        if own is not None:
            exact, _, _ = norm(exact, *own, eps, offset)
        made.append(_turned(exact, angles, sign).to(x.dtype))
    return made[0].flatten(1, -2), made[1]


def _heads_backward(
    of_query: torch.Tensor,
    of_key: torch.Tensor,
    of_value: torch.Tensor,
    of_gate: torch.Tensor | None,
    query: torch.Tensor | None,
    key: torch.Tensor | None,
    angles: list[torch.Tensor],
    parameters: list[torch.Tensor],
    eps: float,
    offset: float,
    totals: list[torch.Tensor],
) -> torch.Tensor:
    """The gradient of the tensor of all heads, of which queries and keys are views that are there if they are
    normed; those of the `parameters` are added to `totals`.
    """
    grads = of_query, of_key, of_value, of_gate
    if takes_kernel(of_key) and len(of_key):
        from ops.kernels import heads

        return heads.heads_backward(*grads, query, key, angles, parameters, eps, offset, totals)
    out = _joined(*grads)
    of_queries, of_keys, of_values, of_gates = split_heads(out, of_gate is not None)
    of_values.copy_(of_value)
    if of_gates is not None and of_gate is not None:
        of_gates.copy_(of_gate)
    each, norms = len(totals) // 2, _by_norm(parameters, of_key)
    grad = _turned(of_query.to(_exact(of_query)), angles, -1).view(of_queries.shape)
    of_queries.copy_(_of_normed(grad, query, norms[0], eps, offset, totals[:each]))
    grad = _turned(of_key.to(_exact(of_key)), angles, -1)
    of_keys.copy_(_of_normed(grad, key, norms[1], eps, offset, totals[each:]))
    return out


Own = tuple[torch.Tensor, torch.Tensor | None]


def _by_norm(parameters: list[torch.Tensor], like: torch.Tensor) -> list[Own | None]:
    """Weight and shift of the norm of queries and of that of keys, in the precision that these are computed
    in; None of each where there are no norms.
    """
    exact = [of.to(_exact(like)) for of in parameters]
    each = len(exact) // 2
    return [(own[0], own[1] if each == 2 else None) if own else None for own in (exact[:each], exact[each:])]


def _of_normed(
    grad: torch.Tensor,
    x: torch.Tensor | None,
    own: Own | None,
    eps: float,
    offset: float,
    totals: list[torch.Tensor],
) -> torch.Tensor:
    """The gradient of heads x from that of what they are before they are turned."""
    if x is None or own is None:
        return grad
    x = x.to(grad.dtype)
    _, mean, scale = norm(x, *own, eps, offset)
    return norm_backward(grad, None, x, mean, scale, own[0], offset, totals)


def _turned(x: torch.Tensor, angles: list[torch.Tensor], sign: int) -> torch.Tensor:
    """Rotate each pair (x[i], x[i + n/2]) of the first n of H in heads [T, ..., H]. The rest is copied."""
    if not angles:
        return x
    half = angles[0].shape[-1]
    cos, sin = (of.view(len(x), *[1] * (x.dim() - 2), half) for of in angles)
    sizes = [half, half, x.shape[-1] - 2 * half]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (low, high, rest), (out_low, out_high, out_rest) = x.split(sizes, dim=-1), out.split(sizes, dim=-1)
    torch.mul(low, cos, out=out_low).addcmul_(high, sin, value=-sign)
    torch.mul(high, cos, out=out_high).addcmul_(low, sin, value=sign)
    out_rest.copy_(rest)
    return out


def _exact(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _heads_made(query: torch.Tensor, key: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.flatten(1, -2).shape), key.new_empty(key.shape)


def _joined(
    of_query: torch.Tensor,
    of_key: torch.Tensor,
    of_value: torch.Tensor,
    of_gate: torch.Tensor | None,
    *others: Any,
) -> torch.Tensor:
    tokens, keys, size = of_key.shape
    groups = of_query.shape[1] // keys * (1 if of_gate is None else 2)
    return of_key.new_empty(tokens, keys, groups + 2, size)


_HEADS = operator(_heads, _heads_made)
_HEADS_BACKWARD = operator(_heads_backward, _joined, changed=("totals",))
