"""What is switched on around steps: traces, held garbage collection, deterministic algorithms, a snapshot."""

import gc
import json
import os
from pathlib import Path

import pytest
import torch
from ranks import RankPool
from small import overrides, write_mixed

from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.config import Config, ConfigError
from omni.planning.prepare import prepare_run
from omni.training.garbage import WHOLE_EVERY, held_in
from omni.training.trainer import Trainer
from omni.training.worker import exit_with
from ops.device import make_deterministic


def run(rank: int, config: Config) -> tuple[list[bool], list[int]]:
    """Train on two ranks. Whether collections were on in any op, and of which generation each of ours was."""
    trainer = Trainer(prepare_run(config, 2), RunFolder(Path(config.run.dir)), rank, torch.device("cpu"))
    on: list[bool] = []
    ours: list[int] = []

    def noted(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            ours.append(info["generation"])

    trainer.rank.engine.on_op = lambda op: on.append(gc.isenabled())
    gc.callbacks.append(noted)
    try:
        trainer.run()
    finally:
        gc.callbacks.remove(noted)
        trainer.close()
    return on, ours


def test_every_rank_traces_the_steps_asked_for_and_collects_between_them(
    ranks: RankPool, tmp_path: Path
) -> None:
    write_mixed(tmp_path / "data")
    line = overrides(tmp_path / "data", tmp_path / "run", "train.steps=4", "profile.steps=[2,9]")
    RunFolder.create(tmp_path / "run")
    for on, ours in ranks.run(2, run, compose_config(line)):
        assert on
        assert not any(on)
        assert ours.count(1) >= 4
    files = sorted((tmp_path / "run/profile").iterdir())
    assert [file.name for file in files] == [f"steps_2_to_4_rank_{rank}.json" for rank in (0, 1)]
    events = json.loads(files[0].read_text())["traceEvents"]
    assert {"name", "ph", "ts"} <= events[0].keys() or any(event.get("ph") == "X" for event in events)
    assert any(event.get("name") == "aten::mm" for event in events)


@pytest.mark.parametrize("steps", ["[3]", "[0,2]", "[5,4]", "[1,2,3]"])
def test_steps_that_are_none_are_refused(steps: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"profile.steps.*such as \[20,22\]"):
        compose_config(overrides(tmp_path, tmp_path / "run", f"profile.steps={steps}"))


def test_collections_are_held_and_made_up_for() -> None:
    found: list[int] = []

    def noted(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(noted)
    try:
        with held_in(WHOLE_EVERY + 1):
            kept = [[] for _ in range(100_000)]
            assert found == []
        with held_in(WHOLE_EVERY):
            pass
        gc.disable()
        with held_in(1):
            pass
        assert not gc.isenabled()
        assert found == [1, 2]
    finally:
        gc.enable()
        gc.callbacks.remove(noted)
    assert kept


def test_deterministic_algorithms_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        make_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8", "a user's own stays"
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
        make_deterministic()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.parametrize("in_use", [True, False])
def test_a_rank_out_of_memory_leaves_what_it_held(
    in_use: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(path: Path) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    class EndError(Exception):
        pass

    def end(code: int) -> None:
        raise EndError(code)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("blocks"))
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr("omni.training.worker.keep_going_without", lambda folder: None)
    with pytest.raises(EndError, match="1"):
        exit_with(fails, tmp_path / "config.yaml")
    snapshot = tmp_path / "errors/rank-0-memory.pickle"
    assert snapshot.exists() == in_use
    assert (snapshot.name in (tmp_path / "errors/rank-0.txt").read_text()) == in_use
