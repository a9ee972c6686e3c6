"""Kernels under Triton's interpreter against their equations in double precision."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernel_calls import assert_rounded, drawn, launches, process_with

pytest.importorskip("triton", reason="Triton is not installed")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [(0, 8), (1, 8), (257, 8), (257, 72), (3, 100), (3, 1152)]
ACTIVATED = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * (1 + (x / 2**0.5).erf()) / 2,
    "gelu_tanh": lambda x: x * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh()) / 2,
    "quick_gelu": lambda x: x / (1 + (-1.702 * x).exp()),
}


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    with process_with({"TRITON_INTERPRET": "1"}) as call:
        yield call


def normed_by(
    x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor | None, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A norm in fp64, its means and its reciprocal deviations."""
    mean = x.mean(1) if shift is not None else x.new_zeros(0)
    centred = x if shift is None else x - mean[:, None]
    rstd = (centred.square().mean(1) + eps) ** -0.5
    normed = centred * rstd[:, None] * (weight + offset)
    return normed if shift is None else normed + shift, mean, rstd


def check_norms(dtype: torch.dtype, rows: int, width: int, layer: bool) -> None:
    from ops.kernels import norms

    x, out = drawn(dtype, rows, width), drawn(dtype, rows, width, seed=1)
    weight, bias = drawn(dtype, width, seed=2), drawn(dtype, width, seed=3)
    shift = drawn(dtype, width, seed=4) if layer else None
    eps, offset = 1e-2, float(layer)
    wide = [weight.double(), shift.double() if layer else None, eps, offset]

    def agree(found: tuple[torch.Tensor, ...], x: torch.Tensor) -> None:
        for one, exact in zip(found, normed_by(x.double(), *wide), strict=True):
            assert_rounded(one, exact)
        assert found[1].dtype == found[2].dtype == torch.float32

    with launches() as names:
        agree(norms.norm(x, weight, shift, eps, offset), x)
        total, *found = norms.add_norm(x, out, bias, weight, shift, eps, offset)
        assert_rounded(total, x.double() + (out.double() + bias.double()))
        agree(tuple(found), total)
        total, *found = norms.add_norm(x, out, None, weight, shift, eps, offset)
        assert_rounded(total, x.double() + out.double())
        agree(tuple(found), total)
        total, *found = norms.norm_add(x, out, weight, shift, eps, offset)
        normed, *statistics = normed_by(out.double(), *wide)
        for one, exact in zip((total, *found), (x.double() + normed, *statistics), strict=True):
            assert_rounded(one, exact)
    assert names == ["_forward"] * (4 if rows else 0)


def check_norm_backward(
    dtype: torch.dtype, rows: int, width: int, layer: bool, biased: bool, programs: int | None = None
) -> None:
    from ops.kernels import norms

    total, grad = drawn(dtype, rows, width), drawn(dtype, rows, width, seed=1)
    weight, offset = drawn(dtype, width, seed=2), float(layer)
    around = drawn(dtype, rows, width, seed=3)
    exact, wide = total.double().requires_grad_(), weight.double().requires_grad_()
    shift = torch.zeros(width, dtype=torch.float64, requires_grad=True) if layer else None
    normed, mean, rstd = normed_by(exact, wide, shift, 1e-2, offset)
    of_exact, *parameters = torch.autograd.grad(
        normed, [exact, wide, *([shift] if shift is not None else [])], grad.double()
    )
    of_exact = of_exact + around.double()
    saved = [x.detach().float() for x in (mean, rstd)]
    if biased:
        parameters.append(of_exact.sum(0))
    totals = [torch.ones(width) for _ in parameters]
    with launches() as names, patch.object(norms, "_PROGRAMS", programs or norms._PROGRAMS):
        of_total = norms.norm_backward(grad, around, total, *saved, weight, offset, totals)
    assert names == ["_backward", "_add_columns"]
    assert of_total.dtype == dtype
    assert_rounded(of_total, of_exact)
    for one, gradient in zip(totals, parameters, strict=True):
        assert_rounded(one, 1 + gradient)
    alone = norms.norm_backward(grad, None, total, *saved, weight, offset, totals)
    assert_rounded(alone, of_exact - around.double())


def check_widest() -> None:
    from ops.kernels import norms

    check_norms(torch.float32, 1, 16384, True)
    check_norm_backward(torch.float32, 1, 16384, False, False)
    with pytest.raises(AssertionError, match="at most 16384"):
        norms.norm(torch.ones(1, 16385), torch.ones(16385), None, 1e-5, 0.0)


def check_sum(dtype: torch.dtype, rows: int, width: int) -> None:
    from ops.kernels import sums

    stream, out, bias = drawn(dtype, rows, width), drawn(dtype, rows, width, seed=1), drawn(dtype, width)
    with launches() as names:
        found = sums.summed(stream, out, bias)
    assert names == ["_add"] * bool(rows)
    assert_rounded(found, stream.double() + (out.double() + bias.double()))


