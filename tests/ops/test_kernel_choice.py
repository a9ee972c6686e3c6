"""Which kernels a GPU runs is said, and can be said."""

from collections.abc import Iterator

import pytest
import torch

from ops.kernels.choice import without_kernels


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    without_kernels.cache_clear()
    yield
    without_kernels.cache_clear()


@pytest.mark.parametrize(
    ("given", "found", "capability", "why"),
    [
        (None, True, (9, 0), None),
        ("triton", True, (8, 0), None),
        ("torch", True, (9, 0), "OMNI_KERNELS=torch"),
        (None, False, (9, 0), "Triton is not installed"),
        (None, True, (7, 5), "Triton compiles for GPUs from Ampere on"),
    ],
)
def test_it_is_known_why_a_gpu_runs_no_kernels(
    monkeypatch: pytest.MonkeyPatch,
    given: str | None,
    found: bool,
    capability: tuple[int, int],
    why: str | None,
) -> None:
    monkeypatch.delenv("OMNI_KERNELS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMNI_KERNELS", given)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if found else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert without_kernels() == why
    without_kernels.cache_clear()


def test_kernels_that_there_are_not_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_KERNELS", "liger")
    with pytest.raises(ValueError, match="OMNI_KERNELS=liger: set it to triton or torch"):
        without_kernels()
