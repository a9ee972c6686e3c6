"""Row groups that ranks of a machine share: read once, bounded, given up where the folder cannot be used."""

import errno
import multiprocessing
import os
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataloader.node_cache import NodeCache
from dataloader.shared_files import SharedFiles
from dataloader.sources.build import build_index
from dataloader.sources.reader import PlacedReader

TABLE = pa.table({"text": ["one", "two"], "data": [b"\0" * 500, None]})


def refuse():
    raise AssertionError("it was read again")


def never(text):
    raise AssertionError(text)


def ask(folder, log, hold):
    def make():
        with open(log, "a") as file:
            file.write("read\n")
        time.sleep(hold)
        return TABLE

    assert NodeCache(folder, 1 << 20, never).table(("a", 1), make).equals(TABLE)


def test_ranks_that_ask_at_once_read_once(tmp_path):
    log = tmp_path / "log"
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=ask, args=(tmp_path / "cache", log, 0.3)) for _ in range(6)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
        assert rank.exitcode == 0
    assert log.read_text() == "read\n"
    assert NodeCache(tmp_path / "cache", 1 << 20, never).table(("a", 1), refuse).equals(TABLE)


def killed(folder):
    NodeCache(folder, 1 << 20).table(("a",), lambda: os._exit(9))


def test_a_rank_that_ends_while_it_reads_holds_up_nobody(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=killed, args=(tmp_path,))
    process.start()
    process.join(30)
    assert process.exitcode == 9
    assert NodeCache(tmp_path, 1 << 20, never).table(("a",), lambda: TABLE).equals(TABLE)


def test_what_a_read_raises_is_raised_and_asked_for_again(tmp_path):
    cache = NodeCache(tmp_path, 1 << 20, never)
    with pytest.raises(OSError, match="gone"):
        cache.table(("a",), lambda: (_ for _ in ()).throw(OSError("gone")))
    assert cache.table(("a",), lambda: TABLE).equals(TABLE)


