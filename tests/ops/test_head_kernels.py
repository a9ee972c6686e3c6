"""Kernels between the linears of attention under Triton's interpreter, against equations in fp64."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernel_calls import assert_rounded, drawn, launches, process_with

pytest.importorskip("triton", reason="Triton is not installed")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-2
# Tokens, keys, heads of queries a key, size of a head, and half of what is rotated of it.
SIZES = [
    (1, 3, 1, 72, 36),
    (3, 2, 4, 128, 64),
    (3, 5, 7, 256, 32),
    (3, 35, 1, 72, 20),
    (3, 1, 3, 10, 3),
    (33, 1, 1, 8, 4),
    (3, 2, 2, 16, 0),
]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    with process_with({"TRITON_INTERPRET": "1"}) as call:
        yield call


def turned(x: torch.Tensor, angles: list[torch.Tensor], sign: int) -> torch.Tensor:
    """[T, heads, H] in fp64, of which each pair is a complex number that is turned."""
    if not angles:
        return x
    cos, sin = (of.double() for of in angles)
    half = cos.shape[-1]
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos, sign * sin)
    return torch.cat([pairs.real, pairs.imag, x[..., 2 * half :]], dim=-1)


def normed(x: torch.Tensor, own: list[torch.Tensor], offset: float) -> torch.Tensor:
    """[T, heads, H] in fp64, each head by itself: a LayerNorm if there is a shift, an RMSNorm otherwise."""
    if not own:
        return x
    centred = x - x.mean(-1, keepdim=True) if own[1:] else x
    scaled = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * (own[0] + offset)
    return scaled + own[1] if own[1:] else scaled


def angles_of(dtype: torch.dtype, tokens: int, half: int) -> list[torch.Tensor]:
    return [drawn(dtype, tokens, 1, half, seed=seed) for seed in (1, 2)] if half else []


def check_heads(dtype: torch.dtype, sizes: tuple[int, ...], each: int, gated: bool) -> None:
    """With norms of `each` so many parameters."""
    from ops.kernels import heads

    tokens, keys, group, size, half = sizes
    joined = drawn(dtype, tokens, keys, group * (1 + gated) + 2, size)
    angles, offset = angles_of(dtype, tokens, half), float(gated)
    parameters = [drawn(dtype, size, seed=seed) for seed in range(3, 3 + 2 * each)]
    exact, wide = joined.double().requires_grad_(), [of.double().requires_grad_() for of in parameters]
    query, key, value, gate = (
        exact[:, :, of] for of in (slice(group), slice(-2, -1), slice(-1, None), slice(group, -2))
    )
    made = [
        turned(normed(x.flatten(1, 2), own, offset), angles, 1)
        for x, own in ((query, wide[:each]), (key, wide[each:]))
    ]
    with launches() as names:
        views = joined[:, :, :group], joined[:, :, -2]
        found = heads.heads(*views, angles, parameters, EPS, offset, 1)
    assert names == ["_heads"] * bool(tokens)
    for one, whole in zip(found, made, strict=True):
        assert one.is_contiguous()
        assert_rounded(one, whole.detach())
    if not tokens:
        return
    outs = [*made, value, *([gate] if gated else [])]
    grads = [drawn(dtype, *out.shape, seed=seed) for seed, out in enumerate(outs, 7)]
    whole, *sums = torch.autograd.grad(outs, [exact, *wide], [grad.double() for grad in grads])
    given = [grads[0], grads[1], grads[2].squeeze(2), grads[3] if gated else None, *views]
    totals = [torch.ones(size) for _ in parameters]
    with launches() as names:
        of_joined = heads.heads_backward(*given, angles, parameters, EPS, offset, totals)
    assert names == ["_backward", *(["_add_columns"] if each else [])]
    assert of_joined.dtype == dtype
    assert of_joined.is_contiguous()
    assert_rounded(of_joined, whole)
    for total, own in zip(totals, sums, strict=True):
        assert_rounded(total, 1 + own)


def check_apart(dtype: torch.dtype, sizes: tuple[int, ...], sign: int) -> None:
    """Queries and keys of which only numbers of a head lie side by side."""
    from ops.kernels import heads

    tokens, keys, group, size, half = sizes
    wide = drawn(dtype, tokens, keys, group + 1, size + 8)[..., :size]
    query, key, angles = wide[:, :, :group], wide[:, :, group], angles_of(dtype, tokens, half)
    found = heads.heads(query, key, angles, [], 0.0, 0.0, sign)
    for one, x in zip(found, (query.flatten(1, 2), key), strict=True):
        assert_rounded(one, turned(x.double(), angles, sign))


def check_walks(programs: int) -> None:
    from ops.kernels import heads

    with patch.object(heads, "_PROGRAMS", programs):
        check_heads(torch.float32, (43, 2, 3, 64, 32), 1, True)
        check_heads(torch.float32, (43, 2, 3, 64, 16), 2, False)
        check_heads(torch.float32, (43, 2, 3, 64, 32), 0, False)


def check_let_through(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    from ops.kernels import gates

    tokens, keys, group, size, _ = sizes
    joined = drawn(dtype, tokens, keys, 2 * group + 2, size)
    x, grad = (drawn(dtype, tokens, keys * group * size, seed=seed) for seed in (1, 2))
    exact, wide = x.double().requires_grad_(), joined.double().requires_grad_()
    out = exact / (1 + (-wide[:, :, group:-2].flatten(1)).exp())
    of_exact, of_wide = torch.autograd.grad(out, [exact, wide], grad.double())
    gate = joined[:, :, group:-2]
    with launches() as names:
        assert_rounded(gates.let_through(x, gate), out.detach())
        of_x, of_gate = gates.let_through_backward(grad, x, gate)
    assert names == ["_let_through"] * (2 if tokens else 0)
    assert_rounded(of_x, of_exact)
    assert_rounded(of_gate, of_wide[:, :, group:-2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes)))
def test_heads(interpreted: Callable[..., Any], dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    for each in (0, 1, 2):
        interpreted(check_heads, dtype, sizes, each, each == 1)
    for sign in (1, -1):
        interpreted(check_apart, dtype, sizes, sign)


@pytest.mark.parametrize("each", [0, 1, 2])
def test_no_heads(interpreted: Callable[..., Any], each: int) -> None:
    interpreted(check_heads, torch.float32, (0, 2, 4, 8, 4), each, True)
    interpreted(check_let_through, torch.float32, (0, 2, 4, 8, 4))


@pytest.mark.parametrize("programs", [1, 6])
def test_a_program_walks_several_blocks_of_heads(interpreted: Callable[..., Any], programs: int) -> None:
    interpreted(check_walks, programs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_heads(interpreted: Callable[..., Any], dtype: torch.dtype) -> None:
    for sizes in SIZES:
        interpreted(check_let_through, dtype, sizes)
    interpreted(check_let_through, dtype, (2, 2, 5, 256, 0))
