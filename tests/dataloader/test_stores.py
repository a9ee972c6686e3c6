"""Samples in an object store that fails, stalls, answers with less than was asked for, or has other files."""

import io
import threading
import time
from pathlib import Path
from typing import ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_samples import image_bytes, make_sample
from fsspec.implementations.memory import MemoryFileSystem
from tars import write_tars

from dataloader import fetching
from dataloader.fetching import Fetcher, joined
from dataloader.format import PLACEHOLDER, UnreadableError
from dataloader.index import Index
from dataloader.loader import Fetch, Loader, _beside_items, _works
from dataloader.shared_files import SharedFiles
from dataloader.sources.beside import item_beside
from dataloader.sources.build import build_index
from dataloader.sources.reader import PlacedReader
from dataloader.sources.recipe import Range
from dataloader.storage import Storage
from dataloader.tokenizer import ByteTokenizer

SAMPLES = [make_sample(i) for i in range(20)]


class Store(MemoryFileSystem):
    """A store in memory that counts requests and can be told how to answer the next ones."""

    protocol = "teststore"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    answers: ClassVar[list] = []  # what the next requests meet: an exception, or seconds or bytes too few
    requests: ClassVar[list] = []
    tags: ClassVar[dict] = {}

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("teststore://", "memory://"))

    def cat_file(self, path, start=None, end=None, **kwargs):
        self.requests.append((path, start, end))
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, float):
            time.sleep(answer)
        content = super().cat_file(path, start, end, **kwargs)
        return content[:answer] if isinstance(answer, int) else content

    def info(self, path, **kwargs):
        found = super().info(path, **kwargs)
        return {**found, "ETag": f'"{self.tags.get(path, "first")}"'}

    def find(self, path, **kwargs):
        return {name: {**of, "ETag": '"first"'} for name, of in super().find(path, **kwargs).items()}


@pytest.fixture
def store(tmp_path):
    fsspec.register_implementation("teststore", Store, clobber=True)
    for table in (Store.store, Store.answers, Store.requests, Store.tags):
        table.clear()
    for file in sorted(write_tars(tmp_path / "tars", SAMPLES, each=5).iterdir()):
        Storage.at("teststore://bucket").write(f"tars/{file.name}", [file.read_bytes()])
    return "teststore://bucket/tars"


@pytest.fixture
def index(store, tmp_path) -> Path:
    assert build_index(store, tmp_path / "index", "webdataset")
    Store.requests.clear()
    return tmp_path / "index"


def test_samples_of_a_store_are_those_of_files(index):
    reader = PlacedReader(index)
    assert [reader.read(i, True, True).items for i in range(20)] == [sample.items for sample in SAMPLES]
    assert len(Store.requests) == 20  # one for each sample: its members are neighbours
    assert reader.files.bytes_read == sum(end - start for _, start, end in Store.requests)


def test_a_rank_asks_once_for_text_and_items_of_a_sample(index):
    """Or once for each thread that takes some. Where one of them cannot be read, the other still is."""
    metas = [Index.open(index).meta(i, "s", lambda modality, size: (1, 1)) for i in range(20)]
    items = tuple(("s", meta.id, k) for meta in metas for k in range(len(meta.items)))
    fetch = Fetch(tuple(("s", meta) for meta in metas), items)
    loader = Loader({"s": PlacedReader(index)}, ByteTokenizer(), {"image": lambda item: item.data}, 3)
    loader.submit(0, fetch)
    fetched = loader.get(0, 20)
    assert fetched.items == [item.data for sample in SAMPLES for item in sample.items]
    assert all(arrays[2].any() for arrays in fetched.texts)
    of_parts = [
        {fetch.items[n][1] for n in places} if kind == "items" else places
        for kind, places in _works(fetch, _beside_items(fetch), 3)
    ]
    assert len(Store.requests) == sum(map(len, of_parts)) < 25  # items of a few samples go to two threads

    name, content = "/bucket/tars/00000.tar", bytearray(Store.store["/bucket/tars/00000.tar"].getvalue())
    content[content.index(SAMPLES[2].items[0].data) + 30] ^= 1
    Store.store[name] = type(Store.store[name])(Store, name, bytes(content))
    loader.submit(1, fetch)
    fetched = loader.get(1, 20)
    loader.close()
    assert ("s", 2, 0) in {(one.source, one.sample, one.item) for one in fetched.failures}
    assert {one.sample for one in fetched.failures} == {2}
    assert all(arrays[2].any() for arrays in fetched.texts)


