"""AdamW of a shard of parameters against the equations in fp64: in torch, and as an interpreted kernel; and
moments in bf16, which must not stall.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from kernel_calls import drawn, launches, process_with

from ops.adamw import STEPS, adamw, rounded

LR, BETA1, BETA2, EPS = 0.01, 0.9, 0.95, 1e-6
# Where parameters begin and end: the kernel has 2,048 numbers at once. Between them lie gaps.
RUNS: dict[str, Sequence[tuple[int, int]]] = {
    "one": [(0, 5000)],
    "many in a block": [(0, 1), (64, 130), (192, 193), (256, 2000), (2048, 2050), (2112, 2500)],
    "many blocks of one": [(0, 3), (64, 9000), (9024, 9030)],
    "a share that begins in a gap": [(40, 3000), (3072, 4096)],
    "two that touch": [(0, 2048), (2048, 2500)],
    "none": [],
}


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    with process_with({"TRITON_INTERPRET": "1"}) as call:
        yield call


def shard(runs: Sequence[tuple[int, int]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights, gradients and moments of a shard, zeros in its gaps; every other parameter decays, and they
    have had different numbers of updates.
    """
    size = max((end for _, end in runs), default=0) + 10
    inside = torch.zeros(size)
    for start, end in runs:
        inside[start:end] = 1
    numbers = {
        "main": drawn(torch.float32, size, seed=1),
        "grad": drawn(torch.float32, size, seed=2),
        "exp_avg": drawn(torch.float32, size, seed=3) / 100,
        "exp_avg_sq": drawn(torch.float32, size, seed=4).square() / 1000,
    }
    found = {name: of * inside for name, of in numbers.items()}
    found |= {name: found[name].to(dtype) for name in ("exp_avg", "exp_avg_sq")}
    tables = {
        "runs": torch.tensor(runs, dtype=torch.int64).reshape(-1, 2),
        "decays": torch.tensor([0.1 * (number % 2) for number in range(len(runs))]),
        "counts": torch.tensor([1.0 + 3 * number for number in range(len(runs))]),
    }
    return found | {"model": found["main"].bfloat16()} | tables


