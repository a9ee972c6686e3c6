"""Ranks of all kinds of layouts run a step on fake CUDA tensors: what would make the host wait is known."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from cuda_steps import GPU, run_case, run_line
from fake_gpu import FakeGPU
from parity_matrix import AXES, Case, listed
from parity_runs import write_data
from small import overrides

from omni.rehearsal.findings import ALLOWED, unexpected


def some(cases: Iterable[Case]) -> list[Case]:
    """Cases among which every value of every axis occurs twice, where it does in `cases`, and every schedule
    once: what makes a host wait is in one value or another, and schedules are orders of the same ops. Pairs
    of values are what the parity matrix is for.
    """
    taken: list[Case] = []
    seen = Counter[tuple[str, object]]()
    for case in cases:
        values = [(axis, getattr(case, axis)) for axis in AXES]
        if any(seen[value] < 1 + (value[0] != "schedule") for value in values):
            taken.append(case)
            seen.update(values)
    return taken


CASES = (*some(listed()), Case(pp=2, schedule="zero_bubble_h2"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda")
    write_data(path)
    return path


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_a_rank_of_every_choice_runs_a_step(gpu: FakeGPU, folder: Path, number: int) -> None:
    case = CASES[number]
    rank = (0, case.world - 1, case.world // 2)[number % 3]
    found = gpu.run(run_case, case, rank, folder)
    assert not unexpected(found.findings)
    assert found.launches
    assert not found.unknown


def test_every_allowed_finding_is_still_found(gpu: FakeGPU, folder: Path) -> None:
    case, samples = Case(dp=2, ep=2, model="experts"), 8  # several microbatches
    findings = gpu.run(run_case, case, 0, folder, GPU, 2, samples).findings
    assert [entry for entry in ALLOWED if not any(map(entry.covers, findings))] == []


def test_a_rank_holds_and_sends_on_either_device_the_same(gpu: FakeGPU, folder: Path) -> None:
    case = Case(tp=2, pp=2, recompute="full")
    on_gpu = gpu.run(run_case, case, 2, folder).footprint
    on_cpu = run_case(case, 2, folder, torch.device("cpu")).footprint
    assert on_gpu.traffic == on_cpu.traffic
    assert on_gpu.parameters == on_cpu.parameters
    assert on_gpu.bytes == pytest.approx(on_cpu.bytes, rel=0.01)


def test_delta_nets_of_shared_sequences_wait_for_nothing(gpu: FakeGPU, folder: Path) -> None:
    sizes = "{key_heads: 2, value_heads: 4, key_dim: 8, value_dim: 8}"
    kinds = ["model.llm.attention=[delta, full]", f"model.llm.delta={sizes}", "model.llm.output_gate=true"]
    more = ["layout.llm.cp=2", "model.llm.recompute=full", "data.step_samples=2", "train.precision=bf16"]
    line = overrides(folder / "mixed", folder / "run", "model.llm.layers=2", *kinds, *more)
    for rank in (0, 1):
        assert not unexpected(gpu.run(run_line, line, 2, rank).findings)


def test_rows_that_enter_at_several_layers_wait_for_no_shape(gpu: FakeGPU, folder: Path) -> None:
    taps = [
        "+model.encoders.image.taps=[1]",
        "layout.llm.pp=2",
        "data.step_samples=2",
        "train.precision=bf16",
    ]
    line = overrides(folder / "mixed", folder / "run", "model.llm.layers=2", *taps)
    for rank in (0, 1):
        assert not unexpected(gpu.run(run_line, line, 2, rank).findings)


def test_inputs_of_layers_go_to_pinned_memory_and_back_without_a_wait(gpu: FakeGPU, folder: Path) -> None:
    """Blocks of a tensor are copied one by one; what is on the device, and on the host, is as on a CPU."""
    case, away = Case(pp=2, recompute="full", schedule="zero_bubble_h1"), (8, 2, 1, 3)
    on_gpu = gpu.run(run_case, case, 1, folder, GPU, *away)
    on_cpu = run_case(case, 1, folder, torch.device("cpu"), *away)
    assert not unexpected(on_gpu.findings)
    assert not on_gpu.unknown
    assert on_gpu.footprint.host == on_cpu.footprint.host > 0
    assert on_gpu.footprint.bytes == pytest.approx(on_cpu.footprint.bytes, rel=0.01)


def test_parts_of_inputs_of_an_encoder_go_there_and_back_without_a_wait(gpu: FakeGPU, folder: Path) -> None:
    """Two ranks gather them, on the stream that computes, behind the copies; projectors are anew, too."""
    more = ["recompute=full", "layers=8", "offload=6", "taps=[3]", "keep_attention=true"]
    line = overrides(
        folder / "mixed",
        folder / "run",
        *(f"+model.encoders.image.{key}".replace("+", "+" * (key[0] in "okt")) for key in more),
        *("layout.llm.tp=2", "+layout.encoders.image.tp=2", "model.llm.layers=2", "train.precision=bf16"),
        "data.step_samples=2",
    )
    found = gpu.run(run_line, line, 2, 1)
    assert not unexpected(found.findings)
    assert not found.unknown
    assert found.footprint.host == run_line(line, 2, 1, torch.device("cpu")).footprint.host > 0


@pytest.mark.parametrize("zero", [2, 3])
def test_partitions_are_gathered_and_scattered_without_a_wait(gpu: FakeGPU, folder: Path, zero: int) -> None:
    more = [f"layout.llm.zero={zero}", "layout.domain=2", "layout.llm.pp=2", "model.llm.recompute=full"]
    line = overrides(
        folder / "mixed", folder / "run", *more, "pipeline=zero_bubble_h1", "train.precision=bf16"
    )
    for rank in (0, 3):
        found = gpu.run(run_line, line, 4, rank)
        assert not unexpected(found.findings)
        assert not found.unknown
        assert ("llm partition", "reduce_scatter") in found.footprint.traffic


def test_gradients_in_bf16_are_rounded_and_summed_in_the_order_of_streams(gpu: FakeGPU, folder: Path) -> None:
    more = ["train.mixed_precision_reduce=bf16", "train.precision=bf16", "model.llm.layers=2"]
    found = gpu.run(run_line, overrides(folder / "mixed", folder / "run", *more), 2, 1)
    assert not unexpected(found.findings)
    assert not found.unknown
    assert {collective for _, collective in found.footprint.traffic} >= {"all_to_all", "all_gather"}
    assert not any(collective == "reduce_scatter" for _, collective in found.footprint.traffic)
