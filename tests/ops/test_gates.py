"""Activations of a sum with a bias, by torch: their numbers, and where the gradient of the bias goes."""

import pytest
import torch

from ops.gates import FUNCTIONS, biased


def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("shape", [(7, 1, 5), (0, 1, 5)])
def test_it_is_the_activation_of_a_sum(kind: str, shape: tuple[int, ...]) -> None:
    x, bias, grad = drawn(torch.float64, *shape), drawn(torch.float64, 5), drawn(torch.float64, *shape)
    leaves, plain = ([one.clone().requires_grad_() for one in (x, bias)] for _ in range(2))
    found, exact = biased(*leaves, kind), FUNCTIONS[kind](plain[0] + plain[1])
    assert torch.equal(found, exact)
    found.backward(grad)
    exact.backward(grad)
    for one, other in zip(leaves, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_the_gradient_of_a_bias_is_added_to_the_one_in_single_precision() -> None:
    x, bias = drawn(torch.bfloat16, 4096, 8), torch.nn.Parameter(drawn(torch.bfloat16, 8))
    bias.main_grad = torch.ones(8)  # type: ignore[attr-defined]
    leaf = x.clone().requires_grad_()
    biased(leaf, bias, "gelu").sum().backward()
    assert bias.grad is None
    assert leaf.grad is not None
    torch.testing.assert_close(vars(bias)["main_grad"], 1 + leaf.grad.float().sum(0))


def test_a_bias_that_does_not_learn_gets_no_gradient() -> None:
    bias = torch.nn.Parameter(drawn(torch.float32, 8), requires_grad=False)
    bias.main_grad = torch.ones(8)  # type: ignore[attr-defined]
    x = drawn(torch.float32, 3, 8).requires_grad_()
    biased(x, bias, "gelu").sum().backward()
    assert x.grad is not None
    assert bias.grad is None
    assert torch.equal(vars(bias)["main_grad"], torch.ones(8))


def test_only_the_operand_is_kept() -> None:
    kept: list[torch.Tensor] = []
    x, bias = drawn(torch.float32, 3, 8).requires_grad_(), torch.nn.Parameter(drawn(torch.float32, 8))
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        biased(x, bias, "gelu")
    assert [one.data_ptr() for one in kept] == [x.data_ptr()]
