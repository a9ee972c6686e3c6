"""The run folder survives crashes: atomic writes, cut-short lines, exact floats."""

import json
import math
import os
import subprocess
import sys
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.run_folder import (
    RunFolder,
    line_of,
    read_metrics,
    set_aside,
    tail_metrics,
    truncate_after,
    write_json,
    write_text,
)
from infra.tracking import JsonlTracker

CRASH_BEFORE_REPLACE = """
import os, signal, sys
from pathlib import Path
from infra.run_folder import write_json
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
write_json(Path(sys.argv[1]), {"loss": 2.0})
"""


def test_create_keeps_what_is_there(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    assert folder.checkpoints.is_dir()
    write_text(folder.config, "a: 1\n")
    assert RunFolder.create(tmp_path / "run").config.read_text() == "a: 1\n"


def test_a_crash_between_temporary_file_and_replace_leaves_the_old_file(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"loss": 1.0})
    crashed = subprocess.run([sys.executable, "-c", CRASH_BEFORE_REPLACE, str(path)])
    assert crashed.returncode == -9
    assert len(list(tmp_path.iterdir())) == 2  # the new text was written, beside the old file
    assert json.loads(path.read_text()) == {"loss": 1.0}
    write_json(path, {"loss": 3.0})
    assert json.loads(path.read_text()) == {"loss": 3.0}


def test_an_object_that_cannot_be_written_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"loss": 1.0})
    with pytest.raises(TypeError):
        write_json(path, {"loss": object()})
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
    assert json.loads(path.read_text()) == {"loss": 1.0}


@given(st.lists(st.floats(), min_size=1))
def test_floats_read_back_bitwise_and_the_file_is_strict_json(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    with path.open("a") as file:
        file.write(line_of({f"m{i}": value for i, value in enumerate(values)}))

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (back,) = read_metrics(path)
    for a, b in zip(values, back.values(), strict=True):
        assert (math.isnan(a) and math.isnan(b)) or a.hex() == b.hex()


@pytest.mark.parametrize("key", ["progress/step", "step"])
@pytest.mark.parametrize(
    "cut", ["", '{"loss/train": 1.5, "prog', '{"progress/step": 9, "step": 9}', "\0\0\0\n"]
)
def test_truncate_drops_later_steps_and_a_cut_last_line(tmp_path, key, cut):
    path = tmp_path / "lines.jsonl"
    lines = [json.dumps({key: step, "x": 0.1 * step}) + "\n" for step in range(1, 6)]
    path.write_text("".join(lines) + cut)
    truncate_after(path, 3)
    assert path.read_text() == "".join(lines[:3])
    truncate_after(path, 0)
    assert path.read_text() == ""


def test_truncate_keeps_a_whole_last_line_without_its_newline(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    truncate_after(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("bad", ["\n", '{"st\n', "[2]\n", "7\n"])
def test_lines_that_cannot_be_read_end_nothing_and_are_told(tmp_path, caplog, bad):
    path = tmp_path / "lines.jsonl"
    path.write_text(f'{{"step": 1}}\n{bad}{{"step": 3}}\n')
    assert read_metrics(path) == tail_metrics(path) == [{"step": 1}, {"step": 3}]
    assert "1 lines cannot be read" in caplog.text
    truncate_after(path, 1)
    assert path.read_text() == '{"step": 1}\n'
    truncate_after(tmp_path / "missing.jsonl", 1)


def test_the_end_of_the_metrics_is_read_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("infra.run_folder.TAIL_BYTES", 40)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"progress/step": {step}}}\n' for step in range(1, 100)))
    assert tail_metrics(path) == [{"progress/step": 99}]
    assert not (tmp_path / "missing.jsonl").exists()


@pytest.mark.parametrize("seed", range(100))
def test_kills_while_metrics_are_written_lose_and_repeat_no_step(tmp_path, seed):
    """A process killed at any byte of a line, again and again, with a checkpoint every few steps."""
    random = Random(seed)
    folder, steps = RunFolder.create(tmp_path), 12
    attempt, saved, values = 0, None, {}
    while (saved or 0) < steps:
        tracker = JsonlTracker(folder, saved)
        for step in range((saved or 0) + 1, steps + 1):
            before = folder.metrics.stat().st_size
            values[step] = random.random()
            tracker.log(step, {"attempt": attempt, "loss/train": values[step]})
            if random.random() < 0.2:
                # The step's line is cut anywhere, or whole but the process is gone before the next.
                os.truncate(folder.metrics, random.randint(before, folder.metrics.stat().st_size))
                break
            if step % 3 == 0:
                tracker.settle()
                saved = step
        tracker.finish(1)
        attempt += 1
        if saved is None:
            folder.metrics.unlink()
        else:
            truncate_after(folder.metrics, saved)
    records = read_metrics(folder.metrics)
    assert [record["progress/step"] for record in records] == list(range(1, steps + 1))
    assert [record["loss/train"] for record in records] == [values[step] for step in range(1, steps + 1)]


def test_a_file_cut_at_any_byte_reads_back_as_its_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        for step in (1, 2, 3):
            file.write(line_of({"progress/step": step, "loss/train/Größe": 0.1 * step, "x": math.nan}))
    data = path.read_bytes()
    ends = [i for i in range(len(data)) if data[i : i + 1] == b"\n"]
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends)  # a line that lacks its newline alone is whole
        assert [record["progress/step"] for record in read_metrics(path)] == [1, 2, 3][:whole]
        truncate_after(path, 3)
        assert path.read_bytes() == data[: ends[whole - 1] + 1 if whole else 0]


def test_set_aside_overwrites_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for text in ("first", "second"):
        path.write_text(text)
        set_aside(path)
    set_aside(path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "metrics.jsonl.1": "first",
        "metrics.jsonl.2": "second",
    }
