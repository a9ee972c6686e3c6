"""Where commands write: a place that takes nothing is refused before they work, by option and folder."""

import argparse
import errno
import os
import resource
from pathlib import Path
from typing import IO

import pytest
from small import write_mixed

from infra import run_folder
from omni.__main__ import main
from omni.commands._of_checkpoint import configured
from omni.commands._out import check_out
from omni.commands._shared import write_drawing
from omni.config import ConfigError
from pipeline.drawing import Track

WRITING = (
    ("plan", "--draw", "x.svg"),
    ("plan", "--search", "--trace", "balanced", "--out", "x.yaml"),
    ("compare", "--html", "x.html"),
    ("calibrate", "--out", "cluster/x.yaml"),
    ("data", "balance", "balanced", "--draw", "x.svg"),
    ("data", "build", "--recipe", "quickstart", "--out", "x"),
    ("data", "build", "--recipe", "quickstart_chat", "--out", "x"),
    ("data", "build", "--from-jsonl", "none.jsonl", "--out", "x"),
    ("data", "index", "none", "--recipe", "webdataset", "--out", "x"),
    ("data", "inspect", "none", "--html", "x.html"),
    ("data", "trace", "generate", "balanced", "--out", "x.parquet"),
)


@pytest.mark.parametrize("words", WRITING, ids=lambda words: " ".join(words))
def test_a_place_that_takes_nothing_is_named_before_a_command_works(tmp_path, capsys, words):
    file = tmp_path / "file"
    file.touch()
    out = file / words[-1]
    assert main([*words[:-1], str(out)]) == 2
    said = capsys.readouterr()
    assert f"{words[-2]} {out}: nothing can be written in {file} (Not a directory)" in said.err
    assert not said.out


UNHEEDED = (
    (("plan", "--out", "x.yaml"), "--out is of --search"),
    (("plan", "--tokens", "1e9"), "--tokens is of --search"),
    (
        ("data", "build", "--recipe", "quickstart", "--out", "x", "--root", "y"),
        "leave them out with --recipe",
    ),
    (("data", "build", "--recipe", "quickstart", "--out", "x", "--skip-bad", "1"), "leave them out"),
    (("data", "build", "--from-jsonl", "x.jsonl", "--out", "x", "--seed", "0"), "--seed is of --recipe"),
    (("data", "build", "--from-messages", "x.jsonl", "--out", "x", "--seed", "1"), "--seed is of --recipe"),
)


@pytest.mark.parametrize("words, said", UNHEEDED, ids=lambda of: " ".join(of) if type(of) is tuple else "")
def test_an_option_that_nothing_would_heed_is_refused(capsys, words, said):
    assert main([*words]) == 2
    assert said in capsys.readouterr().err


def test_an_unknown_recipe_is_a_mistake_of_the_user(capsys, tmp_path):
    assert main(["data", "index", "none", "--recipe", "webdatset", "--out", str(tmp_path / "x")]) == 2
    assert "unknown recipe 'webdatset'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, least",
    [
        (("data", "inspect", "x", "--samples", "-1"), 0),
        (("data", "show", "x", "--samples", "-1"), 0),
        (("data", "build", "--from-jsonl", "x", "--out", "y", "--skip-bad", "-1"), 0),
        (("data", "trace", "generate", "shift", "--out", "y", "--seed", "-1"), 0),
        (("data", "trace", "generate", "shift", "--out", "y", "--num", "0"), 1),
    ],
    ids=lambda of: " ".join(of) if type(of) is tuple else "",
)
def test_a_number_below_its_least_is_named_by_its_option(capsys, words, least):
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert ended.value.code == 2
    assert f"argument {words[-2]}: {words[-1]}: must be at least {least}" in capsys.readouterr().err


def test_a_checkpoint_is_not_evaluated_for_a_place_that_takes_nothing(tmp_path):
    with pytest.raises(ConfigError, match=f"--out {tmp_path}: is a folder: name a file"):
        configured(argparse.Namespace(out=tmp_path, run=Path("none"), step=None))


def test_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=f"--out {tmp_path}/pipe: is a device or a pipe"):
        check_out("--out", tmp_path / "pipe")


def test_a_disk_that_is_full_is_told_by_the_place_that_was_asked_for(tmp_path, monkeypatch, capsys):
    def full(file: IO[bytes], trace: object) -> None:
        file.write(b"a part")
        raise OSError(errno.ENOSPC, "Error writing bytes to file")  # as Arrow says it, which names no file

    monkeypatch.setattr("dataloader.trace_file.write_trace", full)
    out = tmp_path / "x.parquet"
    out.write_bytes(b"as it was")
    assert main(["data", "trace", "generate", "balanced", "--num", "9", "--out", str(out)]) == 1
    assert (out.read_bytes(), list(tmp_path.iterdir())) == (b"as it was", [out])
    assert f"--out {out}: cannot be written: No space left on device" in capsys.readouterr().err


def drawn(out: Path) -> int:
    write_drawing(out, [("a step", [Track("rank 0", ())] * 9)])
    return 0


def inspected(out: Path) -> int:
    write_mixed(out.parent / "set")
    return main(["data", "inspect", str(out.parent / "set"), "--html", str(out)])


def compared(out: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("omni.rehearsal.compare.compare", lambda *_: iter(()))
        return main(["compare", "--trace", "balanced", "cluster=h100", "launch.ranks=8", "--html", str(out)])


@pytest.mark.parametrize(
    ("option", "name", "write"),
    [
        ("draw", "x.svg", drawn),
        ("draw", "x.json", drawn),
        ("html", "x.html", inspected),
        ("html", "x.html", compared),
    ],
    ids=["svg", "json", "inspect", "compare"],
)
def test_a_disk_that_fills_up_while_a_command_works_leaves_what_was_there(
    tmp_path, monkeypatch, capsys, option, name, write
):
    """The largest file that may be written is shrunk when the report is: it then fails as on a full disk."""
    out = tmp_path / name
    out.write_text("as it was")
    write_text = run_folder.write_text
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(path, text):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
        try:
            write_text(path, text)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(run_folder, "write_text", full)
    try:
        said = f"code {write(out)}: {capsys.readouterr().err}"
    except OSError as error:
        said = f"code 1: {error}"
    assert said.startswith("code 1: ")
    assert f"--{option} {out}: cannot be written: File too large. Make room there or name another" in said
    assert out.read_text() == "as it was"
    assert {path.name for path in tmp_path.iterdir()} <= {name, "set"}


def test_what_is_above_a_place_may_be_missing(tmp_path):
    check_out("--out", tmp_path / "a" / "b" / "c.json")
    check_out("--out", tmp_path / "a" / "b", folder=True)
    check_out("--out", None)
    assert not list(tmp_path.iterdir())
