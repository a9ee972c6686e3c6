import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from dataset_samples import image_item, item_counts, make_sample, write_dataset
from small import without_hashes

from dataloader.decode import decode_image
from dataloader.format import PLACEHOLDER, DataError, Item, Sample, validate_sample
from dataloader.index import Index
from dataloader.item_counts import RememberedCounts
from dataloader.reader import Reader
from dataloader.shared_files import SharedFiles
from dataloader.tokenizer import ByteTokenizer, Encoding
from dataloader.tokens import length, text_tokens, tokenize
from dataloader.verify import verify_dataset
from dataloader.writer import DatasetWriter, add_hashes, is_intact

BYTES = ByteTokenizer()


class Other(ByteTokenizer):
    name = "bpe"


def test_what_is_written_is_read_back(tmp_path):
    path = write_dataset(tmp_path / "set", count=50, rows_per_group=4, groups_per_shard=3)
    index, reader = Index.open(path, BYTES), Reader(path)
    assert len(index) == 50
    assert [shard.rows for shard in index.manifest.shards] == [12, 12, 12, 12, 2]
    for i in [*range(50), 3, 49, 0]:
        sample = make_sample(i)
        assert reader.read(i, text=True, items=True) == sample
        meta = index.meta(i, "name", item_counts)
        text = text_tokens(sample, BYTES)
        assert (meta.id, meta.source, meta.text_tokens) == (i, "name", len(text.ids))
        assert [(item.at, item.size) for item in meta.items] == [
            (at, item.size) for at, item in zip(text.items, sample.items, strict=True)
        ]
        assert all((m.tokens, m.rows) == item_counts("image", m.size) for m in meta.items)
        assert meta.bytes == len(sample.text.encode()) + sum(len(item.data) for item in sample.items)
        assert len(tokenize(reader.read(i, text=True, items=False), meta, BYTES)[0]) == length(meta)
    with pytest.raises(IndexError):
        index.meta(50, "name", item_counts)
    with pytest.raises(IndexError):
        reader.read(-1, text=True, items=True)


def test_targets_null_and_empty_are_kept_apart(tmp_path):
    samples = [Sample("a", "text", (), None), Sample("b", "text", (), ()), Sample("c", "text", (), ((0, 2),))]
    with DatasetWriter(tmp_path / "set", BYTES) as writer:
        for sample in samples:
            writer.add(sample)
    reader = Reader(tmp_path / "set")
    assert [reader.read(i, text=True, items=False) for i in range(3)] == samples


