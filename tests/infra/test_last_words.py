"""The last line of a run says how it ended, whatever ended it."""

import json
import os

import pytest

from infra.last_words import last_words
from infra.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run")


def trained(folder, steps):
    lines = [{"progress/step": step, "loss/train": 1 / step} for step in range(1, steps + 1)]
    lines[0]["loss/eval/docs"] = 2.0
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_that_did_all_its_steps_succeeded(folder):
    trained(folder, 8)
    assert last_words(folder, 0, 8, 3725.4) == (
        f"SUCCEEDED: 8 of 8 steps; loss 0.1250; held-out docs 2.0000; 1:02:05; everything is in {folder.path}"
    )


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        (0, "STOPPED: "),
        (143, "STOPPED by SIGTERM (exit code 143): "),
        (1, "FAILED (exit code 1): "),
        (255, "FAILED (exit code 255): "),
    ],
)
def test_any_other_end_says_how_to_go_on(folder, code, verdict):
    trained(folder, 5)
    words = last_words(folder, code, 8, 2.0)
    assert words.startswith(f"{verdict}5 of 8 steps; loss 0.2000; ")
    assert f"`omni resume {folder.path}` goes on" in words
    assert ("once it is mended" in words) == verdict.startswith("FAILED"), "a signal needs no mending"


def test_a_kernel_that_wanted_memory_is_told_instead_of_the_signal(folder):
    trained(folder, 5)
    words = last_words(folder, 137, 8, 2.0, out_of_memory=True)
    assert words.startswith("FAILED: out of memory (exit code 137): 5 of 8 steps; ")
    assert "once it is mended" in words
    assert last_words(folder, 137, 8, 2.0).startswith("STOPPED by SIGKILL (exit code 137): ")
    assert "memory" not in last_words(folder, 1, 8, 2.0, out_of_memory=True), "it was another process"


def test_tracebacks_of_this_launch_are_pointed_to(folder):
    trained(folder, 5)
    folder.errors.mkdir()
    traceback = folder.errors / "rank-3.txt"
    traceback.write_text("Traceback")
    assert f"tracebacks of ranks are in {folder.errors}" in last_words(folder, 1, 8, 60.0)
    os.utime(traceback, (0, 0))
    assert "tracebacks of" not in last_words(folder, 1, 8, 60.0), "of an earlier launch"


def test_a_run_that_never_trained_points_to_the_reason(folder):
    assert last_words(folder, 2, 8, 2.0).startswith(
        "FAILED (exit code 2): 0 of 8 steps; 0:00:02; the reason is"
    )
