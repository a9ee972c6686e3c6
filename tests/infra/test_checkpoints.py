import errno
import json
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from ranks import RankPool

from dataloader.storage import Storage
from infra.checkpoint import (
    DAMAGED,
    MANIFEST,
    CheckpointError,
    Keep,
    _hash,
    claim,
    commit,
    complete,
    file_of,
    folder_of,
    locate,
    newest,
    open_shard,
    read_manifest,
    read_run,
    save_checkpoint,
    set_aside,
    verify,
    write_file,
)
from infra.saver import Saver
from infra.shard_file import CHUNK, DamagedError, NotFiniteError, Shard, ShardReader, pack
from parallel.control import Control
from parallel.control_of_run import connected
from parallel.control_tree import Tree

STORE: Any = None  # not asked for anything
ALONE = Control(0, Tree(1, 1), STORE, b"", 5)


def shard(seed: int, sizes: tuple[int, ...] = (3 * CHUNK // 4 + 5, 7, CHUNK)) -> Shard:
    numbers = torch.Generator().manual_seed(seed)
    tensors = {f"w{i}": torch.randn(size, generator=numbers) for i, size in enumerate(sizes)}
    return pack({"rng": torch.arange(9, dtype=torch.uint8), **tensors}, {"parameters": sorted(tensors)})


def written(path: Path | str, steps: tuple[int, ...] = (10, 20), ranks: int = 2) -> Storage:
    """Checkpoints of a run."""
    storage = Storage.at(path)
    run = claim(storage, None, adopt=True)
    for step in steps:
        files = [write_file(storage, run, step, rank, shard(1000 * step + rank)) for rank in range(ranks)]
        commit(storage, run, step, files, {"cursor": 7 * step})
    return storage


def _save(rank: int, root: str, step: int, fail_on: int | None) -> str:
    own = shard(rank)

    def fail() -> None:
        raise OSError(28, "No space left on device")

    if rank == fail_on:
        own = Shard(own.entries, own.data, own.held, fail)
    storage, control = Storage.at(root), connected(rank, dist.get_world_size(), 60)
    try:
        save_checkpoint(storage, "a run", step, own, {"cursor": 7 * step}, Keep(2), control)
    except CheckpointError as error:
        return f"refused: {error}"
    return "saved"


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_last_good_one(
    ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "run_id").write_text("a run")
    assert ranks.run(2, _save, str(tmp_path), 10, None) == ["saved"] * 2
    manifest = read_manifest(Storage.at(tmp_path), 10)
    assert (manifest["step"], manifest["cursor"], manifest["run"]) == (10, 70, "a run")
    assert list(manifest["files"]) == ["rank_00000.safetensors", "rank_00001.safetensors"]
    assert manifest["index"] == [{"parameters": ["w0", "w1", "w2"]}] * 2
    for fail_on in (0, 1):
        for answer in ranks.run(2, _save, str(tmp_path), 20, fail_on):
            assert answer.startswith("refused: the checkpoint of step 20")
            assert f"rank {fail_on}: OSError: [Errno 28] No space left" in answer
            assert "step_00000010" in answer
        assert sorted(p.name for p in tmp_path.iterdir()) == ["run_id", "step_00000010"]
    assert verify(Storage.at(tmp_path), 10)["step"] == 10


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "free space"), (errno.EDQUOT, "free space"), (errno.EIO, "mend that")],
)
def test_space_is_asked_for_where_it_lacks_alone(tmp_path: Path, number: int, remedy: str) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    storage, own = Storage.at(tmp_path), shard(1)
    failing = Shard(own.entries, own.data, own.held, fail)
    with pytest.raises(CheckpointError, match=rf"\[Errno {number}\].*; {remedy} and resume"):
        save_checkpoint(storage, claim(storage, None, adopt=True), 20, failing, {}, Keep(1), ALONE)


@pytest.mark.parametrize(
    ("keep", "left"),
    [(Keep(2), [15, 100]), (Keep(1, every=10), [10, 100]), (Keep(1, every=7), [100])],
)
def test_the_newest_are_kept_and_those_of_some_steps(tmp_path: Path, keep: Keep, left: list[int]) -> None:
    storage = Storage.at(tmp_path)
    run = claim(storage, None, adopt=True)
    for step in (5, 10, 15, 100):
        save_checkpoint(storage, run, step, shard(step, (4,)), {}, keep, ALONE)
    assert complete(storage) == left
    assert sorted(p.name for p in tmp_path.glob("step_*")) == [folder_of(step) for step in left]


