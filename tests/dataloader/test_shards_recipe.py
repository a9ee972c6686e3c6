"""Shards of our own datasets, indexed where they lie, against the datasets that they are of."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_samples import item_counts, make_sample
from test_stores import Store, store
from tiny_bpe import write_tokenizer

from dataloader.format import SHARD_SCHEMA, UnreadableError
from dataloader.index import Index
from dataloader.manifest import TextForm
from dataloader.reader import Reader
from dataloader.recipes.from_messages import build_from_messages
from dataloader.shared_files import SharedFiles
from dataloader.sources.build import build_index
from dataloader.sources.reader import PlacedReader
from dataloader.storage import Storage
from dataloader.tokenizer import ByteTokenizer, get_tokenizer
from dataloader.verify import verify_dataset
from dataloader.writer import DatasetWriter

BYTES = ByteTokenizer()
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SAMPLES = [replace(make_sample(i), targets=[None, (), ((0, 3), (4, 6))][i % 3]) for i in range(50)]
assert store  # a fixture


@pytest.fixture
def own(tmp_path: Path) -> Path:
    with DatasetWriter(tmp_path / "own", BYTES, rows_per_group=4, groups_per_shard=3) as writer:
        for sample in SAMPLES:
            writer.add(sample)
    return tmp_path / "own"


def same(index: Path, own: Path) -> None:
    placed, prepared = Index.open(index, BYTES), Index.open(own, BYTES)
    assert placed.manifest.totals == prepared.manifest.totals
    reader, other = PlacedReader(index), Reader(own)
    for i, sample in enumerate(SAMPLES):
        assert placed.meta(i, "s", item_counts) == prepared.meta(i, "s", item_counts)
        found = reader.read(i, True, True)
        assert replace(found, id=found.id.rpartition("/")[2]) == sample == other.read(i, True, True)
        for k in range(len(sample.items)):
            assert reader.read(i, False, (k,)).items == sample.items[k : k + 1]


def test_shards_where_they_lie_are_the_dataset_that_they_are_of(own: Path, tmp_path: Path) -> None:
    assert build_index(own, tmp_path / "index", "shards")
    same(tmp_path / "index", own)
    assert not verify_dataset(tmp_path / "index", BYTES, {}).problems
    files = SharedFiles()
    reader = PlacedReader(tmp_path / "index", files)
    for i in range(50):
        reader.read(i, False, True)
    assert files.bytes_read <= 1.1 * sum(len(item.data) for sample in SAMPLES for item in sample.items)


def test_compressed_shards_are_read_by_their_row_groups(own: Path, tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    for file in sorted(own.glob("*.parquet")):
        pq.write_table(
            pq.read_table(file), tmp_path / "packed" / file.name, compression="zstd", row_group_size=5
        )
    assert build_index(tmp_path / "packed", tmp_path / "index", "shards")
    same(tmp_path / "index", own)


def test_a_dataset_in_a_store_is_trained_on_where_it_lies(own: Path, tmp_path: Path, store: str) -> None:
    Store.store.clear()
    for file in sorted(own.iterdir()):
        Storage.at("teststore://bucket").write(f"set/{file.name}", [file.read_bytes()])
    assert build_index("teststore://bucket/set", tmp_path / "index", "shards")
    same(tmp_path / "index", own)


def test_chats_keep_their_turns_and_others_are_refused(own: Path, tmp_path: Path) -> None:
    keys = {"name": "hf", "path": str(write_tokenizer(tmp_path / "bpe", TEMPLATE))}
    tokenizer = get_tokenizer(keys)
    turns = [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Four."}]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": turns * 2}))
    build_from_messages(tmp_path / "c.jsonl", tmp_path / "chats", tokenizer)
    recipe = {"name": "shards", "chats": True}
    assert build_index(tmp_path / "chats", tmp_path / "index", recipe, keys)
    placed, prepared = (Index.open(tmp_path / name, tokenizer) for name in ("index", "chats"))
    assert placed.manifest.text == prepared.manifest.text != TextForm()
    reader = PlacedReader(tmp_path / "index", tokenizer=tokenizer)
    assert replace(reader.read(0, True, True), id="1") == Reader(tmp_path / "chats").read(0, True, True)
    assert len(placed.meta(0, "s", item_counts).turns) == 2
    with pytest.raises(ValueError, match=r"another schema.*chats: true is not set"):
        build_index(tmp_path / "chats", tmp_path / "other", "shards", keys)
    with pytest.raises(ValueError, match="another schema"):
        build_index(own, tmp_path / "another", recipe, keys)


def test_nulls_and_other_types_are_told_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    rows = {"id": ["a", "b", None], "text": ["one", None, "two"], "targets": [None] * 3, "items": [None] * 3}
    schema = pa.schema([field.with_nullable(True) for field in SHARD_SCHEMA])
    pq.write_table(pa.table(rows, schema), tmp_path / "s" / "a.parquet")
    other = pa.table({**rows, "id": list("abc")}, schema).set_column(1, "text", [[1, 2, 3]])
    pq.write_table(other, tmp_path / "s" / "b.parquet")
    assert build_index(tmp_path / "s", tmp_path / "index", "shards")
    lines = [json.loads(line) for line in (tmp_path / "index" / "left_out.jsonl").read_text().splitlines()]
    assert [(line["file"], line["key"], line["reason"]) for line in lines] == [
        *(("a.parquet", "b", "null"), ("a.parquet", "", "null"), ("b.parquet", "", "damaged file"))
    ]
    assert len(Index.open(tmp_path / "index")) == 1


def test_another_file_under_the_index_of_shards_is_named(own: Path, tmp_path: Path) -> None:
    file = tmp_path / "packed" / "s.parquet"
    file.parent.mkdir()
    table = pq.read_table(own / "shard-00000.parquet")
    pq.write_table(table, file, compression="zstd")
    assert build_index(file.parent, tmp_path / "index", "shards")
    reader = PlacedReader(tmp_path / "index")
    assert reader.read(2, True, True).items == SAMPLES[2].items
    for columns in ({"x": [1] * 12}, {"text": ["x"] * 12, "targets": [None] * 12, "items": [7] * 12}):
        reader.files.close()
        pq.write_table(pa.table(columns), file)
        for text, items in ((True, False), (False, True)):
            with pytest.raises(UnreadableError, match=r"another file|not the one that was indexed"):
                reader.read(2, text, items)
