"""A run that is interrupted and continued is the run that was not."""

import json
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from runs import (
    Finished,
    Running,
    checkpoints,
    data_keys,
    document,
    learnt,
    omni,
    read_lines,
    start_training,
    steps,
    strip,
    train,
    write,
)

STEPS = 40
KEYS = [
    f"train.steps={STEPS}",
    "train.checkpoint_every=8",
    "data.step_tokens=512",  # long enough steps that a signal arrives within the run
]
# A source is absent from a step that took none of its samples.
LOSSES = {"loss/train", "loss/train/strips", "loss/train/docs"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> list[str]:
    data = tmp_path_factory.mktemp("data")
    write(data / "strips", [strip(i) for i in range(64)])
    write(data / "docs", [document(i) for i in range(24)])
    return [*KEYS, *data_keys(data / "strips", data / "docs")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, keys) -> Path:
    """The run folder of an uninterrupted run on two data-parallel ranks."""
    cwd = tmp_path_factory.mktemp("whole")
    result = train([*keys, "launch.ranks=2"], cwd)
    assert result.code == 0, result.err
    assert "starting 2 ranks on this machine, which takes seconds to import torch ..." in result.out
    return cwd / "run"


def same_as(run: Path, whole: Path) -> None:
    """Every step once, in order, and everything it learnt equal to the bit."""
    records = learnt(run)
    assert [record["progress/step"] for record in records] == list(range(1, STEPS + 1))
    for ours, theirs in zip(records, learnt(whole), strict=True):
        assert ours == theirs
    assert (run / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


def test_the_uninterrupted_run_is_what_the_others_are_compared_with(whole):
    records = learnt(whole)
    assert [record["progress/step"] for record in records] == list(range(1, STEPS + 1))
    assert {"loss/train", "loss/train/strips", "loss/train/docs", "optim/grad_norm"} <= set(records[0])
    assert records[-1]["loss/train"] < 0.7 * records[0]["loss/train"]
    samples = read_lines(whole / "samples.jsonl")
    assert [line["step"] for line in samples] == list(range(1, STEPS + 1))
    assert len({json.dumps(line["samples"]) for line in samples}) == STEPS


def test_the_newest_checkpoints_are_kept(whole):
    assert checkpoints(whole) == ["step_00000032", "step_00000040"]


def test_a_run_stopped_by_sigterm_continues_as_if_it_had_not_been(tmp_path, keys, whole):
    run = tmp_path / "run"
    running = start_training([*keys, "launch.ranks=2"], tmp_path)
    try:
        running.wait_until(lambda: len(steps(run)) >= 10, "step 10")
        running.process.send_signal(signal.SIGTERM)
        stopped = running.finish()
    finally:
        running.end()
    # 128 + n: what the launcher says of a run that a signal ended.
    assert stopped.code == 128 + signal.SIGTERM, stopped.err
    last = steps(run)[-1]
    assert 10 <= last < STEPS, "the signal came too late for this test"
    assert f"stopped after step {last}: SIGTERM" in stopped.out
    assert checkpoints(run)[-1] == f"step_{last:08d}", "it saves before it leaves"

    continued = train([*keys, "launch.ranks=2"], tmp_path)
    assert continued.code == 0, continued.err
    assert f"continued after step {last}" in continued.out
    same_as(run, whole)


def ended(process: psutil.Process) -> bool:
    """Whether a process runs no more; nobody may have asked how it ended."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_killed_run_continues_from_its_last_checkpoint(tmp_path, keys, whole):
    run = tmp_path / "run"
    running = start_training([*keys, "launch.ranks=2"], tmp_path)
    try:
        # Between two checkpoints, so that steps are repeated.
        running.wait_until(lambda: len(steps(run)) >= 20, "step 20")
        victims = running.descendants()
        assert len(victims) >= 3, "the agent and two ranks"
        for victim in victims:  # the agent first: it would end the ranks in its own way
            with suppress(ProcessLookupError):  # ended with its parent
                os.kill(victim.pid, signal.SIGKILL)
        killed = running.finish()
    finally:
        running.end()
    assert killed.code == 128 + signal.SIGKILL, killed.err
    _, alive = psutil.wait_procs([victim for victim in victims if not ended(victim)], timeout=10)
    assert all(map(ended, alive))
    reached = steps(run)[-1]
    good = max(int(name.removeprefix("step_")) for name in checkpoints(run))
    assert 8 <= good < STEPS  # that of step 16 may not be written yet
    # What a save that was cut short leaves: it must not shadow the good one.
    stray = run / "checkpoints" / "step_00000039"
    stray.mkdir()
    (stray / "rank_00000.safetensors").write_bytes(b"half a checkpoint")
    shutil.copy(run / "checkpoints" / f"step_{good:08d}" / "checkpoint.json", stray / "checkpoint.json.tmp")
    # ... and half a line.
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"progress/step": 21, "loss/tr')

    continued = train([*keys, "launch.ranks=2"], tmp_path)
    assert continued.code == 0, continued.err
    assert f"continued after step {good}" in continued.out
    assert reached >= good
    same_as(run, whole)
    assert checkpoints(run) == checkpoints(whole)
    assert not stray.exists()


def copied(whole: Path, tmp_path: Path, step: int | None = None) -> Path:
    """A copy of the uninterrupted run, without the checkpoints after `step`."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for name in checkpoints(run):
        if step is not None and name > f"step_{step:08d}":
            shutil.rmtree(run / "checkpoints" / name)
    return run


@pytest.mark.slow  # tests/omni/test_checkpoint_layouts.py compares every element
@pytest.mark.parametrize(
    "layout",
    [
        ["launch.ranks=2", "layout=pp2"],
        ["launch.ranks=1"],
    ],
)
def test_a_checkpoint_continues_under_another_layout(tmp_path, keys, whole, layout):
    run = copied(whole, tmp_path, 32)
    result = train([*keys, *layout], tmp_path)
    assert result.code == 0, result.err
    assert "continued after step 32" in result.out
    records = learnt(run)
    assert [record["progress/step"] for record in records] == list(range(1, STEPS + 1))
    for ours, theirs in zip(records[32:], learnt(whole)[32:], strict=True):
        assert ours.keys() & LOSSES == theirs.keys() & LOSSES
        for key in [*(theirs.keys() & LOSSES), "optim/grad_norm"]:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4)
    assert (run / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


@pytest.fixture(scope="module")
def refused(tmp_path_factory, keys, whole) -> tuple[Path, Finished]:
    cwd = tmp_path_factory.mktemp("refused")
    run = copied(whole, cwd)
    return run, train([*keys, "launch.ranks=2", "optim.lr=1e-3", "train.seed=5"], cwd)


def test_a_run_is_not_continued_under_another_configuration(refused):
    _, result = refused
    assert result.code > 0
    (line,) = set(result.lines_with("optim.lr=0.001"))
    for word in ("checkpoint: 0.002", "train.seed=5", "step_00000040", "new run folder"):
        assert word in line


def test_a_refused_continuation_is_told_without_a_traceback(refused):
    assert "Traceback" not in refused[1].err, refused[1].err


def test_a_refused_continuation_leaves_the_run_as_it_was(refused, whole):
    run, _ = refused
    for name in ("metrics.jsonl", "samples.jsonl", "summary.json"):
        assert (run / name).read_text() == (whole / name).read_text()
    assert checkpoints(run) == checkpoints(whole)
    # The configuration is "enough to start the run again": of this run, not of the refused one.
    assert (run / "config.yaml").read_text() == (whole / "config.yaml").read_text()


@pytest.fixture(scope="module")
def again(tmp_path_factory, keys, whole) -> tuple[Path, Finished]:
    cwd = tmp_path_factory.mktemp("again")
    run = copied(whole, cwd)
    return run, train([*keys, "launch.ranks=2"], cwd)


def test_a_finished_run_is_left_alone(again, whole):
    run, result = again
    assert result.code == 0, result.err
    assert "Traceback" not in result.err
    assert (run / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
    assert (run / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    assert checkpoints(run) == checkpoints(whole)


def test_the_summary_of_a_finished_run_keeps_its_numbers(again, whole):
    ours, theirs = (json.loads((run / "summary.json").read_text()) for run in (again[0], whole))
    assert ours == theirs


def test_a_run_that_is_made_longer_says_where_its_learning_rate_jumps(tmp_path, keys):
    line = [*keys, "launch.ranks=1", "optim.warmup_steps=9"]
    first = train([*line, "train.steps=2"], tmp_path)
    assert first.code == 0, first.err
    assert first.lines_with("note: optim.warmup_steps=9 does not fit train.steps=2", "takes 0 steps")
    longer = train([*line, "train.steps=4"], tmp_path)
    assert longer.code == 0, longer.err
    assert longer.lines_with("note: train.steps was 2 and is 4", "step 2 had 0, step 3 takes 0.0005")


@pytest.mark.slow
def test_a_run_that_is_remixed_on_the_way_is_the_run_that_was_mixed_so_from_the_start(tmp_path, keys):
    """Also where it goes on from there on other ranks."""
    docs = next(key for key in keys if key.startswith("data.sources.docs.path=")).partition("=")[2]
    ids = tmp_path / "ids.txt"
    ids.write_text("strip-1\nstrip-2\n")
    short = [*keys, "train.checkpoint_every=4"]
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    mixed = (
        f"{{m: {{first: 9, weights: {{more: 2, docs: 0}}, remove: {{strips: [{ids}]}}, step_tokens: 256}}}}"
    )
    more = [f"+data.sources.more={{path: {docs}, weight: 0}}", f"+data.mixture={mixed}", "train.steps=16"]
    whole = train([*short, *more, "launch.ranks=1"], tmp_path / "whole")
    assert whole.code == 0, whole.err
    assert "m, from step 9: more weight 2; docs weight 0; without those of strips in" in whole.out

    cwd, run = tmp_path / "parts", tmp_path / "parts/run"
    first = train([*short, "train.steps=8", "launch.ranks=1"], cwd)
    assert first.code == 0, first.err
    command = ["data", "remix", str(run), "--from", "9", "--add", f"more={docs}", "--weight", "more=2"]
    command += ["--weight", "docs=0", "--remove", f"strips={ids}", "--step-tokens", "256"]
    late = omni([*command[:4], "8", *command[5:]], cwd)
    assert (late.code, "checkpoint of step 8" in late.err) == (2, True), late.err
    assert omni(command, cwd).code == 0
    for steps_, ranks in ((14, 2), (16, 1)):
        on = Running(
            ["-m", "omni", "resume", str(run), f"train.steps={steps_}", f"launch.ranks={ranks}"], cwd
        )
        done = on.finish()
        assert done.code == 0, done.err
    assert (run / "samples.jsonl").read_text() == (tmp_path / "whole/run/samples.jsonl").read_text()
    again = omni(["data", "remix", str(run), "--from", "12", "--weight", "docs=1"], cwd)
    assert again.code == 2, again.err
    undone = Running(
        ["-m", "omni", "resume", str(run), "train.steps=18", "~data.mixture.step_9"], cwd
    ).finish()
    assert undone.code == 2, undone.out
    assert "data.mixture.9.first=None (checkpoint: 9)" in undone.err
