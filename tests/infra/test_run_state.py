"""A run's folder tells what the run is doing."""

import json
import os
import shutil
import time
from dataclasses import replace

import pytest

from infra.run_folder import RunFolder, line_of
from infra.run_lock import FILE, holding, this_process
from infra.run_state import QUIET_S, read_state

RECORD = {"progress/step": 3, "loss/train": 2.5, "perf/step_s": 2.0}


@pytest.fixture
def folder(tmp_path):
    made = RunFolder.create(tmp_path / "run")
    made.config.write_text("a: 1\n")
    return made


def record(folder, **changes):
    with folder.metrics.open("a") as file:
        file.write(line_of(RECORD | changes))


def leave_lock(folder, **changes):
    (folder.path / FILE).write_text(json.dumps(vars(replace(this_process("a launch"), **changes))))


def test_a_run_from_its_beginning_to_its_end(folder):
    assert read_state(folder, 5).doing == "not begun"
    (folder.checkpoints / "step_00000003").mkdir()
    (folder.checkpoints / "step_00000003" / "checkpoint.json").touch()
    assert read_state(folder, 5).doing == "stopped: no launch trains it", "though its records are gone"
    shutil.rmtree(folder.checkpoints / "step_00000003")
    with holding(folder, "mine"):
        assert read_state(folder, 5).doing == f"starting: process {os.getpid()} on {os.uname().nodename}"
        record(folder)
        state = read_state(folder, 5)
        assert state.doing.startswith("training: process")
        assert (state.step, state.left_s, state.checkpoint) == (3, 4.0, None)
    assert read_state(folder, 5).doing == "stopped: no launch trains it"
    record(folder, **{"progress/step": 5})
    assert read_state(folder, 5).doing == "done"


def test_a_launch_that_was_killed(folder):
    record(folder)
    leave_lock(folder, started=1.0)
    state = read_state(folder, 5)
    assert state.doing == "stopped: a launch ended without a word"
    assert state.alive is False


def test_a_launch_that_cannot_be_seen_from_here(folder):
    record(folder)
    leave_lock(folder, host="elsewhere")
    assert "as far as can be seen from here" in read_state(folder, 5).doing


def test_a_launch_that_is_quiet(folder):
    record(folder)
    with holding(folder, "mine"):
        at = time.time() - QUIET_S - 10
        os.utime(folder.metrics, (at, at))
        assert "quiet for 70 s" in read_state(folder, 5).doing


def test_a_record_that_is_being_written_or_is_no_number_does_not_disturb(folder):
    for step in range(1, 2000):  # longer than what is read of the end
        record(folder, **{"progress/step": step, "loss/train": float("nan")})
    with folder.metrics.open("a") as file:
        file.write('{"progress/step": 2000, "lo')
    state = read_state(folder, None)
    assert state.step == 1999
    assert state.left_s is None


@pytest.mark.parametrize(
    "garbage", ["\n", "garbage\n", "[3]\n", '{"progress/step": null}\n', '"NaN"\n', "[" * 9999 + "\n"]
)
def test_what_is_no_record_hides_none_before_it(folder, garbage):
    record(folder)
    with folder.metrics.open("a") as file:
        file.write(2 * f"{garbage}\n")
    assert read_state(folder, 5).step == 3


def test_a_folder_of_no_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} is no run folder"):
        read_state(RunFolder(tmp_path), 5)