def by_equations(given: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    """Weights and moments after an update, in fp64 (arXiv 1711.05101, algorithm 2)."""
    new = {name: given[name].double() for name in ("main", "exp_avg", "exp_avg_sq")}
    tables = (given[name].tolist() for name in ("runs", "decays", "counts"))
    for (start, end), decay, count in zip(*tables, strict=True):
        own = slice(start, end)
        grad, weight = given["grad"][own].double() * factor, new["main"][own]
        first = BETA1 * new["exp_avg"][own] + (1 - BETA1) * grad
        second = BETA2 * new["exp_avg_sq"][own] + (1 - BETA2) * grad**2
        update = first / (1 - BETA1**count) / ((second / (1 - BETA2**count)).sqrt() + EPS)
        new["main"][own] = weight - LR * decay * weight - LR * update
        new["exp_avg"][own], new["exp_avg_sq"][own] = first, second
    return new


ORDER = ("main", "grad", "exp_avg", "exp_avg_sq", "model", "runs", "decays", "counts")


def check(update: Callable[..., None], case: str, dtype: torch.dtype, fp32: bool) -> None:
    """Compare an update with the equations; `fp32` weights are the model's own."""
    given, factor = shard(RUNS[case], dtype), 0.25
    found = {name: of.clone() for name, of in given.items()}
    tensors = [None if fp32 and name == "model" else found[name] for name in ORDER]
    update(*tensors, torch.tensor(factor), torch.tensor(1.0), LR, BETA1, BETA2, EPS)
    expected = by_equations(given, factor)
    torch.testing.assert_close(found["main"].double(), expected["main"], rtol=2e-6, atol=1e-7)
    # Rounded up or down, and not beyond: a number of bf16 is at most 2⁻⁷ of itself from the next.
    share = 2**-7 if dtype is torch.bfloat16 else 2e-6
    for name in ("exp_avg", "exp_avg_sq"):
        assert found[name].dtype is dtype
        torch.testing.assert_close(found[name].double(), expected[name], rtol=share, atol=1e-8)
    # The interpreter cuts bf16 off, where a GPU and torch round.
    cut = torch.zeros_like(found["model"]) if fp32 else found["main"].bfloat16() - found["model"]
    assert (cut.float().abs() <= 2**-7 * found["main"].abs()).all()
    for name in ("grad", "runs", "decays", "counts"):
        assert torch.equal(found[name], given[name])


def check_skipped(update: Callable[..., None], dtype: torch.dtype) -> None:
    """Gradients that are no numbers change nothing where an update is not sound."""
    given = shard(RUNS["one"], dtype)
    given["grad"][7] = torch.inf
    found = {name: of.clone() for name, of in given.items()}
    nothing = torch.tensor(torch.nan), torch.tensor(0.0)
    update(*(found[name] for name in ORDER), *nothing, LR, BETA1, BETA2, EPS)
    for name in given:
        assert torch.equal(found[name], given[name]), name


def check_alike(dtype: torch.dtype) -> None:
    """The kernel rounds as torch does: by the same threshold, of the same numbers but for their last bits."""
    given = shard(RUNS["many in a block"], dtype)
    ones = torch.tensor(0.25), torch.tensor(1.0)
    both = [{name: of.clone() for name, of in given.items()} for _ in range(2)]
    for update, own in zip((adamw, kernel), both, strict=True):
        update(*(own[name] for name in ORDER), *ones, LR, BETA1, BETA2, EPS)
    for name in ("exp_avg", "exp_avg_sq"):
        differ = both[0][name].float() != both[1][name].float()
        assert differ.float().mean() < 2e-3, name


def kernel(*given: Any) -> None:
    from ops.kernels import adamw as kernels

    *tensors, runs, decays, counts, factor, sound, lr, beta1, beta2, eps = given
    with launches() as names:
        kernels.adamw(*(*tensors, runs[:, 1], decays, counts, factor, sound, lr, beta1, beta2, eps, STEPS))
    assert names == ["_update"] * (len(runs) > 0)


def check_kernel(case: str, dtype: torch.dtype, fp32: bool) -> None:
    check(kernel, case, dtype, fp32)


def check_skipped_kernel(dtype: torch.dtype) -> None:
    check_skipped(kernel, dtype)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("fp32", [False, True], ids=["bf16 model", "fp32 model"])
@pytest.mark.parametrize("case", RUNS)
def test_an_update_is_that_of_the_equations(case: str, dtype: torch.dtype, fp32: bool) -> None:
    check(adamw, case, dtype, fp32)


@DTYPES
@pytest.mark.parametrize("fp32", [False, True], ids=["bf16 model", "fp32 model"])
@pytest.mark.parametrize("case", RUNS)
def test_so_is_that_of_the_kernel(
    interpreted: Callable[..., Any], case: str, dtype: torch.dtype, fp32: bool
) -> None:
    interpreted(check_kernel, case, dtype, fp32)


@DTYPES
def test_an_update_that_is_not_sound_changes_nothing(
    interpreted: Callable[..., Any], dtype: torch.dtype
) -> None:
    check_skipped(adamw, dtype)
    interpreted(check_skipped_kernel, dtype)


def test_the_kernel_rounds_moments_as_torch_does(interpreted: Callable[..., Any]) -> None:
    interpreted(check_alike, torch.bfloat16)


def nearest(exact: torch.Tensor, *given: Any) -> torch.Tensor:
    return exact.bfloat16()


def second_moments(beta2: float, updates: int, dtype: torch.dtype, fall: float) -> torch.Tensor:
    """Second moments after gradients of noise, which fall to a share of themselves half way."""
    generator = torch.Generator().manual_seed(0)
    exp_avg, exp_avg_sq = torch.zeros(500, dtype=dtype), torch.zeros(500, dtype=dtype)
    main, runs, decays = torch.zeros(500), torch.tensor([[0, 500]]), torch.zeros(1)
    one = torch.ones(())
    for count in range(1, updates + 1):
        grad = torch.randn(500, generator=generator) * (fall if count > updates // 2 else 1.0)
        tables = runs, decays, torch.full((1,), float(count))
        adamw(main, grad, exp_avg, exp_avg_sq, None, *tables, one, one, 1e-3, 0.9, beta2, 1e-8)
    return exp_avg_sq.double()


@pytest.mark.parametrize(("beta2", "most"), [(0.95, 0.012), (0.99, 0.025), (0.999, 0.06)])
def test_second_moments_in_bf16_follow_gradients_that_fall(beta2: float, most: float) -> None:
    updates = max(240, round(6 / (1 - beta2)))
    exact = second_moments(beta2, updates, torch.float32, 0.1)
    off = second_moments(beta2, updates, torch.bfloat16, 0.1) / exact - 1
    assert off.square().mean().sqrt() < most
    assert off.mean().abs() < most / 2


def test_rounded_to_the_nearest_they_would_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.adamw.rounded", nearest)
    exact = second_moments(0.999, 6_000, torch.float32, 0.1)
    stalled = second_moments(0.999, 6_000, torch.bfloat16, 0.1)
    assert (stalled / exact).mean() > 10


@pytest.mark.parametrize("step", STEPS)
def test_a_number_between_two_of_bf16_is_each_as_often_as_it_is_near(step: int) -> None:
    shares = torch.linspace(0, 1, 33)
    numbers = 1 + shares * 2**-7
    updates = [rounded(numbers, torch.tensor(float(count)), step).double() for count in range(1, 1001)]
    ups = (torch.stack(updates) > 1).double().mean(0)
    torch.testing.assert_close(ups, shares.double(), rtol=0, atol=4e-3)
    assert torch.equal(rounded(-numbers, torch.tensor(5.0), step), -rounded(numbers, torch.tensor(5.0), step))


def test_what_is_no_number_stays_none_and_zeros_stay_zeros() -> None:
    numbers = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])
    for count in range(1, 50):
        found = rounded(numbers, torch.tensor(float(count)), STEPS[0])
        assert found[:3].tolist() == numbers[:3].tolist()
        assert found[3].isnan()
