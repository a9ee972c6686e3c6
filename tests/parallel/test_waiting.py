"""What a failed wait says, and what it leaves as it is."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from parallel.waiting import StallError, stall, waiting


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(group.ranks)))
    return SimpleNamespace(ranks=4)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]"),
        RuntimeError("[/third_party/gloo/gloo/allreduce.cc:30] op.preamble.length <= op.nbytes. 8 vs 4"),
        RuntimeError("Operation timed out!"),
        RuntimeError("Application timeout caused pair closure"),
        dist.DistBackendError("NCCL"),
        dist.DistNetworkError("lost"),
    ],
)
def test_a_failure_to_communicate_says_who_waited_for_whom(group, error):
    words = r"^rank 2 waited at step 3: totals for rank 0, 1, 3: "
    with pytest.raises(StallError, match=words) as caught, waiting("step 3: totals", group):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        NotImplementedError("no kernel"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        StallError("rank 2 waited at wait(ship 0) for rank 3"),
    ],
)
def test_an_error_of_another_kind_is_left_as_it_is(group, error):
    with pytest.raises(type(error)) as caught, waiting("step 3: totals", group):
        raise error
    assert caught.value is error


def test_many_ranks_are_counted(group):
    group.ranks = 1024
    words = "for rank 0, 1, 3, 4, 5, 6, 7, 8, … and 1015 more: .* gone"
    with pytest.raises(StallError, match=words), waiting("start-up", group):
        raise RuntimeError("connection reset by peer: gone")
    assert "for rank none: gone" in str(stall("start-up", [5], 5, RuntimeError("gone")))
