"""Samples that are indexed and read where they lie, against the same samples as a dataset of their own."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from dataset_samples import image_bytes, image_item, item_counts, make_sample
from PIL import ExifTags, Image
from tars import members_of, write_tar, write_tars
from tiny_bpe import write_tokenizer

from dataloader.decode import decode_image
from dataloader.format import PLACEHOLDER, DataError, Item, Sample, UnreadableError
from dataloader.index import Index
from dataloader.loader import Fetch, Loader
from dataloader.recipes.webdataset import WebDataset
from dataloader.shared_files import SharedFiles
from dataloader.sources.build import build_index
from dataloader.sources.reader import PlacedReader
from dataloader.stream import SourceSpec, Stream
from dataloader.tokenizer import ByteTokenizer, get_tokenizer
from dataloader.tokens import tokenize
from dataloader.verify import verify_dataset
from dataloader.writer import DatasetWriter

BYTES = ByteTokenizer()
SAMPLES = [make_sample(i) for i in range(50)]


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """The samples as a dataset of their own."""
    path = tmp_path_factory.mktemp("own") / "set"
    with DatasetWriter(path, BYTES) as writer:
        for sample in SAMPLES:
            writer.add(sample)
    return path


@pytest.fixture
def tars(tmp_path) -> Path:
    return write_tars(tmp_path / "tars", SAMPLES, each=12)


def index_of(source, out: Path, **more) -> list[str]:
    """Index tar files, and return what was told."""
    told: list[str] = []
    assert build_index(source, out, "webdataset", tell=told.append, **more)
    return told


def left_out(index: Path) -> dict[str, str]:
    """What an index says was left out: the reasons by key."""
    lines = [json.loads(line) for line in (index / "left_out.jsonl").read_text().splitlines()]
    return {line["key"]: line["reason"] for line in lines}


def keys_of(index: Path) -> list[str]:
    reader = PlacedReader(index)
    return [reader.read(i, False, False).id.partition("/")[2] for i in range(reader.manifest.num_samples)]


@pytest.mark.parametrize("batch_rows", [7, 65_536])
def test_an_index_of_tars_is_the_dataset_of_the_same_samples(own, tars, tmp_path, batch_rows):
    index_of(tars, tmp_path / "index", batch_rows=batch_rows)
    placed, prepared = Index.open(tmp_path / "index", BYTES), Index.open(own, BYTES)
    assert len(placed) == len(SAMPLES)
    assert placed.manifest.modalities == prepared.manifest.modalities
    assert placed.manifest.totals == prepared.manifest.totals
    reader = PlacedReader(tmp_path / "index")
    for i, sample in enumerate(SAMPLES):
        assert placed.meta(i, "s", item_counts) == prepared.meta(i, "s", item_counts)
        found = reader.read(i, True, True)
        assert found == replace(sample, id=f"{i // 12:05}.tar/{sample.id}")
        arrays = tokenize(found, placed.meta(i, "s", item_counts), BYTES)
        for mine, theirs in zip(
            arrays, tokenize(sample, prepared.meta(i, "s", item_counts), BYTES), strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)
        for k, item in enumerate(sample.items):
            assert reader.read(i, False, (k,)).items == (item,)
    streams = [
        Stream({"s": SourceSpec(len(index), index.manifest.rows_per_group, 1)}, seed=3).take(0, 500)
        for index in (placed, prepared)
    ]
    np.testing.assert_array_equal(streams[0][1], streams[1][1])
    assert not verify_dataset(tmp_path / "index", BYTES, {}).problems


def test_only_what_is_asked_for_is_read(tars, tmp_path):
    index_of(tars, tmp_path / "index")
    sample = SAMPLES[2]
    for text, items in ((True, False), (False, (1,)), (False, True), (True, True)):
        reader = PlacedReader(tmp_path / "index", SharedFiles())
        found = reader.read(2, text, items)
        payload = len(found.text.encode()) + sum(len(item.data) for item in found.items)
        between = 1536 * (len(found.items) + text - 1)  # heads of members, and what fills their blocks
        assert payload <= reader.files.bytes_read <= payload + between
    assert [len(item.data) for item in sample.items]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_who_scans_changes_nothing(tars, tmp_path):
    for jobs in (1, 3):
        index_of(tars, tmp_path / f"of{jobs}", jobs=jobs)
    one = files_of(tmp_path / "of1")
    assert set(one) >= {"samples.arrow", "files.arrow", "dataset.json", "left_out.jsonl"}
    assert files_of(tmp_path / "of3") == one


SLOW = """
import sys, time
from dataloader.recipes import webdataset
from dataloader.sources.build import build_index

