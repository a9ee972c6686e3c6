"""Products of groups of rows against one product after the other, and against the equations."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from ops.grouped import grouped_inputs, grouped_linear, grouped_mm, grouped_weights, is_one_product

COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def ends_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).int()


@settings(deadline=None)
@given(COUNTS, st.integers(1, 9), st.integers(1, 9), st.sampled_from([torch.float64, torch.bfloat16]))
def test_each_row_meets_the_matrix_of_its_group(
    counts: list[int], inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), inputs).to(dtype)
    grads = torch.randn(sum(counts), outputs).to(dtype)
    weight = torch.randn(len(counts), outputs, inputs).to(dtype)
    ends, groups = ends_of(counts), torch.tensor(counts)
    of = torch.arange(len(counts)).repeat_interleave(groups)
    exact = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-12, "atol": 1e-12}
    out = torch.einsum("rmn,rn->rm", weight[of], rows)
    torch.testing.assert_close(grouped_linear(rows, weight, ends), out, **exact)
    back = torch.einsum("rmn,rm->rn", weight[of], grads)
    torch.testing.assert_close(grouped_inputs(grads, weight, ends), back, **exact)
    chosen = torch.nn.functional.one_hot(of, len(counts)).to(dtype)
    sums = torch.einsum("re,rm,rn->emn", chosen, grads, rows)
    torch.testing.assert_close(grouped_weights(rows, grads, ends), sums, **exact)


@settings(deadline=None)
@given(COUNTS)
def test_a_fake_product_has_the_shape_and_the_flops_of_a_real_one(counts: list[int]) -> None:
    rows, weight, ends = torch.ones(sum(counts), 3), torch.ones(len(counts), 5, 3), ends_of(counts)
    with FlopCounterMode(display=False) as counter:
        out = grouped_linear(rows, weight, ends)
    assert counter.get_total_flops() == 2 * 3 * 5 * sum(counts)
    with FakeTensorMode() as fake:
        given_fakes = [fake.from_tensor(x) for x in (rows, weight, ends)]
        assert grouped_linear(*given_fakes).shape == out.shape
        assert grouped_weights(given_fakes[0], given_fakes[0], given_fakes[2]).shape == (len(counts), 3, 3)


@pytest.mark.parametrize(
    ("dtype", "widths", "capability", "one"),
    [
        (torch.bfloat16, (64, 24), (9, 0), True),
        (torch.bfloat16, (64, 20), (9, 0), False),
        (torch.bfloat16, (64, 24), (8, 0), False),
        (torch.float32, (64, 24), (10, 0), False),
    ],
)
def test_what_is_one_product_is_known(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, widths: tuple[int, ...], capability: Any, one: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert is_one_product(dtype, *widths) == one


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(16, 24), (7, 5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_says_the_same(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    counts, (inputs, outputs) = [3, 0, 40, 1, 0], sizes
    rows, grads = torch.randn(44, inputs).to(dtype), torch.randn(44, outputs).to(dtype)
    weight, ends = torch.randn(5, outputs, inputs).to(dtype), ends_of(counts)
    for a, b in ((rows, weight.transpose(1, 2)), (grads, weight), (grads.t(), rows)):
        found = grouped_mm(a.cuda(), b.cuda(), ends.cuda()).cpu()
        torch.testing.assert_close(found, grouped_mm(a, b, ends), rtol=2e-2, atol=2e-2)
