"""Rows in the order of experts and back, against selections by masks."""

import pytest
import torch

from ops.routing import expert_numbers, order_rows, rows_of, sums_of, weighed, weights_of

SIZES = [(0, 4, 2), (1, 1, 1), (7, 5, 2), (64, 8, 8), (50, 300, 3)]


def chosen_of(tokens: int, experts: int, topk: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, experts, generator=generator).topk(topk).indices


@pytest.mark.parametrize(("tokens", "experts", "topk"), SIZES)
def test_rows_are_those_of_each_expert_by_token(tokens: int, experts: int, topk: int) -> None:
    chosen = chosen_of(tokens, experts, topk)
    order = order_rows(chosen, expert_numbers(experts))
    takes = torch.zeros(experts, tokens, dtype=torch.bool).scatter_(0, chosen.T, value=True)
    assert order.tokens.tolist() == takes.nonzero()[:, 1].tolist()
    assert order.ends.tolist() == takes.sum(1).cumsum(0).tolist()
    assert order.ends.dtype == torch.int32
    by_row = chosen.flatten()[order.slots].tolist()
    assert by_row == sorted(by_row)


@pytest.mark.parametrize(("tokens", "experts", "topk"), SIZES)
def test_sums_are_the_way_back(tokens: int, experts: int, topk: int) -> None:
    """⟨A x, y⟩ = ⟨x, Aᵀ y⟩, each is the backward of the other, and sums are those of a token's rows."""
    order = order_rows(chosen_of(tokens, experts, topk), expert_numbers(experts))
    x = torch.randn(tokens, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(tokens * topk, 3, dtype=torch.float64, requires_grad=True)
    rows, sums = rows_of(x, order), sums_of(y, order, tokens)
    assert torch.equal(rows, x[order.tokens])
    torch.testing.assert_close(sums, torch.zeros_like(x).index_add(0, order.tokens, y))
    torch.testing.assert_close((rows * y).sum(), (x * sums).sum())
    (of_x,) = torch.autograd.grad((rows * y.detach()).sum(), x)
    (of_y,) = torch.autograd.grad((sums * x.detach()).sum(), y)
    assert torch.equal(of_x, sums)
    assert torch.equal(of_y, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_weighed_by_its_own_probability(dtype: torch.dtype) -> None:
    chosen = chosen_of(7, 5, 2)
    order = order_rows(chosen, expert_numbers(5))
    probs = torch.rand(7, 2, requires_grad=True)
    product = torch.randn(14, 6).to(dtype).requires_grad_()
    out = weighed(product, weights_of(probs, order))
    token, choice = order.slots // 2, order.slots % 2
    expected = (product * probs[token, choice].unsqueeze(1)).to(dtype)
    assert out.dtype == dtype
    assert torch.equal(out, expected)
    grad = torch.randn(14, 6).to(dtype)
    mine, reference = (torch.autograd.grad(of, (product, probs), grad) for of in (out, expected))
    for a, b in zip(mine, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