@pytest.mark.parametrize("answers", [[OSError("503 Slow Down")] * 3, [7, 0, RuntimeError("reset")], [0.3]])
def test_a_store_that_fails_for_a_while_is_asked_again(index, answers):
    reader = PlacedReader(index)
    reader._fetcher = Fetcher(reader._fetcher.storage, reader.files, attempt_s=0.1, deadline_s=20)
    Store.answers[:] = answers
    assert reader.read(2, True, True).items == SAMPLES[2].items
    assert len(Store.requests) == 1 + len(answers)


def test_a_store_that_does_not_come_back_loses_the_sample_by_its_name(index):
    reader = PlacedReader(index)
    reader._fetcher = Fetcher(reader._fetcher.storage, reader.files, attempt_s=0.2, deadline_s=0.5)
    name = f"00000.tar/{SAMPLES[2].id}"
    for answers, says in (
        ([OSError("503 Slow Down")] * 9, r"00000.tar: the store gave nothing in 0.5 s; .*503 Slow Down"),
        ([5.0] * 9, r"the store gave nothing in 0.5 s; at last: TimeoutError"),
        ([100] * 9, r"100 of \d+ bytes came: it is cut, or another file"),
    ):
        Store.answers[:] = answers
        begun = time.monotonic()
        with pytest.raises(UnreadableError, match=says) as error:
            reader.read(2, True, True)
        assert error.value.name == name
        assert time.monotonic() - begun < 4
    Store.answers.clear()
    assert reader.read(2, True, True).items == SAMPLES[2].items


def test_threads_that_wait_for_a_store_wait_side_by_side(index):
    reader = PlacedReader(index)
    for i in range(8):
        reader.read(i, True, True)
    Store.answers[:] = [0.5] * 8
    threads = [threading.Thread(target=reader.read, args=(i, True, True)) for i in range(8)]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not Store.answers
    assert time.monotonic() - begun < 8 * 0.5


def test_a_file_that_was_replaced_is_told_by_its_tag(index):
    Store.tags["/bucket/tars/00001.tar"] = "second"
    reader = PlacedReader(index)
    assert reader.read(4, True, True).items == SAMPLES[4].items
    with pytest.raises(UnreadableError, match=r"00001.tar has the tag second, and had first when indexed"):
        reader.read(5, True, True)
    Storage.at("teststore://bucket/tars").fs.rm("/bucket/tars/00002.tar")
    with pytest.raises(UnreadableError, match=r"00002.tar"):
        reader.read(10, True, True)
    assert len(Store.requests) == 1  # what is not there is not asked for again