walk = webdataset._walk

def slowly(file, size):
    time.sleep(0.3)
    yield from walk(file, size)

webdataset._walk = slowly
if __name__ == "__main__":
    build_index(sys.argv[1], sys.argv[2], "webdataset")
"""


def test_a_build_that_was_killed_goes_on_where_it_was(tars, tmp_path, monkeypatch):
    index_of(tars, tmp_path / "whole")
    out = tmp_path / "killed"
    (tmp_path / "slow.py").write_text(SLOW)
    build = subprocess.Popen([sys.executable, tmp_path / "slow.py", tars, out])
    parts = out.with_name("killed.partial") / "parts"
    deadline = time.monotonic() + 60
    while not list(parts.glob("*.rows")) and time.monotonic() < deadline:
        time.sleep(0.01)
    build.send_signal(signal.SIGKILL)
    build.wait()
    done = {file: file.stat().st_mtime_ns for file in parts.glob("*.rows")}
    assert 0 < len(done) < 5
    assert not out.exists()
    kept = []
    monkeypatch.setattr("dataloader.sources.build.shutil.rmtree", lambda path: kept.append(path))
    index_of(tars, out)
    monkeypatch.undo()
    (parts,) = kept
    again = {file: file.stat().st_mtime_ns for file in (out / "parts").glob("*.rows")}
    assert {(parts / file.name, again[file]) for file in again} >= set(done.items())
    shutil.rmtree(out / "parts")
    assert files_of(out) == files_of(tmp_path / "whole")


def test_building_again_is_a_no_op_and_another_source_is_refused(tars, tmp_path):
    index_of(tars, tmp_path / "index")
    assert not build_index(tars, tmp_path / "index", "webdataset")
    write_tars(tmp_path / "others", SAMPLES[:3], each=3)
    with pytest.raises(DataError, match=r"is the index of .*/tars by .*asked for .*/others.*--overwrite"):
        build_index(tmp_path / "others", tmp_path / "index", "webdataset")
    with pytest.raises(DataError, match=r"asked for .*caption"):
        build_index(tars, tmp_path / "index", {"name": "webdataset", "text": "caption"})
    write_tar(tars / "00005.tar", members_of(make_sample(99)))
    with pytest.raises(DataError, match="changed, come or gone"):
        build_index(tars, tmp_path / "index", "webdataset")
    index_of(tars, tmp_path / "index", overwrite=True)
    assert len(Index.open(tmp_path / "index")) == len(SAMPLES) + 1


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_names_are_read(tmp_path, kind):
    short = kind == tarfile.USTAR_FORMAT
    name = "a-folder/" * 14 + "n" * 50 if short else "a-folder/" * 30 + "n" * 120 + "é"
    write_tar(tmp_path / "long.tar", members_of(replace(SAMPLES[2], id=name)), kind)
    assert not index_of(tmp_path / "long.tar", tmp_path / "index")[1:]
    assert PlacedReader(tmp_path / "index").read(0, True, True) == replace(SAMPLES[2], id=f"long.tar/{name}")


def test_members_in_any_order_are_the_same_samples(tars, tmp_path):
    samples = SAMPLES[:12]
    members = [member for sample in samples for member in members_of(sample)]
    first = {sample.id: members.index(members_of(sample)[0]) for sample in samples}
    mixed = [members[i] for i in first.values()] + members[::-1]
    mixed = list(dict.fromkeys(mixed))
    write_tar(tmp_path / "mixed" / "00000.tar", mixed)
    index_of(tars / "00000.tar", tmp_path / "one")
    index_of(tmp_path / "mixed", tmp_path / "other")
    one, other = PlacedReader(tmp_path / "one"), PlacedReader(tmp_path / "other")
    assert [one.read(i, True, True) for i in range(12)] == [other.read(i, True, True) for i in range(12)]


def test_ten_images_stand_in_the_order_of_their_numbers(tmp_path):
    items = [image_item(8, 8 * (k + 1), seed=k) for k in range(11)]
    members = [(f"many.{k}.png", item.data) for k, item in enumerate(items)]
    write_tar(tmp_path / "t.tar", [*sorted(members), ("many.txt", b"eleven")])
    index_of(tmp_path, tmp_path / "index")
    found = PlacedReader(tmp_path / "index").read(0, True, True)
    assert found.items == tuple(items)
    assert found.text == PLACEHOLDER * 11 + "eleven"


def test_texts_come_from_json_too(tmp_path):
    said = json.dumps({"caption": f"a {PLACEHOLDER} dog", "url": "…"}).encode()
    bad = {"b": b"{}", "c": b"no json", "d": b'{"caption": 3}', "e": b"[]", "f": b'{"caption": "\xff"}'}
    members = [("a.png", image_bytes(8, 8)), ("a.json", said)]
    members += [(f"{key}.json", content) for key, content in bad.items()]
    write_tar(tmp_path / "t.tar", members)
    recipe = {"name": "webdataset", "text": "json", "key": "caption"}
    assert build_index(tmp_path / "t.tar", tmp_path / "index", recipe)
    assert PlacedReader(tmp_path / "index").read(0, True, False).text == f"a {PLACEHOLDER} dog"
    assert left_out(tmp_path / "index") == dict.fromkeys(bad, "bad sample")


def test_what_is_not_taken_is_told_by_reason_with_its_key(tmp_path):
    picture = image_bytes(8, 8)
    members = [
        *(("good.png", picture), ("good.txt", b"good"), ("good.cls", b"7"), ("README", b"no sample")),
        *(("twice.png", picture), ("twice.png", picture), ("twice.txt", b"twice")),
        *(("no_text.png", picture), ("text.txt", b"alone")),
        *(("not.png", b"not a picture"), ("not.txt", b"x"), ("empty.png", b""), ("empty.txt", b"x")),
        *(("film.mp4", picture), ("film.txt", b"x"), ("latin.txt", b"\xe9"), ("none.txt", b"")),
        *(("places.png", picture), ("places.txt", (PLACEHOLDER * 2).encode())),
        *(("more.0.png", picture), ("more.1.png", picture), ("more.txt", PLACEHOLDER.encode())),
        *(("../out.png", picture), ("../out.txt", b"x"), ("/abs.txt", b"x")),
    ]
    write_tar(tmp_path / "t.tar", members)
    told = index_of(tmp_path, tmp_path / "index")
    assert keys_of(tmp_path / "index") == ["good", "text"]
    assert left_out(tmp_path / "index") == {
        "twice": "repeated member",
        "no_text": "no text",
        "not": "bad item",
        "empty": "bad item",
        "film": "unknown format",
        "latin": "bad sample",
        "none": "bad sample",
        "places": "bad sample",
        "more": "bad sample",
        "../out.png": "outside the archive",
        "../out.txt": "outside the archive",
        "/abs.txt": "outside the archive",
    }
    assert any("2 for 'bad item', such as t.tar/not (.png: " in line for line in told)


def test_links_and_bombs_are_not_taken(tmp_path):
    huge = io.BytesIO()
    Image.new("L", (8, 8)).save(huge, "JPEG")
    bomb = huge.getvalue().replace(b"\x00\x08\x00\x08", (12_000).to_bytes(2, "big") * 2)
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for name, content in (("bomb.jpg", bomb), ("bomb.txt", b"x"), ("ok.txt", b"x"), ("link.txt", b"x")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    index_of(tmp_path, tmp_path / "index")
    assert keys_of(tmp_path / "index") == ["ok"]
    assert left_out(tmp_path / "index") == {"bomb": "bad item", "link": "not a plain file"}


def test_a_tar_that_is_cut_keeps_what_is_whole(tars, tmp_path):
    reader_size = (tars / "00001.tar").stat().st_size
    with tarfile.open(tars / "00001.tar") as tar:
        last = next(m for m in reversed(tar.getmembers()) if m.name.endswith(".png"))
    os.truncate(tars / "00001.tar", last.offset_data + last.size // 2)  # in a member
    with tarfile.open(tars / "00002.tar") as tar:
        third = tar.getmembers()[3]
    os.truncate(tars / "00002.tar", third.offset + 100)  # in a header
    content = bytearray((tars / "00003.tar").read_bytes())
    with tarfile.open(tars / "00003.tar") as tar:
        fifth = tar.getmembers()[5].offset
    content[fifth : fifth + 512] = b"\x01" * 512  # a damaged header
    (tars / "00003.tar").write_bytes(content)
    (tars / "00004.tar").write_bytes(b"")
    (tars / "00005.tar").write_bytes(b"no archive" * 200)
    assert last.offset_data + last.size // 2 < reader_size
    told = index_of(tars, tmp_path / "index")
    lines = [json.loads(line) for line in (tmp_path / "index/left_out.jsonl").read_text().splitlines()]
    whole = {line["file"]: line["reason"] for line in lines if not line["key"]}
    assert whole == {
        "00001.tar": "not a whole archive",
        "00002.tar": "damaged archive",
        "00003.tar": "damaged archive",
        "00004.tar": "not a whole archive",
        "00005.tar": "not a whole archive",
    }
    assert [line["key"] for line in lines if line["reason"] == "cut short"] == [last.name.partition(".")[0]]
    assert len(told) == 1 + len({line["reason"] for line in lines})
    assert not verify_dataset(tmp_path / "index", BYTES, {}).problems


def lost(index: Path) -> dict[str, set[str]]:
    """Load all samples of an index, and return what could not be: what of each, by its name."""
    opened = Index.open(index, BYTES)
    metas = [opened.meta(i, "s", item_counts) for i in range(len(opened))]
    items = tuple(("s", meta.id, k) for meta in metas for k in range(len(meta.items)))
    loader = Loader({"s": PlacedReader(index)}, BYTES, {"image": lambda item: item.data}, num_threads=3)
    loader.submit(0, Fetch(tuple(("s", meta) for meta in metas), items))
    fetched = loader.get(0, 60)
    loader.close()
    assert [len(ids) for ids, _, _ in fetched.texts] == [len(mask) for _, _, mask in fetched.texts]
    found: dict[str, set[str]] = {}
    for failure in fetched.failures:
        found.setdefault(failure.name, set()).add("text" if failure.item is None else str(failure.item))
        if failure.item is None:
            assert not fetched.texts[failure.sample][2].any()
    gone = {place[1:] for place, item in zip(items, fetched.items, strict=True) if item is None}
    assert gone == {(f.sample, f.item) for f in fetched.failures if f.item is not None}
    return found


def expected(file: int) -> dict[str, set[str]]:
    """All of the samples of a file."""
    return {
        f"{file:05}.tar/{sample.id}": {"text", *(str(k) for k in range(len(sample.items)))}
        for sample in SAMPLES[12 * file : 12 * file + 12]
    }


def test_a_file_that_is_gone_or_another_is_found_and_named(tars, tmp_path):
    index = tmp_path / "index"
    index_of(tars, index)
    assert lost(index) == {}
    (tars / "00001.tar").unlink()
    assert lost(index) == expected(1)
    shutil.copy(tars / "00000.tar", tars / "00001.tar")  # of another size
    assert lost(index) == expected(1)
    content = (tars / "00002.tar").read_bytes()
    (tars / "00002.tar").write_bytes(content[512:] + content[:512])  # of the same size
    assert lost(index) == expected(1) | expected(2)
    os.truncate(tars / "00003.tar", 4096)
    assert lost(index) == expected(1) | expected(2) | expected(3)
    report = verify_dataset(index, BYTES, {})
    assert report.problems == {"unreadable": 36}
    assert any("00003.tar has 4096 bytes, and had" in example for example in report.examples) or report


def test_a_file_that_is_cut_while_it_is_read_is_named(tars, tmp_path):
    index_of(tars, tmp_path / "index")
    reader = PlacedReader(tmp_path / "index")
    assert reader.read(0, True, True).text == SAMPLES[0].text
    os.truncate(tars / "00000.tar", 2048)
    with pytest.raises(UnreadableError, match=r"00000.tar: from byte .* it is cut, or another file") as error:
        reader.read(11, True, True)
    assert error.value.name == f"00000.tar/{SAMPLES[11].id}"


def test_an_index_that_leads_out_of_its_root_is_not_followed(tars, tmp_path):
    (tmp_path / "secret.tar").write_bytes((tars / "00000.tar").read_bytes())
    index_of(tars, tmp_path / "index")
    reader = PlacedReader(tmp_path / "index")
    row = reader._table.row(0)
    for name in ("../secret.tar", "/etc/passwd"):
        reader._table.row = lambda number, name=name: {**row, "name": name}
        with pytest.raises(UnreadableError, match="lies outside of"):
            reader.read(0, True, True)


def test_nothing_to_index_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"there is no file .tar among the 1 there"):
        build_index(tmp_path / "empty", tmp_path / "index", "webdataset")
    write_tar(tmp_path / "bad" / "t.tar", [("a.png", b"")])
    with pytest.raises(DataError, match=r"no sample was found: 1 for 'bad item', such as t.tar/a"):
        build_index(tmp_path / "bad", tmp_path / "index", "webdataset")
    assert not (tmp_path / "index").exists()
    for recipe, says in (
        ("webdataset2", "unknown recipe 'webdataset2': known are .*webdataset"),
        ({"name": "webdataset", "txt": 1}, "its keys are text, key"),
        ({"name": "webdataset", "text": "png"}, "must be what a member of text ends with"),
    ):
        with pytest.raises(ValueError, match=says):
            build_index(tmp_path / "bad", tmp_path / "index", recipe)


def test_pictures_lie_as_their_headers_say(tmp_path):
    """Sizes of turned, animated, grey and large-headed pictures, against those of whole files."""
    pixels = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    files: dict[str, bytes] = {}
    for name, kind, keys in (
        (
            "turned",
            "JPEG",
            {"exif": turned},
        ),
        ("profile", "JPEG", {"icc_profile": b"p" * 150_000}),
        ("comment", "JPEG", {"comment": b"c" * 5_000}),
        ("progressive", "JPEG", {"progressive": True}),
        ("png", "PNG", {}),
        ("webp", "WEBP", {}),
        ("webp_lossless", "WEBP", {"lossless": True}),
        ("webp_profile", "WEBP", {"icc_profile": b"p" * 500}),
        ("webp_turned", "WEBP", {"exif": turned}),
        ("png_profile", "PNG", {"icc_profile": np.random.default_rng(1).bytes(90_000)}),
    ):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, kind, **keys)
        files[f"{name}.{kind.lower()}"] = buffer.getvalue()
    members = [m for name, data in files.items() for m in ((name, data), (f"{name.split('.')[0]}.txt", b"x"))]
    write_tar(tmp_path / "t.tar", members)
    assert not index_of(tmp_path, tmp_path / "index")[1:]
    reader = PlacedReader(tmp_path / "index")
    sizes = {
        key: reader.read(i, False, True).items[0].size for i, key in enumerate(keys_of(tmp_path / "index"))
    }
    assert sizes == {name.split(".")[0]: (24, 40) for name in files} | dict.fromkeys(
        ("turned", "webp_turned"), (40, 24)
    )
    assert not verify_dataset(tmp_path / "index", BYTES, {"image": decode_image}).problems


def test_recordings_are_indexed(tmp_path):
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(800, np.float32), 16_000, format="WAV")
    write_tar(tmp_path / "t.tar", [("a.wav", buffer.getvalue()), ("a.txt", b"silence")])
    index_of(tmp_path, tmp_path / "index")
    assert PlacedReader(tmp_path / "index").read(0, False, True).items == (
        Item("audio", "wav", (800, 16_000), buffer.getvalue()),
    )


def test_another_sample_of_the_same_name_in_another_file_is_another_sample(tmp_path):
    for name in ("a", "b"):
        write_tar(tmp_path / "tars" / f"{name}.tar", members_of(Sample("0001", f"of {name}")))
    index_of(tmp_path / "tars", tmp_path / "index")
    reader = PlacedReader(tmp_path / "index")
    assert [reader.read(i, True, True).id for i in (0, 1)] == ["a.tar/0001", "b.tar/0001"]


def test_another_tokenizer_adds_its_counts_and_nothing_else(tars, tmp_path, monkeypatch):
    monkeypatch.setattr("dataloader.sources.recount._ROWS", 16)
    folder = write_tokenizer(tmp_path / "bpe", "")
    both = tmp_path / "both"
    index_of(tars, both, batch_rows=13)
    before = files_of(both)
    hf = {"name": "hf", "path": str(folder), "eos": "<|im_end|>"}
    monkeypatch.setattr(WebDataset, "scan", None)  # no file is scanned again
    index_of(tars, both, tokenizer=hf, batch_rows=13)
    assert not build_index(tars, both, "webdataset", hf)
    assert not build_index(tars, both, "webdataset")
    monkeypatch.undo()
    added = set(files_of(both)) - set(before)
    assert len(added) == 1
    assert {name: files_of(both)[name] for name in before if name != "dataset.json"} == {
        name: content for name, content in before.items() if name != "dataset.json"
    }
    index_of(tars, tmp_path / "alone", tokenizer=hf, batch_rows=13)
    (name,) = added
    assert (tmp_path / "alone" / name).read_bytes() == (both / name).read_bytes()
    tokenizer = get_tokenizer(hf)
    of_hf, of_bytes = Index.open(both, tokenizer), Index.open(both, BYTES)
    assert of_hf.manifest == Index.open(tmp_path / "alone", tokenizer).manifest
    assert (of_hf.manifest.tokenizer, of_bytes.manifest.tokenizer) == ("hf", "bytes")
    assert of_hf.manifest.totals.text_tokens < of_bytes.manifest.totals.text_tokens
    assert of_hf.manifest.hash != of_bytes.manifest.hash
    assert not verify_dataset(both, tokenizer, {}).problems
    with pytest.raises(DataError, match=r"of digest .*add its counts with omni data index"):
        Index.open(both, get_tokenizer({**hf, "eos": "<|im_start|>"}))


def test_one_build_of_a_name_is_under_way_and_leaves_of_others_go(tars, tmp_path):
    out = tmp_path / "set"
    with DatasetWriter(out, BYTES) as writer:
        writer.add(SAMPLES[0])
        with pytest.raises(DataError, match="another build of this index is under way"):
            build_index(tars, out, "webdataset")
    shutil.rmtree(out)
    left = tmp_path / "set.partial"
    left.mkdir()
    (left / "shard-00000.parquet").write_text("of a build that was cut")
    index_of(tars, out)
    assert sorted(file.name.partition("-")[0] for file in out.iterdir()) == [
        *("dataset.json", "files.arrow", "index", "left_out.jsonl", "samples.arrow")
    ]
    assert not left.exists()


def test_files_that_moved_are_found_again_without_a_scan(tars, tmp_path, monkeypatch):
    index_of(tars, tmp_path / "index")
    before = Index.open(tmp_path / "index", BYTES)
    monkeypatch.setattr(WebDataset, "scan", None)
    shutil.move(tars, tmp_path / "elsewhere")
    assert index_of(tmp_path / "elsewhere", tmp_path / "index") == [
        f"{tmp_path / 'index'}: its files are now those of {tmp_path / 'elsewhere'}"
    ]
    assert not build_index(tmp_path / "elsewhere", tmp_path / "index", "webdataset")
    after = Index.open(tmp_path / "index", BYTES)
    assert (repr(after.manifest), after.manifest.hash) == (repr(before.manifest), before.manifest.hash)
    reader = PlacedReader(tmp_path / "index")
    assert [reader.read(i, True, True).items for i in range(50)] == [sample.items for sample in SAMPLES]


def test_a_header_with_one_wrong_byte_ends_the_archive_there(tars, tmp_path):
    with tarfile.open(tars / "00000.tar") as tar:
        fifth = tar.getmembers()[4]
    content = bytearray((tars / "00000.tar").read_bytes())
    content[fifth.offset] ^= 1  # of its name: the checksum tells
    (tars / "00000.tar").write_bytes(content)
    index_of(tars / "00000.tar", tmp_path / "index")
    assert "damaged archive" in left_out(tmp_path / "index").values()
    assert len(Index.open(tmp_path / "index")) < 12