def test_row_groups_are_full_but_the_last(tmp_path):
    path = write_dataset(tmp_path / "set", count=50, rows_per_group=4, groups_per_shard=3)
    groups = []
    for file in sorted(path.glob("*.parquet")):
        metadata = pq.ParquetFile(file).metadata
        groups += [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        assert metadata.row_group(0).column(0).compression == "UNCOMPRESSED"
    assert groups == [4] * 12 + [2]


@pytest.mark.parametrize("batch", [7, 50])
def test_index_batches(tmp_path, monkeypatch, batch):
    monkeypatch.setattr("dataloader.writer.INDEX_BATCH_ROWS", batch)
    index = Index.open(write_dataset(tmp_path / "set"))
    for i in (49, 0, 6, 7, 13, 14):
        assert index.meta(i, "s", item_counts).text_tokens == len(text_tokens(make_sample(i), BYTES).ids)


@pytest.mark.parametrize(
    "sample, message",
    [
        (Sample("n", f"a{PLACEHOLDER}"), "'n' has 1 placeholders .* and 0 items"),
        (Sample("n", "a", (image_item(8, 8),)), "'n' has 0 placeholders .* and 1 items"),
        (Sample("n", ""), "'n' has no text"),
        (Sample("", "text"), "'text' has an empty id"),
        (Sample("n", "a\ud800"), "'n': its text is not valid Unicode"),
        (Sample("n", "abc", (), ((2, 2),)), r"target span \[2, 2\)"),
        (Sample("n", "abc", (), ((0, 4),)), r"target span \[0, 4\)"),
        (Sample("n", "abc", (), ((-1, 2),)), r"target span \[-1, 2\)"),
        (Sample("n", "abc", (), ((1, 3), (0, 1))), r"target span \[0, 1\)"),
        (Sample("n", "abc", (), ((0, 2), (1, 3))), r"target span \[1, 3\)"),
        (
            Sample("n", PLACEHOLDER, (Item("image", "gif", (8, 8), b"x"),)),
            "'n', item 0: unknown format 'gif'",
        ),
        (Sample("n", PLACEHOLDER, (Item("image", "png", (8, 0), b"x"),)), r"size \(8, 0\)"),
        (Sample("n", PLACEHOLDER, (Item("image", "png", (8,), b"x"),)), r"size \(8,\)"),
        (Sample("n", PLACEHOLDER, (Item("sonar", "raw", (), b"x"),)), r"size \(\)"),
        (Sample("n", PLACEHOLDER, (Item("image", "png", (8, 8), b""),)), "has no bytes"),
    ],
)
def test_a_bad_sample_is_named(sample, message):
    with pytest.raises(DataError, match=message):
        validate_sample(sample)


def test_a_modality_of_the_users_own_is_accepted(tmp_path):
    sample = Sample("n", PLACEHOLDER, (Item("sonar", "raw", (5, 6, 7), b"ping"),))
    with DatasetWriter(tmp_path / "set", BYTES) as writer:
        writer.add(sample)
    assert Reader(tmp_path / "set").read(0, text=True, items=True) == sample
    assert (
        Index.open(tmp_path / "set").meta(0, "s", lambda modality, size: (size[0], size[1])).items[0].rows
        == 6
    )


def test_missing_and_truncated_files_are_named(tmp_path):
    path = write_dataset(tmp_path / "set")
    shard = path / "shard-00001.parquet"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(
        DataError, match=rf"shard-00001.parquet is {len(whole) - 10} bytes: .* {len(whole)} bytes"
    ):
        Index.open(path)
    with pytest.raises(DataError, match=r"shard-00001.parquet, row group 0: cannot be read"):
        Reader(path, ranged=False).read(12, text=True, items=False)
    shard.unlink()
    with pytest.raises(DataError, match=r"shard-00001.parquet is missing"):
        Index.open(path)
    with pytest.raises(DataError, match=r"shard-00001.parquet, row group 2"):
        Reader(path).read(20, text=True, items=False)
    shard.write_bytes(whole)
    (path / "index.arrow").write_bytes(b"")
    with pytest.raises(DataError, match=r"index.arrow is 0 bytes"):
        Index.open(path)
    (path / "index.arrow").unlink()
    with pytest.raises(DataError, match=r"index.arrow is missing"):
        Index.open(path)


def test_another_version_tokenizer_or_manifest_is_refused(tmp_path):
    path = write_dataset(tmp_path / "set")
    with pytest.raises(DataError, match=r"built with tokenizer 'bytes', the model uses 'bpe'"):
        Index.open(path, Other())
    manifest = json.loads((path / "dataset.json").read_text())
    for change, message in (
        ({"format_version": 4}, "format_version is 4, this version reads 1 to 3"),
        ({"format_version": 3}, "vocabularies"),
        ({"num_samples": 49}, "num_samples 49"),
        ({"surprise": 1}, "surprise"),
    ):
        (path / "dataset.json").write_text(json.dumps(manifest | change))
        with pytest.raises(DataError, match=message):
            Index.open(path)
    (path / "dataset.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        Index.open(path)
    with pytest.raises(DataError, match="is not a dataset"):
        Index.open(tmp_path / "nothing")


def flip(file, old, new):
    data = file.read_bytes()
    assert data.count(old) == 1
    file.write_bytes(data.replace(old, new))


def test_damaged_bytes_are_found_and_texts_do_not_read_items(tmp_path):
    path = tmp_path / "set"
    payload = b"payload-of-an-item" * 1000
    with DatasetWriter(path, BYTES, rows_per_group=2) as writer:
        for i in range(4):
            writer.add(Sample(f"n{i}", PLACEHOLDER, (Item("sonar", "raw", (1,), b"%d" % i + payload),)))
    flip(path / "shard-00000.parquet", b"3payload", b"3PAYLOAD")  # in row group 1
    for ranged in (True, False):
        reader = Reader(path, ranged=ranged)
        read_around_damage(reader, payload)
    assert reader.files.bytes_read > 2 * len(payload)


def read_around_damage(reader, payload):
    assert reader.read(3, text=True, items=False).id == "n3"
    assert 0 < reader.files.bytes_read < 1000
    assert reader.read(0, text=False, items=True).items[0].data == b"0" + payload
    with pytest.raises(DataError, match=r"shard-00000.parquet, row group 1"):
        reader.read(3, text=False, items=True)


def test_the_cache_is_bounded_and_saves_reads(tmp_path):
    path = write_dataset(tmp_path / "set")
    files = SharedFiles()
    reader = Reader(path, files, ranged=False)
    for i in (0, 1, 2, 3, 0):
        reader.read(i, text=True, items=True)
    once = files.bytes_read
    reader.read(4, text=True, items=True)
    assert files.bytes_read > once
    files = SharedFiles(cache_bytes=1)
    small = Reader(path, files, ranged=False)
    for i in (0, 4, 0, 4):
        small.read(i, text=True, items=False)
    groups = files.bytes_read
    small.read(0, text=True, items=False)
    small.read(4, text=True, items=False)
    assert files.bytes_read == groups * 3 // 2  # each of the four reads before fetched its group again
    with pytest.raises(IndexError):
        small.read(50, text=True, items=False)
    files.close()
    assert files.cached_bytes == 0


def test_all_sources_share_one_bound(tmp_path):
    paths = [write_dataset(tmp_path / f"set{n}") for n in range(5)]
    most = 20_000

    def held(paths):
        files = SharedFiles(cache_bytes=most)
        readers = [Reader(path, files, ranged=False) for path in paths]
        for i in range(50):
            for reader in readers:
                assert reader.read(i, text=True, items=True) == make_sample(i)
                assert files.cached_bytes <= most
        return files.cached_bytes

    assert most / 2 < held(paths) <= 1.2 * held(paths[:1])


@pytest.mark.parametrize("ranged", [True, False])
def test_a_reader_is_shared_between_threads(tmp_path, ranged):
    reader = Reader(write_dataset(tmp_path / "set"), SharedFiles(cache_bytes=4000), ranged)
    wrong = []

    def work(step):
        for k in range(200):
            i = k * step % 50
            if reader.read(i, text=True, items=True) != make_sample(i):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(step,)) for step in (1, 7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def overwrite(path, *samples):
    with DatasetWriter(path, BYTES, overwrite=True) as writer:
        for sample in samples:
            writer.add(sample)


def test_a_build_that_fails_leaves_the_good_dataset(tmp_path):
    path = write_dataset(tmp_path / "set", count=5)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(DataError, match="exists"):
        write_dataset(path, count=3)
    with pytest.raises(DataError, match="'bad'"):
        overwrite(path, Sample("good", "text"), Sample("bad", PLACEHOLDER))
    with pytest.raises(DataError, match="no sample"):
        overwrite(path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["set"]
    overwrite(path, Sample("new", "text"))
    assert Reader(path).read(0, text=True, items=False).id == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["set"]


KILLED = """
import sys
from dataloader.format import Sample
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
with DatasetWriter(sys.argv[1], ByteTokenizer(), 2, 2, overwrite=True) as writer:
    for i in range(10**9):
        writer.add(Sample(str(i), "text"))
        if i == 100:
            print("writing", flush=True)
"""


def test_a_killed_build_leaves_the_good_dataset_and_the_next_one_succeeds(tmp_path):
    path = write_dataset(tmp_path / "set", count=5)
    environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[2]))
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, env=environment
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"writing\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert (tmp_path / "set.partial").is_dir()
    assert len(Index.open(path)) == 5
    assert not verify_dataset(path, BYTES, {"image": decode_image}).problems
    with DatasetWriter(path, BYTES, overwrite=True) as writer:
        writer.add(Sample("new", "text"))
    assert len(Index.open(path)) == 1
    assert not (tmp_path / "set.partial").exists()


def test_a_replacement_cut_between_its_renames_is_healed(tmp_path):
    path = write_dataset(tmp_path / "set", count=5)
    path.rename(tmp_path / "set.old")
    assert is_intact(path, "", BYTES)
    assert len(Index.open(path)) == 5


def test_a_linked_dataset_is_replaced_where_it_is(tmp_path):
    (tmp_path / "disk").mkdir()
    write_dataset(tmp_path / "disk" / "set", count=5)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "set")
    overwrite(tmp_path / "link", Sample("new", "text"))
    assert len(Index.open(tmp_path / "link")) == 1
    assert (tmp_path / "link").is_symlink()
    assert [file.name for file in (tmp_path / "disk").iterdir()] == ["set"]