def test_a_file_of_a_store_is_gone_through_in_requests_of_a_bounded_size(store, monkeypatch):
    monkeypatch.setattr(fetching, "_AHEAD", 1000)
    storage = Storage.at("teststore://bucket")
    name = min(storage.sizes("tars"))
    whole = storage.read(f"tars/{name}")
    Store.requests.clear()
    with fetching.opened(storage, f"tars/{name}") as file:
        assert file.read() == whole
        assert (file.seek(5), file.read(2500)) == (5, whole[5:2505])
    assert max(end - start for _, start, end in Store.requests) == 1000
    assert len(Store.requests) == -(-len(whole) // 1000) + 3


def parquet_store() -> None:
    """The texts of the samples as a compressed file of a store."""
    buffer = io.BytesIO()
    texts = {"text": [sample.text.replace(PLACEHOLDER, "") for sample in SAMPLES]}
    pq.write_table(pa.table(texts), buffer, compression="zstd", row_group_size=5)
    Storage.at("teststore://bucket").write("rows/0.parquet", [buffer.getvalue()])


def test_row_groups_of_a_store_that_fails_for_a_while_are_asked_for_again(store, tmp_path, monkeypatch):
    parquet_store()
    assert build_index("teststore://bucket/rows", tmp_path / "rows", "parquet")
    reader = PlacedReader(tmp_path / "rows")
    storage = reader._fetcher.storage
    reader._fetcher = Fetcher(storage, reader.files, attempt_s=10, deadline_s=20)
    opens = {"left": 2, "answer": OSError("503 Slow Down")}
    monkeypatch.setattr(Store, "_open", failing(Store._open, opens))
    assert reader.read(2, True, False).text.startswith("sample 2")
    reader._fetcher = Fetcher(storage, reader.files, attempt_s=0.2, deadline_s=0.5)
    opens["left"] = 9
    with pytest.raises(UnreadableError, match=r"0.parquet: the store gave nothing in 0.5 s; .*503") as error:
        reader.read(7, True, False)
    assert error.value.name == "0.parquet/7"


def failing(once, opens):
    def fail(self, path, *args, **keys):
        opens["left"] -= 1
        if opens["left"] >= 0:
            raise opens["answer"]
        return once(self, path, *args, **keys)

    return fail


@pytest.mark.parametrize("answers", [[OSError("503 Slow Down")] * 2, [7, 0], [0.4]])
@pytest.mark.parametrize("recipe", ["webdataset", "parquet"])
def test_an_index_of_a_store_that_fails_for_a_while_lacks_nothing(
    store, tmp_path, monkeypatch, recipe, answers
):
    parquet_store()
    monkeypatch.setattr(Fetcher.__init__, "__defaults__", (0.1, 20))
    source = f"teststore://bucket/{'tars' if recipe == 'webdataset' else 'rows'}"
    Store.answers[:] = answers
    assert build_index(source, tmp_path / "index", recipe)
    assert not Store.answers
    assert len(Index.open(tmp_path / "index")) == 20
    assert (tmp_path / "index" / "left_out.jsonl").read_text() == ""


@pytest.mark.parametrize("recipe", ["webdataset", "parquet"])
def test_an_index_of_a_store_that_does_not_come_back_is_not_built(store, tmp_path, monkeypatch, recipe):
    parquet_store()
    monkeypatch.setattr(Fetcher.__init__, "__defaults__", (0.1, 0.3))
    source = f"teststore://bucket/{'tars' if recipe == 'webdataset' else 'rows'}"
    Store.answers[:] = [OSError("503 Slow Down")] * 9
    with pytest.raises(OSError, match=r"the store gave nothing in 0.3 s; .*503 Slow Down"):
        build_index(source, tmp_path / "index", recipe)
    assert not (tmp_path / "index").exists()
    Store.answers.clear()
    assert build_index(source, tmp_path / "index", recipe)


def test_ranges_are_joined_where_little_lies_between():
    places = [(0, 10), (12, 8), (20, 5), (90, 1), (50, 10), (60, 10)]
    assert list(joined(places, 4)) == [
        (0, 25, [0, 1, 2]),
        (50, 70, [4, 5]),
        (90, 91, [3]),
    ]
    assert list(joined([], 4)) == []
    assert list(joined([(5, 9), (7, 2), (0, 4)], 0)) == [(0, 4, [2]), (5, 14, [0, 1])]


def test_ranges_of_a_file_come_in_their_order(tmp_path):
    (tmp_path / "f").write_bytes(bytes(range(200)))
    files = SharedFiles()
    fetcher = Fetcher(Storage.at(tmp_path), files)
    assert fetcher.ranges("f", [(100, 3), (0, 2), (2, 0), (199, 1)]) == [
        bytes([100, 101, 102]),
        bytes([0, 1]),
        b"",
        bytes([199]),
    ]
    with pytest.raises(ValueError, match=r"f: from byte 199 on 1 of 2 bytes came"):
        fetcher.ranges("f", [(199, 2)])
    with pytest.raises(FileNotFoundError):
        fetcher.ranges("g", [(0, 1)])


def test_a_path_is_not_followed_out_of_a_store_s_root(store):
    storage = Storage.at(store)
    Storage.at("teststore://bucket").write("secret.png", [image_bytes(8, 8)])
    storage.write("pictures/a.png", [image_bytes(8, 16)])
    item = item_beside(storage, "pictures", "image", "a.png")
    assert (item.size, item.place) == ((8, 16), Range("pictures/a.png", 0, len(image_bytes(8, 16))))
    for path, reason in (
        ("../../secret.png", "outside the root"),
        ("/secret.png", "outside the root"),
        ("../..", "outside the root"),
        ("b.png", "no file"),
        ("https://x/a.png", "by URL alone"),
    ):
        assert item_beside(storage, "pictures", "image", path).reason == reason