def check_gates(dtype: torch.dtype, rows: int, width: int, kind: str, clamp: float | None) -> None:
    from ops.kernels import gates

    offset = 0.0 if clamp is None else 1.0
    x, grad = drawn(dtype, rows, 2 * width), drawn(dtype, rows, width, seed=1)
    exact = x.double().requires_grad_()
    gate, other = exact.chunk(2, dim=-1)
    if clamp is not None:
        gate, other = gate.clamp(max=clamp), other.clamp(-clamp, clamp)
    product = ACTIVATED[kind](gate) * (other + offset)
    (of_exact,) = torch.autograd.grad(product, exact, grad.double())
    with launches() as names:
        assert_rounded(gates.gated(x, kind, clamp, offset), product.detach())
        assert_rounded(gates.gated_backward(grad, x, kind, clamp, offset), of_exact)
    assert names == (["_forward", "_backward"] if rows else [])


def check_biased(dtype: torch.dtype, rows: int, width: int, kind: str, programs: int | None = None) -> None:
    from ops.kernels import gates

    x, bias, grad = drawn(dtype, rows, width), drawn(dtype, width, seed=1), drawn(dtype, rows, width, seed=2)
    exact, wide = x.double().requires_grad_(), bias.double().requires_grad_()
    out = ACTIVATED[kind](exact + wide)
    gradients = torch.autograd.grad(out, [exact, wide], grad.double())
    total = torch.ones(width)
    with launches() as names, patch.object(gates, "_PROGRAMS", programs or gates._PROGRAMS):
        assert_rounded(gates.biased(x, bias, kind), out.detach())
        of_x = gates.biased_backward(grad, x, bias, kind, total)
    assert names == (["_biased", "_biased_backward", "_add_columns"] if rows else [])
    assert of_x.dtype == dtype
    for one, gradient in zip((of_x, total - 1), gradients, strict=True):
        assert_rounded(one, gradient)


def check_no_number(clamp: float | None) -> None:
    from ops.kernels import gates

    x = torch.tensor([[torch.nan, 1.0, 1.0, torch.nan]])
    assert gates.gated(x, "silu", clamp, 0.0).isnan().all()
    of_x = gates.gated_backward(torch.ones(1, 2), x, "silu", clamp, 0.0)
    assert of_x.isnan().tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_norms(interpreted: Callable[..., Any], dtype: torch.dtype, rows: int, width: int) -> None:
    for layer in (False, True):
        interpreted(check_norms, dtype, rows, width, layer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(rows, width) for rows, width in SIZES if rows])
def test_gradients_of_norms(
    interpreted: Callable[..., Any], dtype: torch.dtype, rows: int, width: int
) -> None:
    interpreted(check_norm_backward, dtype, rows, width, False, True)
    interpreted(check_norm_backward, dtype, rows, width, True, False)


@pytest.mark.parametrize("layer", [False, True])
def test_a_program_walks_several_rows(interpreted: Callable[..., Any], layer: bool) -> None:
    interpreted(check_norm_backward, torch.float32, 257, 100, layer, True, 2)
    # More partial sums than are read at once.
    interpreted(check_norm_backward, torch.float32, 70, 2100, layer, False, 66)


def test_rows_that_a_program_just_holds(interpreted: Callable[..., Any]) -> None:
    interpreted(check_widest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_sums(interpreted: Callable[..., Any], dtype: torch.dtype, rows: int, width: int) -> None:
    interpreted(check_sum, dtype, rows, width)


@pytest.mark.parametrize("kind", ACTIVATED)
@pytest.mark.parametrize("clamp", [None, 1.5])
def test_gates(interpreted: Callable[..., Any], kind: str, clamp: float | None) -> None:
    for rows, width in ((0, 8), (1, 8), (3, 100), (3, 1152)):
        interpreted(check_gates, torch.float32, rows, width, kind, clamp)
    for dtype in (torch.float16, torch.bfloat16):
        interpreted(check_gates, dtype, 3, 72, kind, clamp)


def test_many_gates(interpreted: Callable[..., Any]) -> None:
    interpreted(check_gates, torch.float32, 257, 8, "silu", None)


@pytest.mark.parametrize("kind", ACTIVATED)
def test_activations_of_sums(interpreted: Callable[..., Any], kind: str) -> None:
    for rows, width in SIZES:
        interpreted(check_biased, torch.float32, rows, width, kind)
    for dtype in (torch.float16, torch.bfloat16):
        interpreted(check_biased, dtype, 9, 300, kind)


@pytest.mark.parametrize("programs", [1, 6])
def test_a_program_walks_several_rows_of_activations(interpreted: Callable[..., Any], programs: int) -> None:
    interpreted(check_biased, torch.float32, 43, 700, "gelu", programs)


@pytest.mark.parametrize("clamp", [None, 7.0])
def test_what_is_no_number_goes_through_a_gate(interpreted: Callable[..., Any], clamp: float | None) -> None:
    interpreted(check_no_number, clamp)
