"""One fixed-width line a step, plain in a pipe, live in a terminal."""

import io
import math
import os
import pty
from contextlib import suppress

import pytest

from infra.progress import LEGEND, Progress, header, step_line
from infra.screen import beside

FULL = {
    "progress/step": 7,
    "progress/tokens": 1_000_000,
    "loss/train": 2.34567,
    "optim/grad_norm": 0.5,
    "optim/lr/llm": 3e-4,
    "perf/step_s": 2.0,
    "perf/tokens_per_s": 12_345.0,
    "perf/mfu": 0.4123,
    "mem/peak_gb": 71.25,
    "data/wait_frac": 0.015,
    "balance/max_over_mean/llm": 1.02,
    "balance/max_over_mean/image": 1.37,
}


def test_columns():
    titles = ["step", "loss", "|grad|", "lr", "tok/s", "MFU", "mem GB", "wait", "imbal", "ETA"]
    assert header(100).split() == " ".join(titles).split()
    assert step_line(100, 186.0, FULL).split() == (
        ["7/100", "2.3457", "0.5000", "3.00e-04", "12.35k", "41.2%", "71.25", "1.5%", "1.37", "0:03:06"]
    )
    assert step_line(100, None, {"progress/step": 7}).split() == ["7/100", *["-"] * 9]


def test_every_column_is_explained():
    assert " ".join(["step", *LEGEND]).split() == header(100).split()


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-9, 123456.789, 1e30, -1e30, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("left_s", [None, 0.0, 86399.0, 1e7, 1e10, math.nan])
def test_the_width_never_changes(value, left_s):
    metrics = dict.fromkeys(FULL, abs(value)) | {"progress/step": 1234, "loss/train": value}
    assert len(step_line(9999, left_s, metrics)) == len(header(9999)) == 79


def test_a_pipe_gets_plain_lines_and_headers():
    out = io.StringIO()
    progress = Progress(120, out=out)
    for step in range(1, 121):
        progress.step({**FULL, "progress/step": step})
    progress.note("saved \x1b[31mred\r")
    progress.close()
    lines = out.getvalue().splitlines()
    assert [i for i, line in enumerate(lines) if "|grad|" in line] == [0, 51, 102]
    assert len(lines) == 120 + 3 + 1
    assert len({len(line) for line in lines[:-1]}) == 1
    assert lines[-1] == r"saved \x1b[31mred\r"
    assert all(c.isprintable() or c == "\n" for c in out.getvalue())
    assert out.getvalue().isascii()


def test_every_so_many_steps_and_the_last():
    out = io.StringIO()
    progress = Progress(25, out=out, every=10)
    for step in range(1, 26):
        progress.step({"progress/step": step, "perf/step_s": 1.0})
    progress.close()
    lines = out.getvalue().splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["10/25", "20/25", "25/25"]
    assert [line.split()[-1] for line in lines] == ["0:00:15", "0:00:05", "0:00:00"]


def test_a_terminal_shows_lines_above_a_live_bar():
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as terminal:
        progress = Progress(4, out=terminal)
        progress.step({**FULL, "progress/step": 2})
        progress.note("a note")
        progress.close()
        progress.close()
    shown = ""
    with suppress(OSError):  # the end of a terminal whose other side is closed
        while part := os.read(reader, 65536):
            shown += part.decode()
    os.close(reader)
    assert "2/4" in shown
    assert "a note" in shown
    assert "50.0 %" in shown
    assert "\x1b[" in shown


def test_a_terminal_shows_long_notes_whole():
    reader, writer = pty.openpty()
    words = " ".join(f"word{number}" for number in range(60))
    with os.fdopen(writer, "w") as terminal:
        progress = Progress(4, out=terminal)
        progress.note(f"choice out of date: {words}")
        progress.close()
    shown = ""
    with suppress(OSError):
        while part := os.read(reader, 65536):
            shown += part.decode()
    os.close(reader)
    assert words in shown


def test_a_step_without_its_number_is_refused():
    with pytest.raises(ValueError, match="progress/step"):
        Progress(4, out=io.StringIO()).step({})


def test_another_process_writes_in_the_place_of_the_bar_and_not_behind_it():
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as terminal:
        terminal.write("[####....]  50.0 %")
        beside("rank 3: skipped a sample", terminal)
    shown = ""
    with suppress(OSError):
        while part := os.read(reader, 65536):
            shown += part.decode()
    os.close(reader)
    assert shown.endswith("%\r\x1b[2Krank 3: skipped a sample\r\n")
    plain = io.StringIO()
    beside("rank 3: skipped a sample", plain)
    beside("of sample '\x1b[2J', line\n2", plain)
    assert plain.getvalue() == "rank 3: skipped a sample\nof sample '\\x1b[2J', line\n2\n"
