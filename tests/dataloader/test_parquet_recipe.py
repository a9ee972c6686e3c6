"""Parquet files of others, read where they lie, against the same samples as a dataset of their own."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_samples import image_bytes, item_counts, make_sample

from dataloader.format import PLACEHOLDER, DataError, Item, Sample, UnreadableError
from dataloader.index import Index
from dataloader.shared_files import SharedFiles
from dataloader.sources.build import build_index
from dataloader.sources.reader import PlacedReader
from dataloader.tokenizer import ByteTokenizer
from dataloader.verify import verify_dataset
from dataloader.writer import DatasetWriter

BYTES = ByteTokenizer()
SAMPLES = [make_sample(i) for i in range(50)]
RECIPE = {"name": "parquet", "text": "caption", "image": "images", "id": "key"}
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write(file: Path, samples: list[Sample], kind: pa.DataType, **keys) -> None:
    structs = pa.types.is_struct(kind.value_type)
    images = [
        [{"bytes": item.data, "path": None} if structs else item.data for item in sample.items]
        for sample in samples
    ]
    columns = {
        "key": [sample.id for sample in samples],
        "images": pa.array(images, kind),
        "caption": [sample.text for sample in samples],
        "score": [0.5] * len(samples),
    }
    file.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), file, **keys)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (pa.list_(STRUCT), {"compression": "snappy", "row_group_size": 7}),
        (pa.large_list(pa.large_binary()), {"compression": "zstd", "row_group_size": 1}),
        (pa.list_(pa.binary()), {"compression": "none"}),
    ],
)
def test_an_index_of_parquet_is_the_dataset_of_the_same_samples(tmp_path, kind, keys):
    for number, first in enumerate(range(0, 50, 20)):
        write(tmp_path / "source" / f"{number}.parquet", SAMPLES[first : first + 20], kind, **keys)
    with DatasetWriter(tmp_path / "own", BYTES) as writer:
        for sample in SAMPLES:
            writer.add(sample)
    assert build_index(tmp_path / "source", tmp_path / "index", RECIPE)
    placed, prepared = Index.open(tmp_path / "index", BYTES), Index.open(tmp_path / "own", BYTES)
    assert placed.manifest.totals == prepared.manifest.totals
    reader = PlacedReader(tmp_path / "index")
    for i, sample in enumerate(SAMPLES):
        assert placed.meta(i, "s", item_counts) == prepared.meta(i, "s", item_counts)
        assert reader.read(i, True, True) == replace(sample, id=f"{i // 20}.parquet/{sample.id}")
        for k, item in enumerate(sample.items):
            assert reader.read(i, False, (k,)).items == (item,)
    assert not verify_dataset(tmp_path / "index", BYTES, {}).problems


def test_images_and_recordings_stand_before_the_text(tmp_path):
    picture = image_bytes(8, 16)
    rows = {"text": ["one", f"a {PLACEHOLDER} b"], "image": [{"bytes": picture, "path": "a.png"}] * 2}
    pq.write_table(pa.table({**rows, "image": pa.array(rows["image"], STRUCT)}), tmp_path / "t.parquet")
    assert build_index(tmp_path / "t.parquet", tmp_path / "index", {"name": "parquet", "image": "image"})
    reader = PlacedReader(tmp_path / "index")
    item = Item("image", "png", (8, 16), picture)
    assert reader.read(0, True, True) == Sample("t.parquet/0", PLACEHOLDER + "one", (item,))
    assert reader.read(1, True, True) == Sample("t.parquet/1", f"a {PLACEHOLDER} b", (item,))


def test_texts_are_read_without_images_and_groups_once(tmp_path):
    write(tmp_path / "s" / "t.parquet", SAMPLES, pa.list_(STRUCT), row_group_size=10)
    assert build_index(tmp_path / "s", tmp_path / "index", RECIPE)
    files = SharedFiles()
    reader = PlacedReader(tmp_path / "index", files)
    for i in range(10):
        reader.read(i, True, False)
    texts = files.bytes_read
    assert texts < 2 * sum(len(sample.text.encode()) for sample in SAMPLES[:10])
    for i in range(10):
        reader.read(i, False, True)
    assert files.bytes_read < texts + 1.2 * sum(len(item.data) for s in SAMPLES[:10] for item in s.items)


def test_what_is_wrong_in_a_file_is_told_by_reason(tmp_path):
    picture = image_bytes(8, 16)
    images = [
        {"bytes": picture},
        None,
        {"bytes": None, "path": "http://x/a.png"},
        {"bytes": b"no"},
        *[{"bytes": picture}] * 3,
    ]
    table = {
        "text": ["good", "a", "b", "c", None, "same", "no id"],
        "image": pa.array(images, STRUCT),
        "id": ["g", "a", "b", "c", "d", "g", None],
    }
    source = tmp_path / "source"
    source.mkdir()
    pq.write_table(pa.table(table), source / "a.parquet")
    pq.write_table(pa.table({"text": ["x"], "id": ["x"]}), source / "b.parquet")
    pq.write_table(
        pa.table({"text": [1], "image": pa.array([{"bytes": picture}], STRUCT), "id": ["y"]}),
        source / "c.parquet",
    )
    urls = pa.table({"text": ["x"], "image": ["http://x/a.png"], "id": ["z"]})
    pq.write_table(urls, source / "d.parquet")
    content = (source / "a.parquet").read_bytes()
    (source / "e.parquet").write_bytes(content[: len(content) // 2])
    assert build_index(source, tmp_path / "index", {"name": "parquet", "image": "image", "id": "id"})
    lines = [json.loads(line) for line in (tmp_path / "index" / "left_out.jsonl").read_text().splitlines()]
    assert [(line["file"], line["key"], line["reason"]) for line in lines] == [
        *(("a.parquet", "a", "null"), ("a.parquet", "b", "null"), ("a.parquet", "c", "bad item")),
        *(("a.parquet", "d", "null"), ("a.parquet", "g", "repeated key"), ("a.parquet", "None", "null")),
        *(("b.parquet", "", "another schema"), ("c.parquet", "", "another schema")),
        *(("d.parquet", "", "another schema"), ("e.parquet", "", "damaged file")),
    ]
    assert "by path alone: http://x/a.png" in lines[1]["detail"]
    assert lines[8]["detail"] == "its column 'image' is string"
    assert len(Index.open(tmp_path / "index")) == 1


@pytest.mark.parametrize("recipe", ["parquet", "shards"])
def test_a_disk_that_fails_ends_an_index_and_leaves_out_nothing(tmp_path, monkeypatch, recipe):
    source = tmp_path / "source"
    source.mkdir()
    pq.write_table(pa.table({"text": ["a"]}), source / "0.parquet")

    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(f"dataloader.recipes.{recipe}.pq.ParquetFile", fail)
    with pytest.raises(OSError, match="Input/output error"):
        build_index(source, tmp_path / "index", recipe)


def test_another_file_under_its_index_is_found(tmp_path):
    write(tmp_path / "s" / "t.parquet", SAMPLES, pa.list_(STRUCT), row_group_size=10)
    size = (tmp_path / "s" / "t.parquet").stat().st_size
    assert build_index(tmp_path / "s", tmp_path / "index", RECIPE)
    write(tmp_path / "s" / "t.parquet", SAMPLES[::-1], pa.list_(STRUCT), row_group_size=10)
    with open(tmp_path / "s" / "t.parquet", "ab") as file:
        file.truncate(size)
    if (tmp_path / "s" / "t.parquet").stat().st_size < size:
        with open(tmp_path / "s" / "t.parquet", "ab") as file:
            file.write(b" " * (size - file.tell()))
    reader = PlacedReader(tmp_path / "index")
    for i in range(50):
        if SAMPLES[i] != SAMPLES[::-1][i]:
            with pytest.raises(UnreadableError):
                reader.read(i, True, True)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"caption": ["x"] * 50}, "it has no column 'images'"),
        ({"images": [3] * 50, "caption": ["x"] * 50}, "its column 'images' is int64"),
        ({"images": [[b"x"]] * 50, "caption": [3] * 50}, "its column 'caption' is int64"),
    ],
)
def test_a_file_of_another_schema_under_its_index_is_named(tmp_path, columns, says):
    file = tmp_path / "s" / "t.parquet"
    write(file, SAMPLES, pa.list_(STRUCT))
    assert build_index(tmp_path / "s", tmp_path / "index", RECIPE)
    reader = PlacedReader(tmp_path / "index")
    assert reader.read(0, True, True).text == SAMPLES[0].text  # the file is known to be the one
    reader.files.close()
    pq.write_table(pa.table(columns), file)
    text = "caption" in says
    with pytest.raises(UnreadableError, match=rf"t.parquet is another file: {says}") as error:
        reader.read(2, text, not text)
    assert error.value.name == "t.parquet/id-2"


def test_a_recipe_without_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="text must name the column"):
        build_index(tmp_path, tmp_path / "index", {"name": "parquet", "text": ""})
    with pytest.raises(DataError, match=r"no file .parquet among the 0"):
        build_index(tmp_path, tmp_path / "index", "parquet")
