"""Gradients of weights, added up by the product."""

import pytest
import torch

from ops.linear import add_weight_gradient

TOLERANCES = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 4e-3}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_a_gradient_is_added_to_what_is_there(dtype: torch.dtype, tokens: int) -> None:
    check(torch.device("cpu"), dtype, tokens)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_a_gpu_adds_what_it_multiplies_in_fp32(dtype: torch.dtype, tokens: int) -> None:
    check(torch.device("cuda"), dtype, tokens, 1e-6)


def check(device: torch.device, dtype: torch.dtype, tokens: int, tolerance: float | None = None) -> None:
    generator = torch.Generator().manual_seed(tokens)
    inputs, grads, before = (
        torch.randn(shape, generator=generator) for shape in ((tokens, 24), (tokens, 16), (16, 24))
    )
    total = before.to(device, torch.float64 if dtype is torch.float64 else torch.float32)
    inputs, grads = (x.to(device, dtype) for x in (inputs, grads))
    expected = total.double() + grads.double().t() @ inputs.double()
    add_weight_gradient(inputs, grads, total)
    tolerance = TOLERANCES[dtype] if tolerance is None else tolerance
    assert (total.double() - expected).norm() <= tolerance * expected.norm()
