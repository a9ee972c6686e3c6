import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from dataset_samples import write_dataset
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dataloader.format import INDEX_SCHEMA, PLACEHOLDER, Item, Sample, SampleError
from dataloader.index import Index
from dataloader.item_counts import REFUSED, RememberedCounts
from dataloader.manifest import DataFile, DatasetTotals, Frame, Manifest, TextForm
from dataloader.tokenizer import ByteTokenizer
from dataloader.tokens import fit, length
from dataloader.writer import DatasetWriter


def counts(modality: str, size: tuple[int, ...]) -> tuple[int, int]:
    """Items of more than one row in three dimensions are refused, those of ten pixels too."""
    pixels = int(np.prod(size))
    if (len(size) == 3 and size[0] > 1) or pixels == 10:
        raise SampleError(f"{modality} {size} is refused")
    return 4 * pixels, pixels


def item(modality: str, *size: int) -> Item:
    return Item(modality, "png" if modality == "image" else "raw", size, b"x")


ITEMS = [
    item("image", 1, 2),
    item("image", 2, 1),
    item("image", 5, 2),
    item("sonar", 3),
    item("sonar", 1, 2),
    item("sonar", 1, 2, 2),
    item("sonar", 2, 2, 2),
    item("sonar", 2**31 - 1),
    item("sonar", 1, 2**31 - 1, 1),
]


def written(path: Path, samples: list[list[Item]], turns: bool = False) -> Index:
    """A dataset of samples with such items; with turns, every third sample has none."""
    form = TextForm(frame=Frame(turns=turns))
    with DatasetWriter(path, ByteTokenizer(), text=form) as writer:
        for number, items in enumerate(samples):
            text = "".join(f"{k}{PLACEHOLDER}" for k in range(len(items))) + "x" * (1 + number % 7)
            ends = [at for at, character in enumerate(text, 1) if character != PLACEHOLDER]
            own = tuple(ends[number % 2 :: 2]) if number % 3 else ()
            writer.add(Sample(f"s{number}", text, tuple(items), turns=own if turns else None))
    return Index.open(path)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.sampled_from(ITEMS), max_size=4), min_size=1, max_size=20),
    st.sampled_from([1, 3, 50]),
    st.integers(1, 25),
    st.sampled_from(["drop", "truncate", "truncate", "error"]),
    st.booleans(),
    st.randoms(),
)
def test_lengths_are_those_of_the_samples_one_by_one(
    tmp_path_factory, samples, batch, budget, policy, turns, random
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dataloader.writer.INDEX_BATCH_ROWS", batch)
        index = written(tmp_path_factory.mktemp("data") / "set", samples, turns)
    ids = [random.randrange(len(samples)) for _ in range(random.randrange(40))]
    remembered = RememberedCounts(counts)
    for _ in range(2):
        lengths = index.lengths(np.array(ids, dtype=np.int64), remembered, budget, policy)
        assert lengths.dtype == np.int64
        for i, tokens in zip(ids, lengths.tolist(), strict=True):
            meta = index.meta(i, "s", counts)
            assert index.meta(i, "s", remembered) == meta
            assert [item.size for item in meta.items] == [item.size for item in samples[i]]
            kept = fit(meta, budget, "drop" if policy == "error" else policy)
            assert tokens == (length(kept) if kept else 0)
        found = index.item_tokens(np.array(ids, dtype=np.int64), remembered)
        for name, (places, tokens) in found.items():
            assert list(zip(places.tolist(), tokens.tolist(), strict=True)) == [
                (place, item.tokens)
                for place, i in enumerate(ids)
                for item in index.meta(i, "s", counts).items
                if item.modality == name
            ]
        assert set(found) == set(index.manifest.modalities)


def test_a_sample_that_is_not_there_is_an_error(tmp_path):
    index = written(tmp_path / "set", [[], []])
    for wrong in ([0, 2], [-1, 0]):
        with pytest.raises(IndexError, match=rf"has 2 samples, there is no sample {wrong[wrong[0] == 0]}"):
            index.lengths(np.array(wrong), RememberedCounts(counts), 9, "drop")


def test_an_encoder_is_asked_once_for_items_of_equal_size(monkeypatch):
    asked: Counter = Counter()

    def counting(modality, size):
        asked[modality, size] += 1
        return counts(modality, size)

    remembered = RememberedCounts(counting)
    heights, widths = (np.array(column, dtype=np.int32) for column in ([1, 5, 1, 2], [2, 2, 2, 1]))
    for _ in range(3):
        assert remembered.rows("image", [heights, widths], 4).tolist() == [2, REFUSED, 2, 2]
        assert remembered("image", (1, 2)) == (8, 2)
        with pytest.raises(SampleError, match="is refused"):
            remembered("image", (5, 2))
    assert asked == {("image", (1, 2)): 1, ("image", (5, 2)): 1, ("image", (2, 1)): 1}
    monkeypatch.setattr("dataloader.item_counts._MOST_ANSWERS", 3)
    for width in range(20):  # forgets now and then
        row = np.full(2, width, dtype=np.int32)
        assert (
            remembered.rows("image", [np.ones(2, dtype=np.int32), row], 2).tolist()
            == [REFUSED if width == 10 else width] * 2
        )
        assert remembered("image", (1, 2)) == (8, 2)
        assert sum(map(len, remembered._rows.values())) <= len(remembered._answers) <= 3


@settings(deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda dims: st.lists(
            st.lists(
                st.sampled_from([1, 2, 2**16, 2**16 + 1, 2**30, 2**31 - 1]), min_size=dims, max_size=dims
            ),
            min_size=1,
            max_size=30,
        )
    )
)
@example([[2**16, 1, 1], [2**30, 1, 1]])  # alike in their last 64 bits
def test_sizes_are_told_apart(sizes):
    def rows_of(size):
        return sum(value * (3 + place) for place, value in enumerate(size))

    remembered = RememberedCounts(lambda modality, size: (0, rows_of(size)))
    columns = [np.array(column, dtype=np.int32) for column in zip(*sizes, strict=True)]
    for _ in range(2):
        assert remembered.rows("image", columns, len(sizes)).tolist() == [rows_of(size) for size in sizes]


