"""Heads of queries and keys, normed, rotated by the positions of their tokens or both, and their gradients.

Numbers are computed in fp32 and rounded once. A program holds whole heads. What a number is turned with lies
half of the rotated numbers away, and is read again rather than passed between threads.

Shapes: T tokens, K groups, each of G heads of queries, one of keys and one of values, and with gates of G
more behind the queries; N = K·G heads of queries, H head size, h half of what is rotated of it, P programs of
a backward, n parameters of a norm.
"""

from collections.abc import Sequence
from math import gcd

import torch
import triton
import triton.language as tl

from ops.kernels.columns import add_columns

_NUMBERS = 2048  # numbers that a program has
_WALKED = 4096  # numbers that a program of a backward has at once
_PROGRAMS = 528  # that walk the heads of a backward: four for each multiprocessor of an H100
_WARPS = 8  # of such a program


@triton.jit
def _places(row, by_token, by_group, by_head, HEADS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where rows begin, each a head of a token. Strides are in units of UNIT numbers, which tells the
    compiler how many it may load at once.
    """
    head = row % HEADS
    token = (row // HEADS).to(tl.int64)
    return (token * by_token + (head // GROUP) * by_group + (head % GROUP) * by_head) * UNIT


@triton.jit
def _across(column, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The column that each is turned with."""
    return tl.where(column < HALF, column + HALF, column - HALF)


@triton.jit
def _turned(numbers, others, cos, sin, token, column, turns, HALF: tl.constexpr, SIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers turned with the `others` across, which are 0 where nothing `turns`."""
    angle = token * HALF + tl.where(column < HALF, column, column - HALF)
    along = tl.load(cos + angle, turns, 1.0).to(tl.float32)
    up = tl.load(sin + angle, turns, 0.0).to(tl.float32) * SIGN
    return numbers * along + tl.where(column < HALF, -others, others) * up


@triton.jit
def _statistics(numbers, inside, eps, LAYER: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What is subtracted of each row by its norm, and what it is multiplied by."""
    middle = tl.zeros_like(tl.sum(numbers, 1, keep_dims=True))
    if LAYER:
        middle = tl.sum(numbers, 1, keep_dims=True) / SIZE
        numbers = tl.where(inside, numbers - middle, 0.0)
    return middle, tl.rsqrt(tl.sum(numbers * numbers, 1, keep_dims=True) / SIZE + eps)


@triton.jit
def _scaled(numbers, middle, scale, weight, shift, offset, column, there):  # type: ignore[no-untyped-def]
    result = (numbers - middle) * scale * (tl.load(weight + column, there, 0.0).to(tl.float32) + offset)
    if shift is not None:
        result += tl.load(shift + column, there, 0.0).to(tl.float32)
    return result


@triton.jit
def _make(  # type: ignore[no-untyped-def]
    x, out, cos, sin, weight, shift, block, tokens, x_token, x_group, x_head, eps, offset,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, SIGN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Norm and rotate a block of the HEADS heads of all tokens, `out` is contiguous."""
    row = block * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < tokens * HEADS) & (column < SIZE)
    turns = inside & (column < 2 * HALF)
    x += _places(row, x_token, x_group, x_head, HEADS, GROUP, UNIT)
    numbers = tl.load(x + column, inside, 0.0).to(tl.float32)
    others = tl.zeros_like(numbers)
    if HALF > 0:
        others = tl.load(x + _across(column, HALF), turns, 0.0).to(tl.float32)
    if weight is not None:
        middle, scale = _statistics(numbers, inside, eps, shift is not None, SIZE)
        numbers = _scaled(numbers, middle, scale, weight, shift, offset, column, column < SIZE)
        if HALF > 0:
            others = _scaled(
                others, middle, scale, weight, shift, offset, _across(column, HALF), column < 2 * HALF
            )
    if HALF > 0:
        numbers = _turned(numbers, others, cos, sin, (row // HEADS).to(tl.int64), column, turns, HALF, SIGN)
    tl.store(out + row.to(tl.int64) * SIZE + column, numbers.to(out.dtype.element_ty), inside)


@triton.jit
def _heads(  # type: ignore[no-untyped-def]
    query, key, q, k, cos, sin, q_weight, q_shift, k_weight, k_shift,
    tokens, query_token, query_group, query_head, key_token, key_group, eps, offset,
    KEYS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, SIGN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """First come the programs of queries, then those of keys."""
    block = tl.program_id(0)
    of_queries = (tokens * KEYS * GROUP + ROWS - 1) // ROWS
    if block < of_queries:
        _make(
            query, q, cos, sin, q_weight, q_shift, block, tokens, query_token, query_group, query_head,
            eps, offset, KEYS * GROUP, GROUP, SIZE, HALF, SIGN, ROWS, BLOCK, UNIT,
        )  # fmt: skip
    else:
        _make(
            key, k, cos, sin, k_weight, k_shift, block - of_queries, tokens, key_token, key_group, 0,
            eps, offset, KEYS, 1, SIZE, HALF, SIGN, ROWS, BLOCK, UNIT,
        )  # fmt: skip


@triton.jit
def _walk(  # type: ignore[no-untyped-def]
    grad, x, out, cos, sin, weight, partial, tokens, eps, offset,
    HEADS: tl.constexpr, GROUP: tl.constexpr, OF_GROUP: tl.constexpr, LAYER: tl.constexpr,
    SIZE: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of HEADS heads of all tokens, from those of what `_make` made of them; `grad` is contiguous.

    `x` and `out` have OF_GROUP heads a group, and begin with the first of those that are walked.
    """
    column = tl.arange(0, BLOCK)[None, :]
    of_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    of_shift = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(tl.program_id(0) * ROWS, tokens * HEADS, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < tokens * HEADS) & (column < SIZE)
        at = grad + row.to(tl.int64) * SIZE
        place = _places(row, HEADS // GROUP * OF_GROUP, OF_GROUP, 1, HEADS, GROUP, SIZE) + column
        # Outside, `result` is 0, so nothing there gets into a sum.
        result = tl.load(at + column, inside, 0.0).to(tl.float32)
        if HALF > 0:
            turns = inside & (column < 2 * HALF)
            others = tl.load(at + _across(column, HALF), turns, 0.0).to(tl.float32)
            result = _turned(result, others, cos, sin, (row // HEADS).to(tl.int64), column, turns, HALF, -1)
        if weight is not None:
            numbers = tl.load(x + place, inside, 0.0).to(tl.float32)
            middle, scale = _statistics(numbers, inside, eps, LAYER, SIZE)
            numbers = (numbers - middle) * scale
            of_weight += result * numbers
            if LAYER:
                of_shift += result
            result *= tl.load(weight + column, column < SIZE, 0.0).to(tl.float32) + offset
            along = tl.sum(result * numbers, 1, keep_dims=True) / SIZE
            if LAYER:
                numbers = numbers * along + tl.sum(result, 1, keep_dims=True) / SIZE
            else:
                numbers *= along
            result = (result - numbers) * scale
        tl.store(out + place, result.to(out.dtype.element_ty), inside)
    if weight is not None:
        place = tl.arange(0, BLOCK)
        tl.store(partial + place, tl.sum(of_weight, 0), place < SIZE)
        if LAYER:
            tl.store(partial + SIZE + place, tl.sum(of_shift, 0), place < SIZE)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    of_query, of_key, of_value, of_gate, query, key, out, cos, sin, q_weight, k_weight, partials,
    tokens, eps, offset,
    KEYS: tl.constexpr, GROUP: tl.constexpr, LAYER: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program walks queries, then keys, values and gates."""
    of_group: tl.constexpr = GROUP + 2 if of_gate is None else 2 * GROUP + 2
    out_keys = out + (of_group - 2) * SIZE
    partials += tl.program_id(0) * 2 * (1 + LAYER) * SIZE
    _walk(
        of_query, query, out, cos, sin, q_weight, partials, tokens, eps, offset,
        KEYS * GROUP, GROUP, of_group, LAYER, SIZE, HALF, ROWS, BLOCK,
    )  # fmt: skip
    _walk(
        of_key, key, out_keys, cos, sin, k_weight, partials + (1 + LAYER) * SIZE, tokens, eps, offset,
        KEYS, 1, of_group, LAYER, SIZE, HALF, ROWS, BLOCK,
    )  # fmt: skip
    _walk(
        of_value, None, out_keys + SIZE, None, None, None, None, tokens, eps, offset,
        KEYS, 1, of_group, False, SIZE, 0, ROWS, BLOCK,
    )  # fmt: skip
    if of_gate is not None:
        _walk(
            of_gate, None, out + GROUP * SIZE, None, None, None, None, tokens, eps, offset,
            KEYS * GROUP, GROUP, of_group, False, SIZE, 0, ROWS, BLOCK,
        )  # fmt: skip


def heads(
    query: torch.Tensor,
    key: torch.Tensor,
    angles: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    eps: float,
    offset: float,
    sign: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [T, N, H] or [T, K, G, H] and key [T, K, H] → [T, N, H] and [T, K, H], contiguous: normed if
    there are `parameters`, and rotated by sign times the `angles` if there are any. See `ops.heads`.

    Of query and key only the last dimension need be contiguous. A norm is multiplied by weight + offset.
    """
    tokens, keys, size = key.shape
    query = query if query.dim() == 4 else query.unflatten(1, (keys, query.shape[1] // keys))
    group = query.shape[2]
    out = key.new_empty(tokens, keys * group, size), key.new_empty(tokens, keys, size)
    if not tokens:
        return out
    half, block = angles[0].shape[-1] if angles else 0, triton.next_power_of_2(size)
    rows = max(_NUMBERS // block, 1)
    steps = *query.stride()[:3], *key.stride()[:2]
    unit = gcd(16, *steps)
    grid = (triton.cdiv(tokens * keys * group, rows) + triton.cdiv(tokens * keys, rows),)
    _heads[grid](
        query, key, *out, *(angles or (None, None)), *_by_norm(parameters),
        tokens, *(step // unit for step in steps), eps, offset,
        keys, group, size, half, sign, rows, block, unit,
    )  # fmt: skip
    return out


def heads_backward(
    of_query: torch.Tensor,
    of_key: torch.Tensor,
    of_value: torch.Tensor,
    of_gate: torch.Tensor | None,
    query: torch.Tensor | None,
    key: torch.Tensor | None,
    angles: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    eps: float,
    offset: float,
    totals: Sequence[torch.Tensor],
) -> torch.Tensor:
    """of_query [T, N, H], of_key and of_value [T, K, H], of_gate [T, K, G, H], T > 0 → the gradient
    [T, K, G + 2, H], or [T, K, 2G + 2, H] with gates, of the tensor of all heads. If these are normed, query
    [T, K, G, H] and key [T, K, H] are views of that tensor, and gradients of the `parameters` are added to
    `totals` [H].

    Sums over heads are added up in an order that depends on sizes alone.
    """
    of_query, of_key, of_value = (grad.contiguous() for grad in (of_query, of_key, of_value))
    of_gate = None if of_gate is None else of_gate.contiguous()
    tokens, keys, size = of_key.shape
    group, count = of_query.shape[1] // keys, len(parameters)
    out = of_key.new_empty(tokens, keys, group * (1 if of_gate is None else 2) + 2, size)
    assert query is None or query.stride() == out.stride()
    half, block = angles[0].shape[-1] if angles else 0, triton.next_power_of_2(size)
    rows = max(_WALKED // block, 1)
    programs = min(_PROGRAMS, triton.cdiv(tokens * keys * group, rows))
    partials = torch.empty(programs, count, size, dtype=torch.float32, device=out.device)
    q_weight, _, k_weight, _ = _by_norm(parameters)
    _backward[(programs,)](
        of_query, of_key, of_value, of_gate, query, key, out, *(angles or (None, None)), q_weight, k_weight,
        partials, tokens, eps, offset, keys, group, count == 4, size, half, rows, block, num_warps=_WARPS,
    )  # fmt: skip
    if count:
        add_columns(partials, totals)
    return out


def _by_norm(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Weight and shift of the norm of queries, and of that of keys, None for what there is not."""
    each = len(parameters) // 2
    return [of for own in (parameters[:each], parameters[each:]) for of in (*own, None, None)[:2]]
