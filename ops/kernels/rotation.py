"""The rotation of queries and keys by the positions of their tokens, and its gradient.

Shapes: T tokens, K groups, each of G heads of queries, one of keys and one of values; N = K·G heads of
queries, H head size, h half of what is rotated of it.
"""

from math import gcd

import torch
import triton
import triton.language as tl

_NUMBERS = 2048  # numbers that a program has


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    x, x_group, x_head, out, out_group, cos, sin, part,
    COUNT: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, SIGN: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Rotate a part of a token's COUNT heads; `x` and `out` point to the first of all."""
    head = part.to(tl.int64) * HEADS + tl.arange(0, HEADS)[:, None]
    x += ((head // GROUP) * x_group + (head % GROUP) * x_head) * UNIT
    out += (head // GROUP) * out_group * UNIT + (head % GROUP) * SIZE
    there = head < COUNT
    if HALF > 0:
        place = tl.arange(0, BLOCK)[None, :]
        in_half = place < HALF
        inside = there & in_half
        low = tl.load(x + place, inside).to(tl.float32)
        high = tl.load(x + HALF + place, inside).to(tl.float32)
        across = tl.load(cos + place, in_half).to(tl.float32)
        up = tl.load(sin + place, in_half).to(tl.float32) * SIGN
        tl.store(out + place, (low * across - high * up).to(out.dtype.element_ty), inside)
        tl.store(out + HALF + place, (high * across + low * up).to(out.dtype.element_ty), inside)
    if REST > 0:
        place = 2 * HALF + tl.arange(0, REST)[None, :]
        inside = there & (place < SIZE)
        tl.store(out + place, tl.load(x + place, inside), inside)


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    query, key, value, cos, sin, q, k, v,
    query_token, query_group, query_head, key_token, key_group, value_token, value_group,
    q_token, q_group, k_token, k_group,
    KEYS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, SIGN: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, WHOLE: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """First come the programs of a token's queries, then those of its keys, then those of its values, which
    are copied: heads of whose size nothing is rotated. Strides are in units of UNIT numbers, which tells the
    compiler how many numbers it may load at once.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cos += token * HALF
    sin += token * HALF
    of_queries: tl.constexpr = (KEYS * GROUP + HEADS - 1) // HEADS
    of_keys: tl.constexpr = (KEYS + HEADS - 1) // HEADS
    if part < of_queries:
        _turn(
            query + token * query_token * UNIT, query_group, query_head, q + token * q_token * UNIT, q_group,
            cos, sin, part, KEYS * GROUP, GROUP, SIZE, HALF, SIGN, HEADS, BLOCK, REST, UNIT,
        )  # fmt: skip
    elif part < of_queries + of_keys:
        _turn(
            key + token * key_token * UNIT, key_group, 0, k + token * k_token * UNIT, k_group, cos, sin,
            part - of_queries, KEYS, 1, SIZE, HALF, SIGN, HEADS, BLOCK, REST, UNIT,
        )  # fmt: skip
    elif value is not None:
        _turn(
            value + token * value_token * UNIT, value_group, 0, v + token * k_token * UNIT, k_group, cos, sin,
            part - of_queries - of_keys, KEYS, 1, SIZE, 0, SIGN, HEADS, BLOCK, WHOLE, UNIT,
        )  # fmt: skip


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [T, N, H] or [T, K, G, H] and key [T, K, H], cos and sin [T, 1, h] → [T, N, H] and [T, K, H],
    rotated by sign times the angles and contiguous. Of query and key only the last dimension need be.
    """
    tokens, keys, size = key.shape
    query = _grouped(query, keys)
    out = key.new_empty(tokens, keys, query.shape[2], size), key.new_empty(tokens, keys, size)
    _launch(query, key, None, cos, sin, sign, (*out, None))
    return out[0].flatten(1, 2), out[1]


def rotate_joined(
    of_query: torch.Tensor,
    of_key: torch.Tensor,
    of_value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    sign: int,
) -> torch.Tensor:
    """of_query [T, N, H], of_key and of_value [T, K, H] → [T, K, G + 2, H]: each group's heads of queries and
    that of keys, rotated as `rotate` does, and that of values as it is.
    """
    tokens, keys, size = of_key.shape
    of_query = _grouped(of_query, keys)
    group = of_query.shape[2]
    joined = of_key.new_empty(tokens, keys, group + 2, size)
    outs = joined[:, :, :group], joined[:, :, group], joined[:, :, group + 1]
    _launch(of_query, of_key, of_value, cos, sin, sign, outs)
    return joined


def _grouped(query: torch.Tensor, keys: int) -> torch.Tensor:
    """[T, N, H] or [T, K, G, H] → [T, K, G, H]."""
    return query if query.dim() == 4 else query.unflatten(1, (keys, query.shape[1] // keys))


def _launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    sign: int,
    outs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
) -> None:
    """Write what is made of query [T, K, G, H], key and value [T, K, H] to `outs` of the same shapes. There,
    a group's heads of queries lie one behind the other, and keys as far apart as values.
    """
    tokens, keys, group, size = query.shape
    if not tokens:
        return
    q, k, v = outs
    half = cos.shape[-1]
    rest = size - 2 * half
    heads = max(_NUMBERS // triton.next_power_of_2(size), 1)
    parts = triton.cdiv(keys * group, heads) + triton.cdiv(keys, heads) * (1 if value is None else 2)
    steps = [*query.stride()[:3], *key.stride()[:2], *((0, 0) if value is None else value.stride()[:2])]
    steps += [*q.stride()[:2], *k.stride()[:2]]
    unit = gcd(16, half, size, *steps)
    _rotate[(tokens, parts)](
        query, key, value, cos, sin, q, k, v, *(step // unit for step in steps),
        keys, group, size, half, sign,
        heads, triton.next_power_of_2(half), triton.next_power_of_2(rest) if rest else 0,
        triton.next_power_of_2(size), unit,
    )  # fmt: skip
