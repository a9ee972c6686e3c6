"""What a step takes in comes in one copy: the same values in the same places, and nothing else stays."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from ops.one_copy import ALIGNED, ON_HOST, Later, brought, later

CPU = torch.device("cpu")
DTYPES = (torch.uint8, torch.bool, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Inner:
    index: torch.Tensor
    counts: tuple[int, ...]
    plan: dict[str, torch.Tensor] = field(metadata=ON_HOST)


@dataclass
class Outer:
    inner: Inner
    again: torch.Tensor
    by_name: dict[str, Any]
    rows: list[torch.Tensor | None]


def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(0, 2, shape, generator=torch.manual_seed(len(shape))).to(dtype)


def tree() -> Outer:
    index, rng = torch.arange(7), np.random.default_rng(0)
    return Outer(
        Inner(index, (3, 0, 4), {"large": torch.zeros(5)}),
        index,
        {f"{dtype}": drawn(dtype, 3, 5) for dtype in DTYPES},
        [
            torch.zeros(0, 4),
            None,
            torch.tensor(2.5),
            drawn(torch.int64, 6, 4)[:, ::3],
            torch.from_numpy(rng.normal(size=(100, 33))),
            torch.zeros(0, dtype=torch.int64),
        ],
    )


def tensors_of(given: Outer) -> list[torch.Tensor]:
    return [given.inner.index, *given.by_name.values(), *(row for row in given.rows if row is not None)]


def test_all_tensors_of_a_tree_come_in_one_buffer_each_in_its_place() -> None:
    given = tree()
    found = brought(given, CPU)
    for own, came in zip(tensors_of(given), tensors_of(found), strict=True):
        assert (came.dtype, came.shape, came.is_contiguous()) == (own.dtype, own.shape, True)
        assert torch.equal(came, own)
        assert came.storage_offset() * came.element_size() % ALIGNED == 0
    (storage,) = {came.untyped_storage().data_ptr() for came in tensors_of(found) if came.numel()}
    assert storage not in {own.untyped_storage().data_ptr() for own in tensors_of(given)}
    assert found.again is found.inner.index, "what stands in two places comes once"
    assert found.inner.plan is given.inner.plan
    assert (found.inner.counts, found.rows[1]) == ((3, 0, 4), None)
    assert given.inner.index is given.again, "what was given is as it was"


def test_places_do_not_overlap() -> None:
    """Each is changed in place, as targets of bad samples are, and the others keep their values."""
    found, given = tensors_of(brought(tree(), CPU)), tensors_of(tree())
    for n, tensor in enumerate(found):
        tensor.fill_(1)
        assert all(torch.equal(found[m], given[m]) for m in range(n + 1, len(given)))


@pytest.mark.parametrize("given", [(), None, {"a": torch.zeros(0)}])
def test_nothing_to_bring_is_no_error(given: Any) -> None:
    assert str(brought(given, CPU)) == str(given)


def test_what_is_computed_later_leaves_nothing_else_behind() -> None:
    pixels, index, calls = torch.arange(1000, dtype=torch.uint8), torch.arange(3), []

    def normal(taken: torch.Tensor, by: float, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(taken is not pixels and at is not index)
        return taken.float() / by, at + 1

    put_off = Later(normal, (pixels, 255.0, index))
    found = brought({"values": put_off, "again": [put_off], "index": index}, CPU)
    assert calls == [True], "once, with what was brought"
    values, after = found["values"]
    assert found["again"][0][0] is values
    assert torch.equal(values, pixels.float() / 255.0)
    assert after.tolist() == [1, 2, 3]
    assert torch.equal(found["index"], index)
    assert found["index"].untyped_storage().nbytes() == ALIGNED, "without the pixels"


def test_a_cpu_computes_at_once_and_a_gpu_when_all_is_there() -> None:
    x = torch.arange(3)
    assert later(CPU, torch.add, x, x).tolist() == [0, 2, 4]
    put_off: Any = later(torch.device("cuda"), torch.add, x, x)
    assert brought([put_off], CPU)[0].tolist() == [0, 2, 4]


def test_what_is_elsewhere_stays_there() -> None:
    there = torch.zeros(3, device="meta")
    assert brought([there], CPU)[0] is there
