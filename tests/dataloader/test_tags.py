"""Tags of samples that lie elsewhere: whatever recipe finds them, a tag's rows are those that carry it."""

import io
import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataloader.format import DataError
from dataloader.manifest import check_files, read_manifest
from dataloader.sources.build import build_index
from dataloader.sources.reader import PlacedReader
from dataloader.tags import TAGS, TagRows, rows_with, tags_of

OF = [["cat", "indoors"], None, "dog", ["cat"], [], ["dog", "cat"]]
"""Of six samples, in two files."""


def write_tars(folder: Path) -> None:
    folder.mkdir()
    for file in range(2):
        with tarfile.open(folder / f"{file}.tar", "w") as tar:
            for n in range(3):
                at = 3 * file + n
                said = {"tags": OF[at]} if OF[at] is not None else {"other": 1}
                for kind, data in (("txt", f"text {at}".encode()), ("json", json.dumps(said).encode())):
                    member = tarfile.TarInfo(f"{at}.{kind}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def write_parquet(folder: Path) -> None:
    folder.mkdir()
    for file in range(2):
        own = [of if isinstance(of, list) or of is None else [of] for of in OF[3 * file : 3 * file + 3]]
        texts = [f"text {3 * file + n}" for n in range(3)]
        pq.write_table(pa.table({"text": texts, "labels": own}), folder / f"{file}.parquet")


RECIPES = {
    "webdataset": (write_tars, {"name": "webdataset", "tags": "tags"}),
    "parquet": (write_parquet, {"name": "parquet", "tags": "labels"}),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_tag_has_the_rows_that_carry_it(tmp_path, name, jobs):
    write, recipe = RECIPES[name]
    write(tmp_path / "data")
    build_index(tmp_path / "data", tmp_path / "index", recipe, jobs=jobs)
    manifest, reader = read_manifest(tmp_path / "index"), PlacedReader(tmp_path / "index")
    check_files(tmp_path / "index", manifest)
    texts = {
        tag: [
            reader.read(int(row), text=True, items=False).text
            for row in rows_with(tmp_path / "index", manifest, tag)
        ]
        for tag in ("cat", "dog", "indoors")
    }
    assert texts == {
        "cat": ["text 0", "text 3", "text 5"],
        "dog": ["text 2", "text 5"],
        "indoors": ["text 0"],
    }
    with pytest.raises(DataError, match=r"tag:bird: no sample of .* carries it; there are cat, dog, indoors"):
        rows_with(tmp_path / "index", manifest, "bird")


def test_an_index_without_tags_has_no_file_of_them_and_says_how_to_have_it(tmp_path):
    write_tars(tmp_path / "data")
    build_index(tmp_path / "data", tmp_path / "index", "webdataset")
    manifest = read_manifest(tmp_path / "index")
    assert not (tmp_path / "index" / TAGS).exists()
    assert "tags" not in json.loads((tmp_path / "index" / "dataset.json").read_text())["place"]
    with pytest.raises(DataError, match="have no tags: index them with the recipe's key tags"):
        rows_with(tmp_path / "index", manifest, "cat")


def test_what_is_no_tag_leaves_its_sample_out(tmp_path):
    write_parquet(tmp_path / "data")
    pq.write_table(pa.table({"text": ["a"], "labels": [3]}), tmp_path / "data" / "9.parquet")
    build_index(tmp_path / "data", tmp_path / "index", RECIPES["parquet"][1])
    assert read_manifest(tmp_path / "index").num_samples == len(OF)
    lines = (tmp_path / "index" / "left_out.jsonl").read_text().splitlines()
    left_out = [json.loads(line) for line in lines]
    assert [(of["file"], of["reason"]) for of in left_out] == [("9.parquet", "bad sample")]


def index_of_members(folder: Path, members: list[tuple[str, bytes]]) -> None:
    (folder / "data").mkdir()
    with tarfile.open(folder / "data" / "0.tar", "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    build_index(folder / "data", folder / "index", RECIPES["webdataset"][1])


def test_tags_that_are_nested_for_ever_are_told_and_end_nothing(tmp_path):
    index_of_members(tmp_path, [("a.txt", b"text"), ("a.json", b"[" * 9999), ("b.txt", b"text")])
    left_out = json.loads((tmp_path / "index" / "left_out.jsonl").read_text())
    assert (left_out["key"], left_out["reason"]) == ("a", "bad sample")
    assert read_manifest(tmp_path / "index").num_samples == 1


def test_two_members_of_tags_are_told_and_neither_counts(tmp_path):
    tags = b'{"tags": ["cat"]}'
    members = [("a.txt", b"text"), ("a.json", tags), ("a.json", tags), ("b.txt", b"text"), ("b.json", tags)]
    index_of_members(tmp_path, members)
    left_out = json.loads((tmp_path / "index" / "left_out.jsonl").read_text())
    assert (left_out["key"], left_out["reason"]) == ("a", "repeated member")
    assert rows_with(tmp_path / "index", read_manifest(tmp_path / "index"), "cat").tolist() == [0]


def test_rows_that_no_sample_has_are_refused(tmp_path):
    write_tars(tmp_path / "data")
    build_index(tmp_path / "data", tmp_path / "index", RECIPES["webdataset"][1])
    manifest = read_manifest(tmp_path / "index")
    rows = TagRows()
    rows.add({"cat": [0, 6]}, 0)
    rows.write(tmp_path / "index" / TAGS)
    with pytest.raises(DataError, match="rows of cat are not those of 6 samples; index anew"):
        rows_with(tmp_path / "index", manifest, "cat")


def test_tags_are_texts():
    assert tags_of(None) == () == tags_of([])
    assert tags_of("a") == ("a",)
    assert tags_of(["b", "a", "b"]) == ("b", "a")
    for wrong in (3, {"a": 1}, [1], [""], ""):
        with pytest.raises(DataError, match="its tags are"):
            tags_of(wrong)
