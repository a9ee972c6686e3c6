"""Rows in the order of experts, against a selection by a mask."""

import pytest
import torch

from ops.routing import permute


@pytest.mark.parametrize(("tokens", "experts", "topk"), [(0, 4, 2), (1, 1, 1), (7, 5, 2), (64, 8, 8)])
def test_rows_are_those_that_the_map_selects_expert_by_expert(tokens: int, experts: int, topk: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, 3, generator=generator, requires_grad=True)
    scores = torch.rand(tokens, experts, generator=generator).requires_grad_()
    chosen = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, scores.topk(topk).indices, value=True)

    of = torch.arange(tokens).expand(experts, -1).masked_select(chosen.T)
    expected = (hidden[of], scores.T.masked_select(chosen.T), of)
    found = permute(hidden, chosen, scores, tokens * topk)
    for mine, reference in zip(found, expected, strict=True):
        assert mine is not None
        assert torch.equal(mine, reference)

    def gradients(rows: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((rows * weights.unsqueeze(1)).square().sum(), (hidden, scores))

    assert found[1] is not None
    of_mine, of_reference = gradients(found[0], found[1]), gradients(expected[0], expected[1])
    for mine, reference in zip(of_mine, of_reference, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-7)


def test_rows_that_nobody_counted_are_refused() -> None:
    with pytest.raises(AssertionError, match="counted ahead"):
        permute(torch.zeros(2, 3), torch.ones(2, 1, dtype=torch.bool))