def held(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.arrow"))


def test_the_folder_is_bounded_and_what_was_opened_longest_ago_goes(tmp_path):
    one, said = held_by_one(tmp_path / "one"), []
    cache = NodeCache(tmp_path / "cache", 3 * one + 100, said.append)
    for number in range(3):
        cache.table((number,), lambda: TABLE)
        time.sleep(0.02)
    cache.table((0,), refuse)  # used again
    for number in range(3, 5):
        cache.table((number,), lambda: TABLE)
        assert held(tmp_path / "cache") <= 3 * one + 100
        time.sleep(0.02)
        cache.table((0,), refuse)
    read = []
    cache.table((1,), lambda: read.append(1) or TABLE)
    assert read == [1]
    large = pa.table({"data": [b"\0" * (4 * one)]})
    assert said == []
    assert cache.table(("large",), lambda: large).equals(large)
    assert ["no room for a table of" in text for text in said] == [True]
    cache.table((0,), refuse)  # it made room for nothing


def held_by_one(folder: Path) -> int:
    NodeCache(folder, 1 << 20, never).table((0,), lambda: TABLE)
    return held(folder)


def test_maps_outlive_their_files(tmp_path):
    cache = NodeCache(tmp_path, 1 << 20, never)
    cache.table(("a",), lambda: TABLE)
    mapped = cache.table(("a",), refuse)
    for file in tmp_path.glob("*.arrow"):
        file.unlink()
    assert mapped.equals(TABLE)


def test_a_full_disk_is_said_once_and_costs_nothing_but_time(tmp_path, monkeypatch):
    said = []
    cache = NodeCache(tmp_path, 1 << 20, said.append)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("dataloader.node_cache.pa.ipc.new_file", full)
        for number in range(3):
            assert cache.table((number,), lambda: TABLE).equals(TABLE)
    assert not [file for file in tmp_path.iterdir() if file.suffix != ".lock"]
    (text,) = said
    assert "No space left on device" in text
    assert "data.cache_dir" in text
    cache.table((0,), lambda: TABLE)  # there is room again
    cache.table((0,), refuse)


def test_a_file_system_without_locks_is_said_once_and_ends_nothing(tmp_path, monkeypatch):
    said = []
    cache = NodeCache(tmp_path, 1 << 20, said.append)

    def without(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("dataloader.locks.fcntl.flock", without)
    for number in range(3):
        assert cache.table((number,), lambda: TABLE).equals(TABLE)
        assert cache.table((number,), refuse).equals(TABLE)
    assert ["No locks available" in text for text in said] == [True]


def test_a_lock_server_that_does_not_answer_is_waited_for_once(tmp_path, monkeypatch):
    said, asked, never = [], [], threading.Event()
    cache = NodeCache(tmp_path, 1 << 20, said.append)
    monkeypatch.setattr("dataloader.locks.ANSWER_S", 0.2)
    monkeypatch.setattr("dataloader.locks.fcntl.flock", lambda *_: (asked.append(1), never.wait()))
    try:
        for number in range(3):
            assert cache.table((number,), lambda: TABLE).equals(TABLE)
    finally:
        never.set()
    assert len(asked) == 1
    (text,) = said
    assert re.search(r"0\.2 s whether .*\.lock is locked: mend its lock service.*data\.cache_dir", text)


def test_half_of_what_is_free_is_left_free(tmp_path, monkeypatch):
    free = SimpleNamespace(free=2 * TABLE.nbytes - 1)
    monkeypatch.setattr("dataloader.node_cache.shutil.disk_usage", lambda _: free)
    said = []
    cache = NodeCache(tmp_path / "cache", 1 << 30, said.append)
    assert cache.table((0,), lambda: TABLE).equals(TABLE)
    assert held(tmp_path / "cache") == 0
    assert ["no room" in text for text in said] == [True]


@pytest.mark.parametrize("content", [b"", b"ARROW1\0\0 and nothing of it"])
def test_a_file_that_is_no_table_is_made_anew(tmp_path, content):
    cache = NodeCache(tmp_path, 1 << 20, never)
    cache.table(("a",), lambda: TABLE)
    (file,) = tmp_path.glob("*.arrow")
    file.unlink()
    file.write_bytes(content)
    assert cache.table(("a",), lambda: TABLE).equals(TABLE)
    cache.table(("a",), refuse)


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path):
    said = []
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    cache = NodeCache(tmp_path / "cache", 1 << 20, said.append)
    assert cache.table(("a",), lambda: TABLE).equals(TABLE)
    assert cache.table(("a",), lambda: TABLE).equals(TABLE)
    assert list((tmp_path / "cache").iterdir()) == []
    assert "may write to it" in said[0]
    assert len(said) == 1


def test_replicas_read_each_row_group_of_compressed_parquet_once(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    texts = [f"row {number} " + "x" * 100 for number in range(60)]
    pq.write_table(pa.table({"text": texts}), source / "0.parquet", compression="zstd", row_group_size=10)
    build_index(source, tmp_path / "index", "parquet")

    def read(most: int) -> int:
        total = 0
        for replica in range(8):
            files = SharedFiles(node=NodeCache(tmp_path / "cache", most, never))
            reader = PlacedReader(tmp_path / "index", files)
            for number in range(replica, 60, 8):
                assert reader.read(number, text=True, items=False).text == texts[number]
            total += files.bytes_read
        return total

    alone, shared = read(0), read(1 << 20)
    assert shared > 0
    assert alone == 8 * shared
    # Another file under the name is none of those that are kept.
    texts = ["X" + text[1:] for text in texts]
    pq.write_table(pa.table({"text": texts}), source / "0.parquet", compression="zstd", row_group_size=10)
    build_index(source, tmp_path / "index", "parquet", overwrite=True)
    assert read(1 << 20) > 0
