"""Documents of texts and images in turn, read where they lie, against a dataset of the same documents."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_samples import image_bytes, image_item, item_counts

from dataloader.format import PLACEHOLDER, Sample, UnreadableError
from dataloader.index import Index
from dataloader.sources.build import build_index
from dataloader.sources.reader import PlacedReader
from dataloader.tokenizer import ByteTokenizer
from dataloader.verify import verify_dataset
from dataloader.writer import DatasetWriter

BYTES = ByteTokenizer()
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def document(i: int) -> tuple[list[str | None], Sample]:
    """Texts with None where an image stands, and the sample that they make; images may come first, last,
    and one after the other.
    """
    texts = [[f"é{i} ", None, "two"], [None, "one", None, None], ["no image", "at all"], [None]][i % 4]
    items = tuple(image_item(8, 8 * (1 + (i + k) % 5), seed=i + k) for k in range(texts.count(None)))
    return texts, Sample(f"{i}", "".join(PLACEHOLDER if t is None else t for t in texts), items)


DOCUMENTS = [document(i) for i in range(30)]


def listed(sample: Sample, texts: list[str | None], make) -> list:
    items = iter(sample.items)
    return [None if text is not None else make(next(items), place) for place, text in enumerate(texts)]


@pytest.mark.parametrize("form", ["bytes", "structs", "paths"])
def test_an_index_of_documents_is_the_dataset_of_the_same_documents(tmp_path: Path, form: str) -> None:
    source = tmp_path / "source"
    (source / "images").mkdir(parents=True)

    def on_disk(item, place: int, number: int) -> str:
        name = f"{number}-{place}.png"
        (source / "images" / name).write_bytes(item.data)
        return name

    images = []
    for number, (texts, sample) in enumerate(DOCUMENTS):
        makes = {
            "bytes": lambda item, place: item.data,
            "structs": lambda item, place: {"bytes": item.data, "path": "a.png"},
            "paths": lambda item, place, number=number: on_disk(item, place, number),
        }
        images.append(listed(sample, texts, makes[form]))
    kind = {"bytes": pa.binary(), "structs": STRUCT, "paths": pa.string()}[form]
    table = {"texts": [texts for texts, _ in DOCUMENTS], "images": pa.array(images, pa.list_(kind))}
    pq.write_table(pa.table(table), source / "d.parquet", row_group_size=7)
    with DatasetWriter(tmp_path / "own", BYTES) as writer:
        for _, sample in DOCUMENTS:
            writer.add(sample)
    folder = {"folder": "images"} if form == "paths" else {}
    assert build_index(source, tmp_path / "index", {"name": "interleaved", **folder})
    placed, prepared = Index.open(tmp_path / "index", BYTES), Index.open(tmp_path / "own", BYTES)
    reader = PlacedReader(tmp_path / "index")
    for i, (_, sample) in enumerate(DOCUMENTS):
        mine, theirs = (index.meta(i, "s", item_counts) for index in (placed, prepared))
        assert replace(mine, bytes=0) == replace(theirs, bytes=0)
        assert reader.read(i, True, True) == replace(sample, id=f"d.parquet/{sample.id}")
        for k, item in enumerate(sample.items):
            assert reader.read(i, False, (k,)).items == (item,)
    assert not verify_dataset(tmp_path / "index", BYTES, {}).problems
    if form == "paths":
        (source / "images" / "1-2.png").unlink()
        reader = PlacedReader(tmp_path / "index")
        assert reader.read(1, False, (0,)).items == DOCUMENTS[1][1].items[:1]
        with pytest.raises(UnreadableError, match=r"1-2.png is not there any more"):
            reader.read(1, False, True)


def test_what_is_not_taken_is_told(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "a.png").write_bytes(image_bytes(8, 8))
    rows = {
        "good": (["x", None], [None, "a.png"]),
        "url": (["x", None], [None, "https://x/a.jpg"]),
        "both": (["x", "y"], [None, "a.png"]),
        "neither": (["x", None], [None, None]),
        "short": (["x", None], ["a.png"]),
        "null": (None, [None]),
        "gone": ([None], ["b.png"]),
        "out": ([None], ["../b.png"]),
        "spelt": ([f"x{PLACEHOLDER}", None], [None, "a.png"]),
        "empty": ([], []),
    }
    table = {
        "id": list(rows),
        "texts": pa.array([texts for texts, _ in rows.values()], pa.list_(pa.string())),
        "images": pa.array([images for _, images in rows.values()], pa.list_(pa.string())),
    }
    pq.write_table(pa.table(table), tmp_path / "s" / "d.parquet")
    assert build_index(tmp_path / "s", tmp_path / "index", {"name": "interleaved", "id": "id"})
    lines = [json.loads(line) for line in (tmp_path / "index" / "left_out.jsonl").read_text().splitlines()]
    assert {line["key"]: line["reason"] for line in lines} == {
        "url": "by URL alone",
        **dict.fromkeys(("both", "neither", "short", "null"), "null"),
        "gone": "no file",
        "out": "outside the root",
        **dict.fromkeys(("spelt", "empty"), "bad sample"),
    }
    assert len(Index.open(tmp_path / "index")) == 1