def test_a_save_that_was_cut_short_is_not_seen_and_is_swept_away(tmp_path: Path) -> None:
    storage = written(tmp_path, (10,))
    cut = tmp_path / folder_of(15)
    shutil.copytree(tmp_path / folder_of(10), cut)
    (cut / MANIFEST).rename(cut / f"{MANIFEST}.tmp")
    manifest, problems = newest(storage)
    assert manifest is not None
    assert (manifest["step"], problems) == (10, [])
    save_checkpoint(storage, claim(storage, None, adopt=True), 20, shard(1), {}, Keep(2), ALONE)
    assert complete(storage) == [10, 20]
    assert not cut.exists()


def test_what_is_read_is_what_was_written_and_little_more_is_read(tmp_path: Path) -> None:
    storage = Storage.at(tmp_path)
    own = shard(3, (CHUNK, 3, 4 * CHUNK, 11))  # elements: 4, 16 chunks and a little
    file = write_file(storage, "r", 1, 0, own)
    path = tmp_path / folder_of(1) / file_of(0)
    assert path.stat().st_size == file.bytes

    class Counting:
        def __init__(self) -> None:
            self.file = path.open("rb")
            self.seek = self.file.seek
            self.read = self.file.read
            self.bytes = 0

        def readinto(self, room: memoryview) -> int:
            self.bytes += len(room)
            return self.file.readinto(room)

    counting = Counting()
    reader = ShardReader(counting, "it", file.bytes, file.head_hash)
    header = counting.bytes
    places = {"w2": (9 * CHUNK, 9 * CHUNK + 8), "w0": (4, CHUNK), "w3": (0, 44), "rng": (0, 9)}
    ranges = [(name, *place) for name, place in places.items()]
    found = dict(reader.read(ranges))
    for number, (name, start, stop) in enumerate(ranges):
        at = own.entries[name].start
        assert np.array_equal(found[number], own.data[at + start : at + stop].numpy())
    assert counting.bytes - header <= 4 * CHUNK
    with pytest.raises(DamagedError, match="does not hold w1 as"):
        list(reader.read([("w1", 0, 16)]))
    with pytest.raises(DamagedError, match="does not hold other as"):
        list(reader.read([("other", 0, 16)]))


