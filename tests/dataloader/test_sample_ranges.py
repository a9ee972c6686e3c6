"""Samples that are read by themselves, without the row groups that they lie in."""

import os
import shutil
import time
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_samples import make_sample, write_dataset

from dataloader.format import PLACEHOLDER, DataError, Item, Sample
from dataloader.manifest import Frame, TextForm, read_manifest, write_manifest
from dataloader.ranges import RANGES
from dataloader.reader import Reader
from dataloader.shared_files import SharedFiles
from dataloader.stream import SourceSpec, Stream
from dataloader.tokenizer import ByteTokenizer
from dataloader.verify import verify_dataset
from dataloader.writer import DatasetWriter, add_hashes, add_ranges

BYTES = ByteTokenizer()


def blob(size, seed):
    return Item("sonar", "raw", (seed + 1,), np.random.default_rng(seed).bytes(size))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Samples with and without items and targets; items of up to several pages, equal ones, tiny ones."""
    path = tmp_path_factory.mktemp("ranges") / "mixed"
    rng = np.random.default_rng(0)
    samples = []
    for i in range(40):
        sizes = rng.choice([1, 3, 100, 70_000, 1_500_000], size=i % 4, p=[0.2, 0.2, 0.2, 0.3, 0.1])
        items = tuple(blob(int(size), int(rng.integers(3))) for size in sizes)
        text = ("aé" if i % 7 else "x") + PLACEHOLDER * len(items) + "日本" * int(rng.integers(4))
        samples.append(Sample(f"id-{i}", text, items, [None, (), ((0, 1),)][i % 3]))
    with DatasetWriter(path, BYTES, rows_per_group=4, groups_per_shard=3) as writer:
        for sample in samples:
            writer.add(sample)
    return path, samples


def test_what_is_read_by_itself_is_what_its_row_group_has(mixed):
    path, samples = mixed
    ranged, whole = Reader(path), Reader(path, ranged=False)
    for i, sample in enumerate(samples):
        for text, items in ((True, True), (True, False), (False, True), (False, (0,)), (True, (2, 0))):
            found = ranged.read(i, text, items)
            assert found == whole.read(i, text, items)
            assert found.id == sample.id
        assert ranged.read(i, True, True) == sample
    assert whole.files.cached_bytes > 0 == ranged.files.cached_bytes
    assert not verify_dataset(path, BYTES, {}).problems
    with pytest.raises(IndexError):
        ranged.read(len(samples), True, True)


def test_only_what_is_asked_for_is_read(mixed):
    path, samples = mixed
    i = next(i for i, sample in enumerate(samples) if len(sample.items) == 3)
    sizes = [len(item.data) for item in samples[i].items]
    for which in ((), (0,), (2,), (0, 2), (1, 0)):
        reader = Reader(path)
        reader.read(i, text=False, items=which)
        assert sum(sizes[k] for k in which) <= reader.files.bytes_read <= sum(sizes[k] for k in which) + 256
    reader = Reader(path)
    reader.read(i, text=True, items=False)
    assert reader.files.bytes_read == len(samples[i].text.encode())


def test_replicas_read_what_they_need_and_no_more(tmp_path):
    """Bytes read by payload, where of n replicas each takes every n-th sample of a stream."""
    items = [blob(size, seed) for seed, size in enumerate((3_000, 20_000, 9_000))]
    samples = [Sample(f"{i}", PLACEHOLDER + "y" * (i % 90), (items[i % 3],)) for i in range(256)]
    with DatasetWriter(tmp_path / "set", BYTES) as writer:
        for sample in samples:
            writer.add(sample)
    payload = sum(len(s.text.encode()) + len(s.items[0].data) for s in samples)
    ids = Stream({"s": SourceSpec(256, 32, 1)}, seed=0).take(0, 256)[1].tolist()
    for replicas in (1, 8, 64):
        readers = [Reader(tmp_path / "set", SharedFiles(cache_bytes=1 << 20)) for _ in range(replicas)]
        for place, i in enumerate(ids):
            assert readers[place % replicas].read(i, text=True, items=True) == samples[i]
        assert payload <= sum(reader.files.bytes_read for reader in readers) <= 1.1 * payload


def test_an_older_dataset_gets_its_ranges_and_stays_what_it_was(mixed, tmp_path):
    path, samples = mixed
    copy = shutil.copytree(path, tmp_path / "old")
    written = (copy / RANGES).read_bytes()
    (copy / RANGES).unlink()
    before = {file.name: file.read_bytes() for file in copy.iterdir()}
    reader = Reader(copy)
    assert [reader.read(i, True, True) for i in range(40)] == samples
    assert reader.files.bytes_read > sum(len(item.data) for s in samples for item in s.items)
    assert add_ranges(copy)
    assert not add_ranges(copy)
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == before | {RANGES: written}
    assert not add_hashes(copy)


@pytest.mark.parametrize("options", [{"compression": "gzip"}, {"use_dictionary": True}])
def test_what_is_compressed_is_read_by_row_groups(tmp_path, options):
    path = write_dataset(tmp_path / "set")
    (path / RANGES).unlink()
    for shard in path.glob("shard-*"):
        with pq.ParquetFile(shard) as file:
            groups = [file.read_row_group(number) for number in range(file.num_row_groups)]
        plain = {"compression": "none", "use_dictionary": False}
        with pq.ParquetWriter(shard, groups[0].schema, **(plain | options)) as writer:
            for group in groups:
                writer.write_table(group)
    manifest = read_manifest(path)
    sizes = {shard.file: (path / shard.file).stat().st_size for shard in manifest.shards}
    shards = tuple(replace(shard, bytes=sizes[shard.file]) for shard in manifest.shards)
    write_manifest(path, replace(manifest, shards=shards))
    found = add_ranges(path)
    assert found == (path / RANGES).exists()
    assert not (path / f"{RANGES}.new").exists()
    # A dictionary has each value whole, too.
    assert found == ("use_dictionary" in options)
    reader = Reader(path)
    assert [reader.read(i, True, True) for i in range(50)] == [make_sample(i) for i in range(50)]


def test_a_sample_of_which_something_is_not_found_is_read_by_its_row_group(tmp_path):
    path = write_dataset(tmp_path / "set")
    edit(path, lambda rows: rows[7]["items"][0].update(at=-1) or rows[9]["text"].update(at=-1))
    reader = Reader(path)
    assert [reader.read(i, True, True) for i in range(50)] == [make_sample(i) for i in range(50)]
    assert reader.files.cached_bytes > 0


def edit(path, change):
    """Write ranges anew, with a change of their rows."""
    table = pa.ipc.open_file((path / RANGES).read_bytes()).read_all()
    rows = table.to_pylist()
    change(rows)
    with pa.ipc.new_file(str(path / RANGES), table.schema) as file:
        file.write_table(pa.Table.from_pylist(rows, schema=table.schema))


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[5]["text"].update(at=rows[5]["text"]["at"] + 1),
        lambda rows: rows[5].update(targets=[{"start": 0, "stop": 2}]),
        lambda rows: rows[5]["items"][1].update(at=rows[4]["items"][0]["at"]),
        lambda rows: rows[5]["items"][0].update(size=[8, 9]),
        lambda rows: rows[5]["items"][0].update(bytes=10**9),
    ],
    ids=["text", "targets", "item", "size", "bytes"],
)
def test_ranges_of_something_else_are_found_by_what_they_count(tmp_path, change):
    path = write_dataset(tmp_path / "set")
    edit(path, change)
    with pytest.raises(DataError, match=r"shard-00000.parquet, row group 1: cannot be read \(.*ranges.arrow"):
        Reader(path).read(5, text=True, items=True)
    assert Reader(path).read(6, text=True, items=True) == make_sample(6)
    assert verify_dataset(path, BYTES, {}).problems == {"misplaced": 1}


def test_ranges_that_are_damaged_or_change_in_use_are_named(tmp_path):
    path = write_dataset(tmp_path / "set")
    whole = (path / RANGES).read_bytes()
    reader = Reader(path)
    os.truncate(path / RANGES, 100)
    time.sleep(0.01)  # it is looked at again after a millisecond
    with pytest.raises(DataError, match=r"ranges.arrow is 100 bytes, .*was changed while it is in use"):
        reader.read(3, text=True, items=True)
    with pytest.raises(DataError, match=r"ranges.arrow: .* write it anew with omni data hash"):
        Reader(path)
    (path / RANGES).write_bytes(whole)
    edit(path, lambda rows: rows.pop())
    with pytest.raises(DataError, match=r"ranges.arrow: it has 49 rows of 50"):
        Reader(path)
    (path / RANGES).unlink()
    with pytest.raises(DataError, match=r"ranges.arrow: .*it was there when the run began"):
        reader.read(3, text=True, items=True)


def test_the_turns_of_chats_are_read_too(tmp_path):
    text = TextForm(frame=Frame(turns=True))
    samples = [Sample(f"{i}", "hello you", (), ((0, 5),), (5, 9)[: i % 3]) for i in range(9)]
    with DatasetWriter(tmp_path / "set", BYTES, text=text) as writer:
        for sample in samples:
            writer.add(sample)
    assert [Reader(tmp_path / "set").read(i, True, False) for i in range(9)] == samples
    edit(tmp_path / "set", lambda rows: rows[1].update(turns=[4]))
    with pytest.raises(DataError, match="counted"):
        Reader(tmp_path / "set").read(1, True, False)
