"""Hashes of the files that a run began with: of all bytes, found once, by whoever runs next."""

import hashlib
import json
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from dataloader.storage import Storage
from infra.run_folder import RunFolder
from infra.shutdown import StopFlag
from omni.training import file_hashes
from omni.training.file_hashes import PIECE, hash_files, hashing_files

SIZES = {"a": 3, "b": 2 * PIECE + 5, "c": 0, "d": PIECE}


@pytest.fixture
def noted(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "published"
    folder.mkdir()
    for number, (name, size) in enumerate(SIZES.items()):
        (folder / name).write_bytes(bytes(range(number, 251)) * (size // 200) + b"x" * (size % 7))
    storage = Storage.at(folder)
    files = {
        name: {"bytes": size, "modified": storage.fs.modified(storage.path(name)).isoformat()}
        for name, size in storage.sizes().items()
    }
    return {"folder": str(storage), "files": files}


def hashes(into: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in into.glob("*")} if into.exists() else {}


def expected(noted: dict[str, Any], *names: str) -> dict[str, str]:
    plain = {name: (Path(noted["folder"]) / name).read_bytes() for name in names}
    return {f"{name}.sha256": f"{hashlib.sha256(of).hexdigest()}  {name}\n" for name, of in plain.items()}


def test_ranks_divide_the_files_and_each_hash_is_of_all_bytes(noted, tmp_path):
    into, stop = tmp_path / "hashes", threading.Event()
    hash_files(noted, into, 0, 3, stop)
    assert 0 < len(hashes(into)) < len(SIZES)
    for rank in (1, 2):
        hash_files(noted, into, rank, 3, stop)
    assert hashes(into) == expected(noted, *SIZES)


def test_a_run_that_stops_leaves_files_to_the_next_launch(noted, tmp_path):
    folder, stop = RunFolder.create(tmp_path / "run"), threading.Event()
    into = folder.hashes
    stop.set()
    hash_files(noted, into, 0, 1, stop)
    assert not hashes(into)
    folder.weights.write_text(json.dumps(noted))
    into.mkdir()
    (into / "a.sha256").write_text("found before\n")
    with hashing_files(folder, 0, 1, StopFlag()):
        pass
    assert hashes(into) == expected(noted, *SIZES) | {"a.sha256": "found before\n"}


def test_hashes_that_the_end_of_a_run_does_not_wait_for_are_named(noted, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(file_hashes, "LAST_S", 0.1)
    monkeypatch.setattr(file_hashes, "PIECE_S", 0.2)
    going_on = threading.Event()
    monkeypatch.setattr(file_hashes, "_check", lambda *of: going_on.wait(20))  # a store that is slow
    folder = RunFolder.create(tmp_path / "run")
    folder.weights.write_text(json.dumps(noted))
    start = time.monotonic()
    with hashing_files(folder, 3, 4, StopFlag()):
        pass
    assert time.monotonic() - start < 5
    said = capsys.readouterr().err
    assert f"rank 3 leaves files of {folder.weights} without a hash" in said
    assert f"`omni resume {folder.path}` hashes the rest" in said
    going_on.set()
    for thread in threading.enumerate():
        if thread.name == "hashes":
            thread.join(20)


def test_a_run_without_published_weights_hashes_nothing(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    with hashing_files(folder, 0, 1, StopFlag()):
        assert "hashes" not in {thread.name for thread in threading.enumerate()}
    assert not (folder.hashes).exists()


@pytest.mark.parametrize("change", ["size", "time", "gone"])
def test_a_file_that_is_another_one_gets_no_hash_and_is_named(noted, tmp_path, capsys, change):
    path = Path(noted["folder"]) / "a"
    if change == "size":
        path.write_bytes(path.read_bytes() + b"x")
    elif change == "time":
        noted["files"]["a"]["modified"] = "2020-01-01T00:00:00+00:00"
    else:
        path.unlink()
    hash_files(noted, tmp_path / "hashes", 0, 1, threading.Event())
    assert hashes(tmp_path / "hashes") == expected(noted, "b", "c", "d")
    assert f"leaves {path} without a hash" in capsys.readouterr().err


def test_what_cannot_be_read_of_weights_json_ends_no_run(tmp_path, capsys):
    folder = RunFolder.create(tmp_path / "run")
    folder.weights.write_text("{}")
    with hashing_files(folder, 0, 1, StopFlag()):
        pass
    assert "hashes no more files of weights.json" in capsys.readouterr().err


def test_a_large_file_is_held_a_piece_at_a_time(noted, tmp_path):
    path = Path(noted["folder"]) / "large"
    with path.open("wb") as file:
        file.truncate(16 * PIECE)
    noted["files"] = {"large": {"bytes": 16 * PIECE}}
    tracemalloc.start()
    hash_files(noted, tmp_path / "hashes", 0, 1, threading.Event())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(hashes(tmp_path / "hashes")) == 1
    assert most < 2 * PIECE
