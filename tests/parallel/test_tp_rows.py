"""Shares of the rows that ranks of a tp group compute together."""

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

from parallel.tp_rows import own_rows

WIDTH = 3


def shared(rows: int) -> torch.Tensor:
    return torch.arange(rows * WIDTH, dtype=torch.float64).reshape(rows, WIDTH)


def _share(rank: int, counts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share, and the gradient of all rows where row i of the tp group has the gradient i + 1."""
    weight = torch.full((WIDTH,), 2.0, dtype=torch.float64, requires_grad=True)
    rows = shared(sum(counts)) * weight
    rows.retain_grad()
    own = own_rows(rows, counts, dist.group.WORLD)
    first = sum(counts[:rank])
    grads = torch.arange(first, first + counts[rank], dtype=torch.float64)[:, None] + 1
    torch.autograd.backward(own, grads.expand(-1, WIDTH))
    return own.detach(), rows.grad


@pytest.mark.parametrize(
    "counts", [(2, 2), (3, 1), (5, 0), (0, 4), (0, 0), (2, 1, 0), (0, 3, 1), (1, 1, 1, 0), (4,)]
)
def test_each_rank_passes_on_its_share_and_gets_all_gradients(
    ranks: RankPool, counts: tuple[int, ...]
) -> None:
    answers = ranks.run(len(counts), _share, counts)
    total = sum(counts)
    assert [len(own) for own, _ in answers] == list(counts)
    torch.testing.assert_close(torch.cat([own for own, _ in answers]), 2 * shared(total), rtol=0, atol=0)
    for _, gradient in answers:
        expected = torch.arange(1, total + 1, dtype=torch.float64)[:, None].expand(-1, WIDTH)
        assert torch.equal(gradient, expected)


def _share_in(rank: int, dtype: torch.dtype, counts: tuple[int, ...]) -> tuple[torch.dtype, torch.dtype]:
    rows = torch.ones(sum(counts), WIDTH, dtype=dtype, requires_grad=True)
    own = own_rows(rows, counts, dist.group.WORLD)
    own.sum().backward()
    return own.dtype, rows.grad.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_is_kept(ranks: RankPool, dtype: torch.dtype) -> None:
    assert ranks.run(2, _share_in, dtype, (2, 1)) == [(dtype, dtype)] * 2


def _adjoint(rank: int, counts: tuple[int, ...]) -> tuple[float, float]:
    """⟨A x, y⟩ summed over the ranks, and ⟨x, Aᵀ y⟩ of this rank."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    own = own_rows(x, counts, dist.group.WORLD)
    y = torch.randn(counts[rank], WIDTH, generator=generator.manual_seed(rank + 1), dtype=torch.float64)
    torch.autograd.backward(own, y)
    return float((own.detach() * y).sum()), float((x.detach() * x.grad).sum())


@pytest.mark.parametrize("counts", [(3, 2), (0, 4, 1)])
def test_the_way_back_is_the_adjoint(ranks: RankPool, counts: tuple[int, ...]) -> None:
    answers = ranks.run(len(counts), _adjoint, counts)
    forward = sum(out for out, _ in answers)
    for _, back in answers:
        assert back == pytest.approx(forward, rel=1e-12)


def _wrong(rank: int) -> str:
    try:
        own_rows(shared(3), (2, 2), dist.group.WORLD)
    except AssertionError as error:
        return str(error)
    return ""


def test_counts_that_are_not_those_of_the_rows_are_refused(ranks: RankPool) -> None:
    assert ranks.run(2, _wrong) == ["3 rows divided into (2, 2)"] * 2


def _nothing_to_go_back(rank: int) -> bool:
    with torch.no_grad():
        return own_rows(shared(2), (1, 1), dist.group.WORLD).requires_grad


def test_evaluation_takes_no_gradient(ranks: RankPool) -> None:
    assert ranks.run(2, _nothing_to_go_back) == [False, False]