def change(path: Path, at: int, bits: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= bits
    path.write_bytes(content)


def swap(one: Path, two: Path) -> None:
    content = one.read_bytes()
    shutil.copy(two, one)
    two.write_bytes(content)


def _foreign(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(written(folder.parent.parent / "other", (20,)).path(folder.name), folder)


def _unsealed(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["hash"]
    (folder / MANIFEST).write_text(json.dumps(manifest))


class Trap:
    """Unpickling it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _pickle(folder: Path) -> None:
    path = folder / file_of(0)
    content = pickle.dumps(Trap(folder.parent / "executed"))
    path.write_bytes(content + bytes(path.stat().st_size - len(content)))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of the data": (lambda f: change(f / file_of(1), -CHUNK), r"rank_00001\S+: chunk \d+ of its data"),
    "the last bit": (lambda f: change(f / file_of(0), -1, 128), r"rank_00000\S+: chunk \d+ of its data"),
    "a bit of the header": (lambda f: change(f / file_of(1), 40), r"rank_00001\S+: its header"),
    "the length of the header": (lambda f: change(f / file_of(1), 6), r"rank_00001\S+: its header"),
    "a bit of the manifest": (lambda f: change(f / MANIFEST, 120), MANIFEST),
    "the format": (lambda f: change(f / MANIFEST, (f / MANIFEST).read_text().index('": 2') + 3), MANIFEST),
    "a manifest without hash": (_unsealed, MANIFEST),
    "half a manifest": (lambda f: (f / MANIFEST).write_bytes((f / MANIFEST).read_bytes()[:99]), MANIFEST),
    "a manifest of numbers": (lambda f: (f / MANIFEST).write_text("[1]"), MANIFEST),
    "cut short": (lambda f: (f / file_of(1)).write_bytes(b"short"), "rank_00001.* has 5 bytes"),
    "longer": (lambda f: (f / file_of(1)).open("ab").write(b"more"), "rank_00001.* has .* bytes"),
    "a file is missing": (lambda f: (f / file_of(0)).unlink(), "rank_00000.* is missing"),
    "swapped ranks": (lambda f: swap(f / file_of(0), f / file_of(1)), "rank_00000.*its header"),
    "swapped steps": (
        lambda f: shutil.copy(f.parent / folder_of(10) / file_of(1), f / file_of(1)),
        "rank_00001.*its header",
    ),
    "the manifest of another step": (
        lambda f: shutil.copy(f.parent / folder_of(10) / MANIFEST, f / MANIFEST),
        "holds the checkpoint of step 10",
    ),
    "of another run": (_foreign, "is of run"),
    "a pickle": (_pickle, r"rank_00000\S+: its header"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_nothing_is_executed(tmp_path: Path, damage: str) -> None:
    storage = written(tmp_path / "own")
    damaged, words = DAMAGES[damage]
    damaged(tmp_path / "own" / folder_of(20))
    with pytest.raises(DamagedError, match=words):
        verify(storage, 20)
    assert not (tmp_path / "own" / "executed").exists()
    assert verify(storage, 10)["cursor"] == 70


def test_a_checkpoint_whose_files_are_not_all_there_is_passed_over(tmp_path: Path) -> None:
    storage = written(tmp_path)
    (tmp_path / folder_of(20) / file_of(1)).unlink()
    manifest, ((step, problem),) = newest(storage)
    assert manifest is not None
    assert (manifest["step"], step) == (10, 20)
    assert "rank_00001.safetensors is missing" in problem


def test_what_is_set_aside_counts_for_nothing_and_is_kept(tmp_path: Path) -> None:
    storage = written(tmp_path, (10, 20, 30))
    set_aside(storage, 30)
    assert complete(storage) == [10, 20]
    save_checkpoint(storage, claim(storage, None, adopt=True), 25, shard(1), {}, Keep(2), ALONE)
    assert complete(storage) == [20, 25]
    assert (tmp_path / folder_of(30) / DAMAGED).exists()
    assert (tmp_path / folder_of(30) / file_of(1)).exists()


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    storage = written(tmp_path)
    for step in (10, 20):
        (tmp_path / folder_of(step) / file_of(0)).unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is good: .*20/rank_00000.* is missing"):
        newest(storage)
    for step in (10, 20):
        set_aside(storage, step)
    with pytest.raises(CheckpointError, match=r"step_00000010, step_00000020 .*found .*damaged before"):
        newest(storage)


def test_checkpoints_of_other_formats_are_refused_by_name_and_not_passed_over(tmp_path: Path) -> None:
    storage = written(tmp_path)
    old = {"step": 20, "files": {"rank_00000.pt": 12}, "cursor": 9}
    (tmp_path / folder_of(20) / MANIFEST).write_text(json.dumps(old))
    with pytest.raises(
        CheckpointError, match=r"step_00000020 has format 1 and this version reads 2"
    ) as refused:
        newest(storage)
    assert not isinstance(refused.value, DamagedError)


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert newest(Storage.at(tmp_path / "nothing")) == (None, [])
    assert not (tmp_path / "nothing").exists()


def test_object_stores_keep_checkpoints_too() -> None:
    storage = written(f"memory://bucket/{uuid4()}/run", (10, 20))
    assert complete(storage) == [10, 20]
    path = storage.path(f"{folder_of(20)}/{file_of(1)}")
    content = bytearray(storage.fs.cat_file(path))
    content[-5] ^= 1
    storage.fs.pipe_file(path, bytes(content))
    with pytest.raises(DamagedError, match="chunk"):
        verify(storage, 20)
    set_aside(storage, 20)
    manifest, _ = newest(storage)
    assert manifest is not None
    assert manifest["step"] == 10
    own = verify(storage, 10)
    with storage.open(f"{folder_of(10)}/{file_of(1)}") as file:
        ((_, found),) = open_shard(own, file, file_of(1)).read([("w1", 0, 28)])
    entry = shard(10_001).entries["w1"]
    assert np.array_equal(found, shard(10_001).data[entry.start : entry.stop].numpy())
    save_checkpoint(storage, claim(storage, None, adopt=True), 20, shard(5), {}, Keep(1), ALONE)
    assert complete(storage) == [20]
    assert verify(storage, 20)["step"] == 20


def test_numbers_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    storage = written(tmp_path, (10,))
    for value in (torch.nan, torch.inf, -torch.inf):
        tensors = {"good": torch.zeros(99), "bad": torch.tensor([0.0, value])}
        with pytest.raises(NotFiniteError, match="bad is not finite"):
            write_file(storage, "r", 20, 0, pack(tensors, {}))
        with pytest.raises(CheckpointError, match=r"bad is not finite.*last good one is step_00000010"):
            save_checkpoint(
                storage, claim(storage, None, adopt=True), 20, pack(tensors, {}), {}, Keep(1), ALONE
            )
    assert complete(storage) == [10]


def test_a_save_goes_on_beside_its_caller_and_what_fails_is_raised_next(tmp_path: Path) -> None:
    storage = Storage.at(tmp_path)
    run, saver, go = claim(storage, None, adopt=True), None, threading.Event()

    def fail() -> None:
        raise OSError(28, "No space left on device")

    own = shard(1)
    saver = Saver(storage, run, Keep(2), ALONE)
    saver.start(5, Shard(own.entries, own.data, own.held, lambda: go.wait(60)), {})
    assert complete(storage) == []
    assert saver.finished() is None
    with pytest.raises(CheckpointError, match=r"not written in 0\.01 s"):
        saver.wait(0.01)
    go.set()
    saved = saver.wait()
    assert saved is not None
    assert (saved.step, complete(storage)) == (5, [5])
    assert saved.bytes == (tmp_path / folder_of(5) / file_of(0)).stat().st_size
    assert locate(saved.where) == (storage, 5)
    assert (saver.finished(), saver.wait()) == (None, None), "it is told once"
    saver.start(6, Shard(own.entries, own.data, own.held, fail), {})
    for retry in (lambda: saver.start(7, own, {}), saver.wait):
        with pytest.raises(CheckpointError, match=r"step 6 could not .*No space left.*step_00000005"):
            retry()
    assert complete(storage) == [5]


def _save_slowly(rank: int, root: str, pauses: list[float]) -> tuple[str, int]:
    """Save where the second rank takes so long for each piece in turn; say how that ended, and how often who
    waited was told that it goes on.
    """
    storage, told = Storage.at(root), []
    original = Storage.write

    def write(storage: Storage, name: str, parts: Any) -> None:
        kept = []
        for number, part in enumerate(parts):
            kept.append(part)
            time.sleep(pauses[number] if number < len(pauses) else 0.0)
        original(storage, name, kept)

    saver = Saver(storage, "a run", Keep(2), connected(rank, 2, 2))
    with patch.object(Storage, "write", write if rank == 1 else original):
        saver.start(5, shard(rank, (9 * 2**20,)), {})  # of 36 MiB: ten pieces
        try:
            saver.wait(going_on=lambda: told.append(rank))
        except CheckpointError as error:
            return str(error), len(told)
    return "saved", len(told)


def test_a_slow_store_is_waited_for_while_it_takes_what_is_written(ranks: RankPool, tmp_path: Path) -> None:
    for ended, told in ranks.run(2, _save_slowly, str(tmp_path), [0.5] * 9):
        assert ended == "saved"
        assert told >= 4
    assert verify(Storage.at(tmp_path), 5)["step"] == 5


def test_a_store_that_takes_nothing_more_ends_the_save_by_name(ranks: RankPool, tmp_path: Path) -> None:
    for ended, _ in ranks.run(2, _save_slowly, str(tmp_path), [0.5, 0.5, 4.5]):
        assert "all ranks waited at saving a checkpoint for rank 1: nothing was sent in 2 s" in ended
    assert complete(Storage.at(tmp_path)) == []


def _sweep_slowly(rank: int, root: str) -> tuple[float, int]:
    """Save where old checkpoints take 0.3 s a file to be removed; say how long that took this rank, and how
    often it was told that a rank goes on.
    """
    storage, told, remove = Storage.at(root), [], LocalFileSystem.rm

    def slow(fs: LocalFileSystem, path: Any, recursive: bool = False) -> None:
        for of in [path] if isinstance(path, str) else path:
            time.sleep(0.3 * sum(file.is_file() for file in (Path(of), *Path(of).glob("*"))))
        remove(fs, path, recursive)

    saver = Saver(storage, read_run(storage) or "", Keep(1), connected(rank, 2, 2))
    with patch.object(LocalFileSystem, "rm", slow):
        start = time.monotonic()
        saver.start(50, shard(rank), {})
        saver.wait(going_on=lambda: told.append(rank))
    return time.monotonic() - start, len(told)


def test_old_checkpoints_that_take_long_to_remove_are_progress_on_all_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    storage = written(tmp_path, (10, 20, 30, 40))
    for seconds, told in ranks.run(2, _sweep_slowly, str(tmp_path)):
        assert seconds > 4 * 2 * 0.3, "no rank goes on without the first"
        assert told >= 3
    assert complete(storage) == [50]


def test_a_long_file_is_brought_to_the_disk_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr("dataloader.storage.SYNCED", 8)
    monkeypatch.setattr("os.fsync", lambda file: synced.append(os.fstat(file).st_size))
    Storage.at(tmp_path).write("long", [b"12345", np.zeros(5, np.uint8), b"123"])
    assert synced == [10, 13]


@pytest.mark.parametrize("given", ["/runs/a/checkpoints", "step_00000004", "/runs/a/step_", "/runs/step_4/x"])
def test_what_names_no_checkpoint_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="names no checkpoint"):
        locate(given)
    assert str(locate("memory://runs/a/step_00000004/")[0]) == "memory:///runs/a"


def test_a_checkpoint_carries_its_run_also_where_the_folder_was_removed_meanwhile(tmp_path: Path) -> None:
    storage = written(tmp_path / "c")
    run = claim(storage, None, adopt=True)
    shutil.rmtree(tmp_path / "c")
    save_checkpoint(storage, run, 30, shard(3), {}, Keep(2), ALONE)
    assert newest(storage)[0]["run"] == run  # type: ignore[index]


def test_no_run_saves_among_the_checkpoints_of_another(tmp_path: Path) -> None:
    storage = written(tmp_path)
    with pytest.raises(CheckpointError, match=r"of another run .*train\.checkpoint_dir of its own"):
        save_checkpoint(storage, "mine", 30, shard(3), {}, Keep(2), ALONE)
    with pytest.raises(CheckpointError, match="of another run"):
        claim(storage, None)
    assert complete(storage) == [10, 20]


def test_a_run_id_that_is_garbage_is_named_as_such(tmp_path: Path) -> None:
    storage = written(tmp_path)
    (tmp_path / "run_id").write_bytes(b"\xff\xfe")
    with pytest.raises(DamagedError, match=f"step_00000020 is of run .*, and {tmp_path}/run_id says"):
        read_manifest(storage, 20)


def test_a_path_is_a_path_and_chains_of_urls_are_refused(tmp_path: Path) -> None:
    one, two = (written(tmp_path / f"a::{name}", (step,)) for name, step in (("one", 1), ("two", 2)))
    assert (complete(one), complete(two)) == ([1], [2])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a::one", "a::two"]
    with pytest.raises(ValueError, match="chains several URLs"):
        Storage.at("simplecache::memory://a")


def test_a_password_in_a_url_is_refused_before_it_is_written_anywhere() -> None:
    with pytest.raises(ValueError, match="holds a password") as refused:
        Storage.at("sftp://user:hunter22@host/folder")
    assert "hunter22" not in str(refused.value)
    assert Storage.at("memory://bucket/a:b@c").root == "/bucket/a:b@c"


@pytest.mark.parametrize("key", ["files", "index", "run", "step"])
def test_a_manifest_without_a_key_is_damaged_and_says_which(tmp_path: Path, key: str) -> None:
    storage = written(tmp_path)
    path = tmp_path / folder_of(20) / MANIFEST
    body = json.loads(path.read_text())
    del body["hash"], body[key]
    path.write_text(json.dumps({"hash": _hash(body), **body}))
    manifest, problems = newest(storage)
    assert manifest is not None
    assert manifest["step"] == 10
    assert problems == [(20, f"{folder_of(20)}/{MANIFEST} has no {key}")]