def test_only_datasets_are_ever_replaced(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    write_dataset(home, count=5)  # an empty folder will do
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years")
    with pytest.raises(DataError, match="is not a dataset"), DatasetWriter(precious, BYTES, overwrite=True):
        pass
    assert (precious / "thesis.tex").read_text() == "years"


def test_is_intact(tmp_path):
    path = tmp_path / "set"
    assert not is_intact(path, "r", BYTES)
    with DatasetWriter(path, BYTES, recipe="r") as writer:
        writer.add(Sample("a", "text"))
    assert is_intact(path, "r", BYTES)
    with pytest.raises(DataError, match="another dataset"):
        is_intact(path, "other", BYTES)
    with pytest.raises(DataError, match="another dataset"):
        is_intact(path, "r", Other())
    (path / "shard-00000.parquet").unlink()
    with pytest.raises(DataError, match="is missing"):
        is_intact(path, "r", BYTES)


def test_verify_counts_by_reason(tmp_path):
    path = tmp_path / "set"
    with DatasetWriter(path, BYTES) as writer:
        writer.add(make_sample(2))
        torn = image_item(8, 8).data[:40]
        writer.add(Sample("torn", PLACEHOLDER, (Item("image", "png", (8, 8), torn),)))
        writer.add(Sample("own", PLACEHOLDER, (Item("sonar", "raw", (1,), b"x"),)))
    report = verify_dataset(path, BYTES, {"image": decode_image})
    assert (report.samples, report.items) == (3, 4)
    assert report.problems == {"undecodable": 1}
    assert "torn" in report.examples[0]
    assert report.not_decoded == {"sonar": 1}

    class Half(ByteTokenizer):
        def encode(self, text):
            whole = super().encode(text)
            kept = (np.arange(len(whole.ids)) % 2 == 0) | (whole.ids == self.item)
            return Encoding(*(column[kept] for column in whole))

    assert verify_dataset(path, Half(), {}).problems == {"miscounted": 1}


def test_reading_one_meta_is_cheap(tmp_path):
    index = Index.open(write_dataset(tmp_path / "set", count=300, rows_per_group=32))

    def once():
        begin = time.process_time()
        for i in range(300):
            index.meta(i, "s", item_counts)
        return (time.process_time() - begin) / 300

    assert min(once() for _ in range(5)) < 20e-6


def everything(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_a_dataset_without_hashes_is_read_and_given_them(tmp_path):
    path = write_dataset(tmp_path / "set")
    before = everything(path)
    without_hashes(path)
    assert Index.open(path).manifest.hash is None
    assert Reader(path).read(49, text=True, items=True) == make_sample(49)
    report = verify_dataset(path, BYTES, {"image": decode_image})
    assert (report.problems, report.hashed) == ({}, False)
    assert add_hashes(path)
    assert everything(path) == before  # what the writer had written, to the byte
    assert not add_hashes(path)
    assert verify_dataset(path, BYTES, {}).hashed


def test_a_changed_file_is_found_by_its_hash(tmp_path):
    path = tmp_path / "set"
    with DatasetWriter(path, BYTES) as writer:
        writer.add(Sample("a", "a label"))
        writer.add(Sample("b", "text"))
    index = path / "index.arrow"
    whole = index.read_bytes()
    at = whole.index((7).to_bytes(4, "little") + (4).to_bytes(4, "little"))
    index.write_bytes(whole[:at] + (6).to_bytes(4, "little") + whole[at + 4 :])  # tokens of a label
    with pytest.raises(DataError, match=r"index.arrow: it was changed"):
        Index.open(path)
    assert verify_dataset(path, BYTES, {}).problems == {"changed": 1, "miscounted": 1}
    index.write_bytes(whole)
    other = tmp_path / "other"
    with DatasetWriter(other, BYTES) as writer:
        writer.add(Sample("a", "a lapel"))
        writer.add(Sample("b", "text"))
    shutil.copy(other / "shard-00000.parquet", path)  # as large, and sound in itself
    report = verify_dataset(path, BYTES, {})
    assert report.problems == {"changed": 1, "misplaced": 1}
    assert "shard-00000.parquet: its hash is" in report.examples[0]


def test_an_index_that_is_cut_under_its_map_is_an_error_not_a_signal(tmp_path):
    path = write_dataset(tmp_path / "set")
    index = Index.open(path)
    os.truncate(path / "index.arrow", 0)
    with pytest.raises(DataError, match=r"index.arrow is 0 bytes, and was \d+ when it was opened"):
        index.meta(3, "s", item_counts)
    with pytest.raises(DataError, match=r"index.arrow is 0 bytes"):
        index.lengths(np.array([1, 2]), RememberedCounts(item_counts), 100, "drop")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "../secret.arrow"}, "no name of a file beside it"),
        ({"file": "/dev/zero"}, "no name of a file beside it"),
        ({"file": ".."}, "no name of a file beside it"),
        ({"file": 3}, "3 is no name"),
        ({"rows": "many"}, "rows of index.arrow is 'many'"),
        ({"bytes": -1}, "bytes of index.arrow is -1"),
        ({"hash": ""}, "hash of index.arrow is ''; format 2 has 32 hex"),
        ({"hash": "g" * 32}, "hash of index.arrow is 'g"),
    ],
)
def test_a_strangers_manifest_names_files_of_its_folder_alone(tmp_path, change, message):
    path = write_dataset(tmp_path / "set", count=5)
    manifest = json.loads((path / "dataset.json").read_text())
    manifest["index"] |= change
    (path / "dataset.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=message):
        Index.open(path)


def test_a_lock_server_that_does_not_answer_ends_a_build(tmp_path, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr("dataloader.locks.ANSWER_S", 0.1)
    monkeypatch.setattr("dataloader.locks.fcntl.flock", lambda *_: never.wait())
    try:
        with (
            pytest.raises(DataError, match=r"said in 0\.1 s whether .*/index\.arrow is locked: mend"),
            DatasetWriter(tmp_path / "set", BYTES),
        ):
            pass
    finally:
        never.set()
    assert not list(tmp_path.iterdir())


def test_of_two_builds_of_a_dataset_the_second_is_refused(tmp_path):
    path = tmp_path / "set"
    with DatasetWriter(path, BYTES) as first:
        first.add(Sample("a", "text"))
        for overwriting in (False, True):
            with (
                pytest.raises(DataError, match=r"set.partial: another build of this dataset is under way"),
                DatasetWriter(path, BYTES, overwrite=overwriting),
            ):
                pass
        assert not is_intact(path, "", BYTES)
        first.add(Sample("b", "text"))
    assert [file.name for file in tmp_path.iterdir()] == ["set"]
    assert not verify_dataset(path, BYTES, {}).problems
    assert len(Index.open(path)) == 2
