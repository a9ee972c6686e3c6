"""Losses and predictions over a vocabulary that ranks share, against one rank that holds all of it."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import RankPool

from parallel.loss import linear_argmax, linear_losses

TOKENS, WIDTH, VOCABULARY = 13, 6, 24
NO_CHUNK = 10**6


def case(dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> tuple[torch.Tensor, ...]:
    """Hidden states, weights, labels that reach every part of the vocabulary, and a weight for each loss."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64)
    weight = 3 * torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    labels[: min(tokens, 4)] = torch.tensor([0, VOCABULARY - 1, 11, 12])[:tokens]
    grads = torch.randn(tokens, generator=generator, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), labels, grads


def losses_and_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    grads: torch.Tensor,
    chunk: int,
    ids: int = VOCABULARY,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    group = dist.group.WORLD
    part = weight.chunk(group.size())[group.rank()].clone().requires_grad_()
    hidden = hidden.clone().requires_grad_()
    losses = linear_losses(hidden, part, labels, group, chunk, ids)
    (losses * grads).sum().backward()
    return losses.detach(), hidden.grad, part.grad


def _losses(rank: int, chunk: int, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return losses_and_gradients(*case(dtype, tokens), chunk)


def expected(dtype: torch.dtype, tokens: int, ids: int = VOCABULARY) -> tuple[torch.Tensor, ...]:
    """By the equations in fp64, of numbers and logits that were rounded to `dtype`."""
    hidden, weight, labels, grads = case(dtype, tokens)
    logits = F.linear(hidden, weight)[:, :ids].double()
    place, labels = torch.arange(tokens), labels % ids
    logs = logits.logsumexp(1)
    of_logits = (logits - logs[:, None]).exp()
    of_logits[place, labels] -= 1
    of_logits *= grads[:, None]
    of_weight = torch.zeros_like(weight, dtype=torch.float64)
    of_weight[:ids] = of_logits.T @ hidden.double()
    return logs - logits[place, labels], of_logits @ weight[:ids].double(), of_weight


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk", [NO_CHUNK, 5])
def test_shared_losses_equal_whole_ones(ranks: RankPool, world: int, chunk: int) -> None:
    losses, hidden_grad, weight_grad = expected(torch.float64, TOKENS)
    answers = ranks.run(world, _losses, chunk, TOKENS, torch.float64)
    for own, _, _ in answers:
        torch.testing.assert_close(own, losses, rtol=0, atol=1e-12)
    summed = sum(of_hidden for _, of_hidden, _ in answers)
    torch.testing.assert_close(summed, hidden_grad, rtol=0, atol=1e-12)
    parts = torch.cat([of_weight for _, _, of_weight in answers])
    torch.testing.assert_close(parts, weight_grad, rtol=0, atol=1e-12)


def away(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("chunk", [NO_CHUNK, 5])
def test_losses_in_fp32_are_rounded_as_little_as_its_logits(ranks: RankPool, world: int, chunk: int) -> None:
    exact = expected(torch.float32, TOKENS, IDS)
    answers = ranks.run(world, _padded, chunk, IDS, torch.float32)
    whole = (
        answers[-1][0],
        sum(of_hidden for _, of_hidden, _ in answers),
        torch.cat([of_weight for _, _, of_weight in answers]),
    )
    assert all(away(a, b) < 2e-7 for a, b in zip(whole, exact, strict=True))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_low_precision_losses_are_in_fp32_and_close(ranks: RankPool, world: int) -> None:
    losses, hidden_grad, weight_grad = expected(torch.bfloat16, TOKENS, IDS)
    answers = ranks.run(world, _padded, 5, IDS, torch.bfloat16)
    for own, of_hidden, _ in answers:
        assert own.dtype == torch.float32
        assert of_hidden.dtype == torch.bfloat16
        assert away(own, losses) < 1e-6, "logits are rounded, and nothing behind them"
    assert away(sum(of_hidden.float() for _, of_hidden, _ in answers), hidden_grad) < 4e-3
    assert away(torch.cat([of_weight for _, _, of_weight in answers]), weight_grad) < 4e-3


def _added(rank: int, chunk: int) -> torch.Tensor:
    hidden, weight, labels, grads = case(torch.bfloat16)
    group = dist.group.WORLD
    part = torch.nn.Parameter(weight.chunk(group.size())[rank].clone())
    part.main_grad = torch.ones(part.shape)
    for _ in range(2):
        losses = linear_losses(hidden.clone().requires_grad_(), part, labels, group, chunk, VOCABULARY)
        (losses * grads).sum().backward()
    assert part.grad is None
    return part.main_grad


@pytest.mark.parametrize("chunk", [NO_CHUNK, 5])
def test_gradients_of_the_weight_are_added_to_those_that_are_there(ranks: RankPool, chunk: int) -> None:
    parts = torch.cat(ranks.run(2, _added, chunk))
    assert parts.dtype == torch.float32
    assert away(parts - 1, 2 * expected(torch.bfloat16, TOKENS)[2]) < 4e-3


def _frozen(rank: int, chunk: int) -> torch.Tensor:
    hidden, weight, labels, grads = case()
    hidden.requires_grad_()
    losses = linear_losses(hidden, weight, labels, dist.group.WORLD, chunk, VOCABULARY)
    (losses * grads).sum().backward()
    return hidden.grad


@pytest.mark.parametrize("chunk", [NO_CHUNK, 5])
def test_a_frozen_weight_hands_gradients_on(ranks: RankPool, chunk: int) -> None:
    (hidden_grad,) = ranks.run(1, _frozen, chunk)
    torch.testing.assert_close(hidden_grad, expected(torch.float64, TOKENS)[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [NO_CHUNK, 1])
def test_no_tokens_have_no_losses(ranks: RankPool, chunk: int) -> None:
    for losses, hidden_grad, weight_grad in ranks.run(2, _losses, chunk, 0, torch.float64):
        assert losses.shape == (0,)
        assert hidden_grad.shape == (0, WIDTH)
        assert not weight_grad.any()


def _with_and_without_chunks(rank: int) -> list[tuple[torch.Tensor, ...]]:
    return [losses_and_gradients(*case(), chunk) for chunk in (NO_CHUNK, TOKENS, TOKENS - 1, 1)]


@pytest.mark.parametrize("world", [1, 2])
def test_chunks_change_nothing(ranks: RankPool, world: int) -> None:
    for whole, same, uneven, single in ranks.run(world, _with_and_without_chunks):
        assert all(torch.equal(a, b) for a, b in zip(whole, same, strict=True))
        for chunked in (uneven, single):
            for a, b in zip(whole, chunked, strict=True):
                torch.testing.assert_close(b, a, rtol=0, atol=1e-13)


def _huge(rank: int) -> torch.Tensor:
    hidden, weight, labels, grads = case()
    return losses_and_gradients(hidden * 1e4, weight, labels, grads, NO_CHUNK)[0]


def test_large_logits_do_not_overflow(ranks: RankPool) -> None:
    hidden, weight, labels, _ = case()
    losses = F.cross_entropy(F.linear(hidden * 1e4, weight), labels, reduction="none")
    for own in ranks.run(2, _huge):
        torch.testing.assert_close(own, losses, rtol=1e-12, atol=1e-12)
        assert own.isfinite().all()


def _likely(rank: int) -> torch.Tensor:
    weight = torch.zeros(VOCABULARY, 1)
    weight[0], weight[-1] = 1e4, 1e4 - 3
    part = weight.chunk(dist.group.WORLD.size())[rank]
    return linear_losses(torch.ones(1, 1), part, torch.zeros(1).long(), dist.group.WORLD, 1, VOCABULARY)


@pytest.mark.parametrize("world", [1, 2])
def test_a_small_loss_of_large_logits_keeps_its_digits(ranks: RankPool, world: int) -> None:
    for own in ranks.run(world, _likely):
        torch.testing.assert_close(own, torch.tensor([-3.0]).exp().log1p(), rtol=1e-6, atol=0)


def _padded(rank: int, chunk: int, ids: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    hidden, weight, labels, grads = case(dtype)
    return losses_and_gradients(hidden, weight, labels % IDS, grads, chunk, ids)


IDS = 13  # of four ranks, the last has none, and the one before it one


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk", [NO_CHUNK, 5])
def test_rows_of_padding_take_no_part(ranks: RankPool, world: int, chunk: int) -> None:
    losses, hidden_grad, weight_grad = expected(torch.float64, TOKENS, IDS)
    answers = ranks.run(world, _padded, chunk, IDS)
    for own, _, _ in answers:
        torch.testing.assert_close(own, losses, rtol=0, atol=1e-12)
    summed = sum(of_hidden for _, of_hidden, _ in answers)
    torch.testing.assert_close(summed, hidden_grad, rtol=0, atol=1e-12)
    parts = torch.cat([of_weight for _, _, of_weight in answers])
    torch.testing.assert_close(parts, weight_grad, rtol=0, atol=1e-12)
    assert not parts[IDS:].any()
    hidden, weight, _, _ = case()
    best = F.linear(hidden, weight)[:, :IDS].argmax(1)
    for tokens in ranks.run(world, _argmax, hidden, weight, IDS):
        assert torch.equal(tokens, best)


def _argmax(rank: int, hidden: torch.Tensor, weight: torch.Tensor, ids: int = VOCABULARY) -> torch.Tensor:
    group = dist.group.WORLD
    return linear_argmax(hidden, weight.chunk(group.size())[group.rank()], group, ids)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_likeliest_token_is_that_of_the_whole_vocabulary(ranks: RankPool, world: int) -> None:
    hidden, weight, _, _ = case(torch.float32, tokens=200)
    best = F.linear(hidden, weight).argmax(1)
    assert len(set((best * 4 // VOCABULARY).tolist())) == 4, "every part of the vocabulary has some"
    for tokens in ranks.run(world, _argmax, hidden, weight):
        assert torch.equal(tokens, best)
    for tokens in ranks.run(world, _argmax, hidden[:0], weight):
        assert tokens.shape == (0,)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_of_equal_tokens_the_lowest_is_taken(ranks: RankPool, world: int) -> None:
    weight = torch.zeros(VOCABULARY, 3)
    ties = torch.tensor([[5, 7], [5, 18], [12, 23], [0, 23]])
    hidden = torch.zeros(len(ties) + 1, 3)
    hidden[: len(ties), 0] = torch.arange(len(ties)) + 1.0
    # Rows of the weight that are equal, one pair for each token; the last token finds all logits equal.
    answers = []
    for number, pair in enumerate(ties):
        rows = weight.clone()
        rows[pair, 0] = 1.0
        answers.append((hidden[number : number + 1], rows, pair.min()))
    answers.append((hidden[-1:], weight, torch.tensor(0)))
    for state, rows, lowest in answers:
        for tokens in ranks.run(world, _argmax, state, rows):
            assert tokens.tolist() == [int(lowest)]
