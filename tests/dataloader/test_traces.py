from math import log

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataloader.format import DataError
from dataloader.tokens import ItemMeta, SampleMeta, length
from dataloader.trace import describe, generate
from dataloader.trace_file import read_trace, write_trace

NAMES = ("balanced", "longtail", "shift")


def test_a_trace_is_read_back(tmp_path):
    trace = [
        SampleMeta(0, "a", 5, (ItemMeta("image", 8, 2, 0, ()), ItemMeta("audio", 4, 1, 5, ())), 77, 1),
        SampleMeta(3, "b", 9, (), 9),
    ]
    write_trace(tmp_path / "t.parquet", trace)
    assert read_trace(tmp_path / "t.parquet") == trace


def test_an_unreadable_trace_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none.parquet is not a readable trace"):
        read_trace(tmp_path / "none.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"bad.parquet is not a readable trace"):
        read_trace(tmp_path / "bad.parquet")


def write(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


def test_a_table_of_text_tokens_is_a_trace(tmp_path):
    own = write(tmp_path / "t.parquet", text_tokens=[3, 0], other=["x", "y"], items=[[], [{
        "modality": "image", "tokens": 9, "size": None
    }, {"modality": "audio", "tokens": None, "size": [32_000, 16_000]}]])  # fmt: skip
    items = (ItemMeta("image", 9, 3, 0, ()), ItemMeta("audio", 0, 0, 0, (32_000, 16_000)))
    assert read_trace(own) == [SampleMeta(0, "trace", 3, (), 0), SampleMeta(1, "trace", 0, items, 0)]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"length": [5], "id": [1]},
            "a trace without lengths: it has the columns length, id, and needs text_t",
        ),
        ({"text_tokens": pa.array([], pa.int32())}, "a trace without rows"),
        ({"text_tokens": [7, -5]}, r"row 1: text_tokens is -5, and must be from 0 to \d+: mend the row"),
        ({"text_tokens": [7, None]}, "row 1: text_tokens is None"),
        ({"text_tokens": [2**31]}, "row 0: text_tokens is 2147483648"),
        ({"text_tokens": ["7"]}, "column text_tokens is of type string, and must be of integers"),
        ({"text_tokens": [0]}, "row 0: a sample without text and items: leave it out"),
        ({"text_tokens": [1], "items": [3]}, "column items is of type int64, and must be a list of structs"),
        ({"text_tokens": [1], "items": [[{"modality": "image"}]]}, "modality and either size or tokens"),
        ({"text_tokens": [1], "items": [[{"modality": "", "tokens": 4}]]}, "item 0: its modality is ''"),
        ({"text_tokens": [1], "items": [[{"modality": 3, "tokens": 4}]]}, "item 0: its modality is 3"),
        (
            {"text_tokens": [1], "items": [[{"modality": "image", "size": 8}]]},
            "item 0: size is 8: give a list",
        ),
        (
            {"text_tokens": [1], "items": [[{"modality": "image", "tokens": -4}]]},
            r"tokens \(it has no size\) is",
        ),
        ({"text_tokens": [1], "items": [[{"modality": "image", "size": [8, -8]}]]}, "item 0: size is -8"),
        ({"text_tokens": [1], "items": [[{"modality": "image", "tokens": 4, "rows": 0}]]}, "rows is 0"),
        ({"text_tokens": [1], "items": [[{"modality": "image", "tokens": 4, "at": 2}]]}, "items stand after"),
    ],
)
def test_what_is_no_trace_is_refused_with_what_is_there_and_what_is_needed(tmp_path, columns, message):
    with pytest.raises(DataError, match=message) as caught:
        read_trace(write(tmp_path / "mine.parquet", **columns))
    assert "mine.parquet" in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_tokens", [131_072, 1_000, 16])
def test_generated_traces_are_deterministic_and_within_bounds(name, max_tokens):
    trace = generate(name, 400, 3, max_tokens)
    assert trace == generate(name, 400, 3, max_tokens)
    assert max_tokens == 16 or trace != generate(name, 400, 4, max_tokens)
    assert len(trace) == 400
    assert all(2 <= length(meta) <= max_tokens for meta in trace)
    for meta in trace:
        assert all(0 <= item.at <= meta.text_tokens and item.rows >= 1 for item in meta.items)
        assert [item.at for item in meta.items] == sorted(item.at for item in meta.items)
    for source in {meta.source for meta in trace}:
        ids = [meta.id for meta in trace if meta.source == source]
        assert ids == list(range(len(ids)))


def spread(trace):
    return float(np.std([log(length(meta)) for meta in trace]))


def test_the_three_regimes():
    balanced, longtail, shift = (generate(name, 4_000, 0) for name in NAMES)
    assert spread(balanced) < 0.3
    assert spread(longtail) > 1.2
    half = len(shift) // 2
    assert [meta.phase for meta in shift] == [0] * half + [1] * half

    def video(part):
        return describe(part)["modalities"].get("video", {"share": 0.0})["share"]

    assert video(shift[:half]) == 0.0
    assert video(shift[half:]) > 0.5


def test_documents_have_the_published_means():
    documents = [meta for meta in generate("longtail", 20_000, 1) if meta.source == "document"]
    assert np.mean([len(meta.items) for meta in documents]) == pytest.approx(353 / 141, rel=0.03)
    assert np.mean([meta.text_tokens for meta in documents]) == pytest.approx(115_000 / 141, rel=0.06)
    clips = [meta for meta in generate("longtail", 20_000, 1) if meta.source == "clip"]
    seconds = np.mean([meta.items[0].rows for meta in clips]) / 299
    assert seconds == pytest.approx(760_000 * 3600 / 234e6, rel=0.06)


def test_describe():
    trace = [SampleMeta(i, "s", 10, (ItemMeta("image", 40, 10, 0, ()),) * (i % 2), 5) for i in range(4)]
    about = describe(trace)
    assert about["samples"] == 4
    assert about["length"] == {"mean": 16.5, "min": 11, "p10": 11, "p50": 22, "p90": 22, "p99": 22, "max": 22}
    assert about["modalities"]["image"]["items"] == 2
    assert about["modalities"]["image"]["share"] == pytest.approx(20 / 66)
    assert about["text_share"] == pytest.approx(40 / 66)
    assert about["phases"] == {0: 4}
    assert describe([])["samples"] == 0


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"unknown trace 'x': known are balanced"):
        generate("x", 5, 0)
    with pytest.raises(ValueError, match="num_samples 0"):
        generate("shift", 0, 0)
