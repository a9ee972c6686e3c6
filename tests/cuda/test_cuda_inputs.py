"""Inputs come on a stream of their own: who reads them waits for it, and their memory waits for who reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_steps import run_case
from fake_gpu import FakeGPU
from parity_matrix import Case
from parity_runs import write_data
from torch._subclasses.fake_tensor import FakeTensorMode

from omni.rank import inputs
from ops.one_copy import Later, arrival, brought
from pipeline.engine import _RunningStep


def seen() -> tuple[list[str], list[str], int]:
    """What happens before and after inputs are read, in order, and how many storages they are."""
    said: list[str] = []
    storages: set[int] = set()

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        storages.add(tensor.untyped_storage()._cdata)
        said.append(f"memory waits for {'the reader' if stream is reader else 'another stream'}")

    with FakeTensorMode(allow_non_fake_inputs=True), pytest.MonkeyPatch.context() as patch:
        own, reader = torch.cuda.Stream(), torch.cuda.current_stream()
        patch.setattr(torch.Tensor, "record_stream", record_stream)
        patch.setattr(reader, "wait_event", lambda event: said.append(f"the reader waits for {event}"))
        patch.setattr(own, "record_event", lambda: "the copy", raising=False)
        made = torch.ones(4, device="cuda")
        given = [torch.arange(3), Later(torch.neg, (torch.arange(9),)), torch.arange(5), made]
        inputs = brought(given, torch.device("cuda", 0))
        assert all(tensor.is_cuda for tensor in inputs)
        arrive = arrival(inputs, own)
        before = [*said]
        arrive()
    return before, said, len(storages)


def test_the_reader_waits_and_memory_is_not_given_away_before_it_has_read(gpu: FakeGPU) -> None:
    before, said, storages = gpu.run(seen)
    assert before == []
    assert said == ["the reader waits for the copy", *["memory waits for the reader"] * 3]
    assert storages == 3, "the buffer, what was computed of it, and what was there"


def order(folder: Path) -> list[str]:
    """Arrivals and ops of the two steps of a rehearsal."""
    said: list[str] = []
    do = _RunningStep.do

    def noted(step: Any, op: Any, *messages: Any) -> None:
        said.append("op")
        do(step, op, *messages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "arrival", lambda *_: lambda: said.append("arrival"))
        patch.setattr(_RunningStep, "do", noted)
        run_case(Case(), 0, folder, layers=1, samples=1)
    return said


def test_a_step_waits_for_its_inputs_before_its_first_op(gpu: FakeGPU, tmp_path: Path) -> None:
    write_data(tmp_path)
    said = gpu.run(order, tmp_path)
    steps = " ".join(said).split("arrival")
    assert len(steps) == 3
    assert steps[0] == ""