def test_an_index_whose_numbers_are_not_in_the_map_is_refused(tmp_path):
    """What a foreign writer may make: compressed numbers are nowhere in the file."""
    path = write_dataset(tmp_path / "set")
    manifest = Index.open(path).manifest
    batch = pa.ipc.open_file(str(path / manifest.index.file)).get_batch(0)
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_file(str(tmp_path / "index.arrow"), INDEX_SCHEMA, options=options) as file:
        file.write_batch(batch)
    content = pa.memory_map(str(tmp_path / "index.arrow")).read_buffer()
    with pytest.raises(ValueError, match="compressed"):
        Index(tmp_path, manifest, content)


def test_lengths_of_thousands_of_samples_are_known_in_milliseconds(tmp_path):
    """Of a set with many record batches, in each of which a few samples are asked for."""
    rng = np.random.default_rng(0)
    rows, batches, sizes = 1_024, 256, 3_000
    with pa.ipc.new_file(str(tmp_path / "index.arrow"), INDEX_SCHEMA) as out:
        number = rng.integers(0, sizes, (2 * rows, 1), dtype=np.int32)
        size = np.concatenate([1 + number % 60, 1 + number // 60], axis=1)
        lists = pa.ListArray.from_arrays(np.arange(0, 4 * rows + 1, 2, dtype=np.int32), size.reshape(-1))
        zeros = np.zeros(2 * rows, dtype=np.int16)
        kind = INDEX_SCHEMA.field("items").type
        items = pa.StructArray.from_arrays(
            [pa.array(zeros), pa.array(zeros.astype(np.int32)), lists], fields=list(kind.value_type)
        )
        batch = [
            pa.array(np.full(rows, 100, dtype=np.int32)),
            pa.array(np.zeros(rows, dtype=np.int64)),
            pa.ListArray.from_arrays(np.arange(0, 2 * rows + 1, 2, dtype=np.int32), items, type=kind),
        ]
        for _ in range(batches):
            out.write_batch(pa.RecordBatch.from_arrays(batch, schema=INDEX_SCHEMA))
    total = rows * batches
    file = DataFile("index.arrow", (tmp_path / "index.arrow").stat().st_size, total)
    manifest = Manifest(1, "", "", total, 32, (), file, ("image",), DatasetTotals(0, 0, {}))
    index = Index(tmp_path, manifest, pa.memory_map(str(tmp_path / "index.arrow")).read_buffer())
    remembered = RememberedCounts(lambda modality, size: (4 * size[0], size[0]))
    ids = rng.integers(0, total, 8_192)

    def once() -> float:
        begin = time.process_time()
        index.lengths(ids, remembered, 150, "truncate")
        return time.process_time() - begin

    assert min(once() for _ in range(10)) < 20e-3
