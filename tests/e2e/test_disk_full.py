"""A disk that fills up while a checkpoint is saved.

The limit on the size of a file (`RLIMIT_FSIZE`) is lowered for ranks that run: the next checkpoint fails in
the middle of its file with OSError, as on a full disk, and the lines of metrics still fit.
"""

from pathlib import Path

import psutil
import pytest
from runs import (
    Finished,
    checkpoints,
    data_keys,
    document,
    learnt,
    read_lines,
    start_training,
    strip,
    train,
    write,
)

from dataloader.storage import Storage
from infra.checkpoint import complete, verify

LIMIT = 400_000  # bytes: more than the metrics take, less than a rank's part of the checkpoint
STEPS = 40

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not psutil.LINUX, reason="needs limits on another process"),
]


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> list[str]:
    data = tmp_path_factory.mktemp("data")
    write(data / "strips", [strip(i) for i in range(32)])
    write(data / "docs", [document(i) for i in range(8)])
    own = ["model.llm.hidden=128", "model.llm.heads=4", "train.checkpoint_every=4", f"train.steps={STEPS}"]
    return [*own, "data.step_tokens=256", "launch.ranks=2", *data_keys(data / "strips", data / "docs")]


@pytest.fixture(scope="module")
def full(tmp_path_factory, keys) -> tuple[Path, Finished]:
    """A run whose disk is full after it saved at least once."""
    cwd = tmp_path_factory.mktemp("full")
    running = start_training(keys, cwd)
    try:
        storage = Storage.at(cwd / "run" / "checkpoints")
        running.wait_until(lambda: bool(complete(storage)), "a checkpoint")
        for process in running.descendants():
            process.rlimit(psutil.RLIMIT_FSIZE, (LIMIT, LIMIT))
        return cwd, running.finish()
    finally:
        running.end()


def failed_step(result: Finished) -> int:
    (line, *_) = result.lines_with("the checkpoint of step", "could not be saved")
    return int(line.partition("the checkpoint of step ")[2].split()[0])


def test_the_run_fails_and_says_what_is_still_good(full):
    cwd, result = full
    assert result.code > 0
    good = checkpoints(cwd / "run")[-1]
    line = result.lines_with("the checkpoint of step", "could not be saved")[0]
    assert str(cwd / "run" / "checkpoints") in line
    assert f"The last good one is {good}" in line
    assert good == f"step_{failed_step(result) - 4:08d}"
    assert "resume" in line


def test_the_message_names_the_cause(full):
    line = full[1].lines_with("the checkpoint of step", "could not be saved")[0]
    assert "File too large" in line  # "No space left on device" where the disk itself is full


def test_a_full_disk_is_told_without_a_traceback(full):
    assert "Traceback" not in full[1].err, full[1].err


def test_nothing_shadows_the_good_checkpoint(full):
    cwd, _ = full
    storage = Storage.at(cwd / "run" / "checkpoints")
    steps = complete(storage)
    assert 1 <= len(steps) <= 2
    for step in steps:
        files = verify(storage, step)["files"]
        assert sorted(files) == ["rank_00000.safetensors", "rank_00001.safetensors"]
        assert min(size for size, _ in files.values()) > LIMIT


def test_the_run_continues_once_there_is_space(full, keys):
    cwd, result = full
    good = failed_step(result) - 4
    before = learnt(cwd / "run")[:good]
    continued = train(keys, cwd)
    assert continued.code == 0, continued.err
    assert f"continued after step {good}" in continued.out
    records = learnt(cwd / "run")
    assert [record["progress/step"] for record in records] == list(range(1, STEPS + 1))
    assert records[:good] == before
    assert [line["step"] for line in read_lines(cwd / "run" / "samples.jsonl")] == list(range(1, STEPS + 1))
    assert checkpoints(cwd / "run")[-1] == f"step_{STEPS:08d}"
