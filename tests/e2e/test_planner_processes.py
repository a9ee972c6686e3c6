"""Every rank of a run has a planner process, which neither outlives it nor dies unnoticed."""

import signal
import sys
from pathlib import Path

import psutil
import pytest
import torch
from ranks import RankPool
from runs import (
    TINY,
    Running,
    data_keys,
    learnt,
    omni,
    read_lines,
    start_training,
    strip,
    train,
    training,
    write,
)

from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.planning.prepare import prepare_run
from omni.training.trainer import Trainer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="planner processes are forked on Linux only")
LONG = ["launch.ranks=2", "train.steps=2000"]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("data") / "strips"
    return data_keys(write(path, [strip(i) for i in range(32)]))


def planners(running: Running) -> list[psutil.Process]:
    return [process for process in running.descendants() if process.name() == "omni-planner"]


def started(keys: list[str], cwd: Path) -> tuple[Running, list[psutil.Process]]:
    """A run on two ranks that has done a step, and its planner processes."""
    running = start_training([*keys, *LONG], cwd)
    metrics = cwd / "run" / "metrics.jsonl"
    running.wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, "a step")
    found = planners(running)
    assert len(found) == 2
    return running, found


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, 10)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def test_a_run_has_one_launch_and_no_planner_survives_a_killed_rank(keys: list[str], tmp_path: Path) -> None:
    running, found = started(keys, tmp_path)
    try:
        config = (tmp_path / "run" / "config.yaml").read_text()
        second = omni(training([*keys, *LONG, "train.keep_checkpoints=9"]), tmp_path)
        assert second.code == 2
        assert second.lines_with(
            "error: run.dir=", f"process {running.process.pid},", "choose another run.dir"
        )
        assert (tmp_path / "run" / "config.yaml").read_text() == config
        rank = found[0].parent()
        assert rank is not None
        rank.send_signal(signal.SIGKILL)
        assert gone(found[:1]), "its own ends at once"
        finished = running.finish()
    finally:
        running.end()
    # The other rank may be told of its lost peer, and end, before the kill is noticed.
    assert finished.code in (1, 128 + signal.SIGKILL), finished.err
    assert gone(found)


def test_a_killed_planner_ends_the_run_and_is_named(keys: list[str], tmp_path: Path) -> None:
    running, found = started(keys, tmp_path)
    try:
        found[0].send_signal(signal.SIGKILL)
        finished = running.finish()
    finally:
        running.end()
    assert finished.code == 1, finished.err
    words = (f"this rank's planner process {found[0].pid} was ended by SIGKILL", "the plan of step")
    assert finished.lines_with("rank ", " failed: ", *words), finished.err
    assert gone(found)


def _train_here(rank: int, line: list[str]) -> None:
    spec = prepare_run(compose_config(line), 2)
    Trainer(spec, RunFolder.create(Path(spec.config.run.dir)), rank, torch.device("cpu")).run()


def test_a_run_equals_one_that_plans_on_threads_to_the_bit(
    ranks: RankPool, keys: list[str], tmp_path: Path
) -> None:
    own = [*keys, "launch.ranks=2", "layout=pp2", "train.steps=6"]
    result = train(own, tmp_path)
    assert result.code == 0, result.err
    ranks.run(2, _train_here, [*TINY, *own, f"run.dir={tmp_path / 'threads'}"])
    ours, theirs = learnt(tmp_path / "run"), learnt(tmp_path / "threads")
    assert len(ours) == 6
    assert ours == theirs
    assert read_lines(tmp_path / "run" / "samples.jsonl") == read_lines(
        tmp_path / "threads" / "samples.jsonl"
    )
