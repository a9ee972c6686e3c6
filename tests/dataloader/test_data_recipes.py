import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from dataset_samples import image_bytes, write_dataset
from sklearn.datasets import load_digits
from small import without_hashes

from dataloader.decode import decode_image
from dataloader.format import PLACEHOLDER, DataError, Item, Sample
from dataloader.index import Index
from dataloader.reader import Reader
from dataloader.recipes.from_jsonl import build_from_jsonl
from dataloader.recipes.quickstart import build_quickstart
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from omni.commands import data

BYTES = ByteTokenizer()
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    out = tmp_path_factory.mktemp("quickstart") / "data"
    begin = time.process_time()
    assert all(build_quickstart(out, BYTES).values())
    assert time.process_time() - begin < 30
    return out


def everything(path):
    reader = Reader(path)
    return [reader.read(i, text=True, items=True) for i in range(reader.manifest.num_samples)]


def test_no_heldout_digit_is_ever_trained_on(quickstart):
    digits = load_digits()
    labels = {
        (image * 255 // 16).astype("uint8").tobytes(): label
        for image, label in zip(digits.images.astype(int), digits.target, strict=True)
    }
    seen = {}
    for part, count in (("train", 16_000), ("heldout", 400)):
        strips = everything(quickstart / f"strips_{part}")
        assert len(strips) == count
        assert Counter(s.items[0].size for s in strips) == {(8, 8 * k): count // 8 for k in range(1, 9)}
        seen[part] = set()
        for strip in strips:
            pixels = decode_image(strip.items[0])
            assert pixels.shape == (*strip.items[0].size, 1)
            tiles = [pixels[:, x : x + 8, 0].tobytes() for x in range(0, pixels.shape[1], 8)]
            assert strip.text == PLACEHOLDER + " ".join(WORDS[labels[tile]] for tile in tiles)
            seen[part] |= set(tiles)
    assert not seen["train"] & seen["heldout"]
    assert len(seen["train"]) == 1_437
    assert len(seen["heldout"]) > 350


def test_documents_are_split_by_file_and_never_repeated(quickstart):
    train, heldout = (everything(quickstart / f"docs_{part}") for part in ("train", "heldout"))
    texts = [doc.text for doc in train + heldout]
    assert len(set(texts)) == len(texts)
    assert all(len(text) > 40 for text in texts)
    files = [{doc.id.split("#")[0] for doc in part} for part in (train, heldout)]
    assert not files[0] & files[1]
    assert 1 / 24 < len(files[1]) / len(files[0] | files[1]) < 1 / 6
    assert not any(
        "site-packages" in file or "/test" in file or "idlelib" in file for file in files[0] | files[1]
    )


def test_building_again_is_a_no_op_that_another_seed_is_not(quickstart):
    before = {file: file.stat().st_mtime_ns for file in quickstart.rglob("*")}
    assert build_quickstart(quickstart, BYTES) == dict.fromkeys(
        ("strips_train", "strips_heldout", "docs_train", "docs_heldout"), False
    )
    assert {file: file.stat().st_mtime_ns for file in quickstart.rglob("*")} == before
    with pytest.raises(DataError, match="holds another dataset"):
        build_quickstart(quickstart, BYTES, seed=1)


def test_only_what_is_missing_is_built_and_it_is_the_same(quickstart, tmp_path):
    out = tmp_path / "copy"
    out.mkdir()
    for name in ("strips_train", "docs_train", "docs_heldout"):
        (out / name).symlink_to(quickstart / name)
    told = []
    built = build_quickstart(out, BYTES, tell=told.append)
    assert told == [f"building strips_heldout in {out} ..."], "seconds pass: it says of what"
    assert [name for name, new in built.items() if new] == ["strips_heldout"]
    for file in (quickstart / "strips_heldout").iterdir():
        assert file.read_bytes() == (out / "strips_heldout" / file.name).read_bytes()


def write_jsonl(folder, *lines):
    (folder / "a.png").write_bytes(image_bytes(16, 24))
    (folder / "b.jpg").write_bytes(image_bytes(8, 8, "JPEG"))
    (folder / "c.raw").write_bytes(b"ping")
    file = folder / "mine.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return file


def test_jsonl(tmp_path):
    file = write_jsonl(
        tmp_path,
        {"id": "1", "text": f"look {PLACEHOLDER}{PLACEHOLDER}", "items": [
            {"modality": "image", "path": "a.png"}, {"modality": "image", "path": "b.jpg"}]},
        "",
        {"id": "2", "text": "question? answer", "targets": [[10, 16]]},
        {"id": "3", "text": PLACEHOLDER, "items": [
            {"modality": "sonar", "path": "c.raw", "format": "raw", "size": [4, 1]}]},
    )  # fmt: skip
    assert build_from_jsonl(file, tmp_path / "set", BYTES)
    samples = everything(tmp_path / "set")
    assert [sample.id for sample in samples] == ["1", "2", "3"]
    assert [(item.format, item.size) for item in samples[0].items] == [("png", (16, 24)), ("jpeg", (8, 8))]
    assert samples[1].targets == ((10, 16),)
    assert samples[2].items == (Item("sonar", "raw", (4, 1), b"ping"),)
    told: list[str] = []
    assert not build_from_jsonl(file, tmp_path / "set", BYTES, tell=told.append)
    assert told == []
    built = (tmp_path / "set" / "dataset.json").stat().st_mtime
    os.utime(tmp_path / "b.jpg", (built + 1, built + 1))
    assert not build_from_jsonl(file, tmp_path / "set", BYTES, tell=told.append)
    assert len(told) == 1
    assert f"1 files are newer than {tmp_path / 'set'}, such as {tmp_path / 'b.jpg'}" in told[0]
    with open(file, "a") as lines:
        lines.write('{"id": "4", "text": "more"}\n')
    with pytest.raises(DataError, match="another dataset"):
        build_from_jsonl(file, tmp_path / "set", BYTES)
    assert build_from_jsonl(file, tmp_path / "set", BYTES, overwrite=True)
    assert len(Index.open(tmp_path / "set")) == 4


@pytest.mark.parametrize("lines", [[], ["", ""], ["{"]])
def test_a_file_that_holds_no_sample_is_named_itself(tmp_path, lines):
    file = write_jsonl(tmp_path, *lines)
    with pytest.raises(DataError, match=rf"^{file}: it holds no sample") as caught:
        build_from_jsonl(file, tmp_path / "set", BYTES, skip_bad=1)
    assert ("but the 1 bad ones" in str(caught.value)) == (lines == ["{"])
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "Expecting"),
        ("[]", "not a JSON object"),
        ({"id": 1, "text": "t"}, '"id" is 1'),
        ({"id": "x"}, '"text" is None'),
        ({"id": "x", "text": "t", "itmes": []}, r"unknown keys \['itmes'\]"),
        ({"id": "x", "text": "t", "items": {}}, '"items" is {}'),
        ({"id": "x", "text": "t", "items": ["a.png"]}, "an item is not a JSON object"),
        ({"id": "x", "text": PLACEHOLDER, "items": [{"path": "a.png"}]}, 'needs a "modality"'),
        (
            {"id": "x", "text": PLACEHOLDER, "items": [{"modality": "image", "path": "no.png"}]},
            "no.png: No such",
        ),
        ({"id": "x", "text": PLACEHOLDER, "items": [{"modality": "image", "path": "c.raw"}]}, "not an image"),
        (
            {"id": "x", "text": PLACEHOLDER, "items": [{"modality": "sonar", "path": "c.raw"}]},
            'must state "format"',
        ),
        ({"id": "x", "text": PLACEHOLDER}, "1 placeholders .* 0 items"),
        ({"id": "x", "text": "t", "targets": [1, 2]}, '"targets" is'),
        ({"id": "x", "text": "t", "targets": [[0, 9]]}, r"span \[0, 9\)"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_left(tmp_path, line, message):
    file = write_jsonl(tmp_path, {"id": "1", "text": "fine"}, line)
    with pytest.raises(DataError, match=rf"mine.jsonl:2: .*{message}"):
        build_from_jsonl(file, tmp_path / "set", BYTES)
    assert not (tmp_path / "set").exists()
    assert not (tmp_path / "set.partial").exists()


def omni_data(*arguments):
    parser = argparse.ArgumentParser("omni data")
    data.add_arguments(parser)
    return data.run(parser.parse_args([str(argument) for argument in arguments]))


def test_command_build_inspect_verify(quickstart, tmp_path, capsys):
    assert omni_data("build", "--recipe", "quickstart", "--out", quickstart) == 0
    said = capsys.readouterr()
    assert (said.out.count("nothing to do"), said.err) == (4, "")
    assert omni_data("inspect", quickstart / "strips_heldout") == 0
    assert "400 samples" in " ".join(capsys.readouterr().out.split())  # a long path may end its line early
    assert omni_data("verify", quickstart) == 0
    assert capsys.readouterr().out.count("all good") == 4
    asked = {"id": "asked", "text": "why? so", "targets": [[5, 7]]}
    file = write_jsonl(tmp_path, {"id": "[red]1", "text": "fine [/blue]"}, asked)
    assert omni_data("build", "--from-jsonl", file, "--out", tmp_path / "set") == 0
    assert capsys.readouterr().err == f"building {tmp_path / 'set'} from {file} ...\n"
    assert omni_data("inspect", tmp_path / "set") == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    cells = [[cell.strip() for cell in row] for row in rows[-2:]]
    assert [row[3:5] for row in cells] == [["fine [/blue]", "all"], ["why? so", "so"]]


def test_command_errors(tmp_path, capsys):
    assert omni_data("build", "--from-jsonl", tmp_path / "no.jsonl", "--out", tmp_path / "set") == 2
    assert "no.jsonl" in capsys.readouterr().err
    assert omni_data("inspect", tmp_path / "no") == 2
    assert "is not a dataset" in capsys.readouterr().err
    assert omni_data("build", "--recipe", "quickstart", "--out", tmp_path, "--tokenizer", "x") == 2
    assert "unknown tokenizer 'x'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as usage:
        omni_data("build", "--out", tmp_path)
    assert usage.value.code == 2


def test_command_verify_fails_on_a_bad_item_and_a_lost_shard(tmp_path, capsys):
    with DatasetWriter(tmp_path / "bad", BYTES) as writer:
        writer.add(Sample("torn", PLACEHOLDER, (Item("image", "png", (8, 8), image_bytes(8, 8)[:40]),)))
    assert omni_data("verify", tmp_path / "bad") == 1
    assert "1 undecodable" in capsys.readouterr().out
    (write_dataset(tmp_path / "lost") / "shard-00001.parquet").unlink()
    assert omni_data("verify", tmp_path / "lost") == 1
    assert "shard-00001.parquet is missing" in capsys.readouterr().out


def test_command_trace(tmp_path, capsys):
    assert omni_data("trace", "generate", "shift", "--out", tmp_path / "t.parquet", "--num", 100) == 0
    capsys.readouterr()
    assert omni_data("trace", "describe", tmp_path / "t.parquet") == 0
    assert json.loads(capsys.readouterr().out)["phases"] == {"0": 50, "1": 50}
    assert omni_data("trace", "describe", tmp_path / "no.parquet") == 2
    assert "no.parquet" in capsys.readouterr().err


def test_help_imports_nothing_heavy():
    code = (
        "import argparse, sys; from omni.commands import data; p = argparse.ArgumentParser();"
        "data.add_arguments(p); p.format_help();"
        "print(sorted({'torch', 'numpy', 'pyarrow', 'sklearn', 'rich'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_all_bad_lines_are_named_at_once_or_left_out_by_choice(tmp_path, capsys):
    file = write_jsonl(
        tmp_path,
        {"id": "1", "text": "fine"},
        "{",
        {"id": "1", "text": "the same name"},
        {"id": "2", "text": PLACEHOLDER, "items": [{"modality": "image", "path": "torn.jpg"}]},
        {"id": "3", "text": "\ud800"},
        "[" * 100_000,
        {"id": "3", "text": "fine, and the first of its name that is"},
    )
    (tmp_path / "torn.jpg").write_bytes(image_bytes(64, 64, "JPEG")[:-200])
    arguments = ("build", "--from-jsonl", file, "--out", tmp_path / "set")
    assert omni_data(*arguments) == omni_data(*arguments, "--skip-bad", 4) == 2
    first, second = capsys.readouterr().err.split("omni data build: ")[1:]
    assert "5 of the first 7 lines are bad, more than the 0 that may be left out (--skip-bad)" in first
    for text in (
        "mine.jsonl:2: Expecting",
        "mine.jsonl:3: its id '1' is that of line 1",
        "torn.jpg: the image cannot be decoded: Premature end of JPEG file",
        "mine.jsonl:5: sample '3': its text is not valid Unicode",
        "mine.jsonl:6: RecursionError",
    ):
        assert text in first
        assert text in second
    assert not (tmp_path / "set").exists()
    assert omni_data(*arguments, "--skip-bad", 5) == 0
    assert capsys.readouterr().err.count("left out ") == 5
    assert [sample.id for sample in everything(tmp_path / "set")] == ["1", "3"]


def test_a_build_stops_after_as_many_bad_lines_as_it_shows(tmp_path):
    file = write_jsonl(tmp_path, *["{"] * 100)
    with pytest.raises(DataError, match="20 of the first 20 lines are bad"):
        build_from_jsonl(file, tmp_path / "set", BYTES)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/dev/zero", "/dev/zero: lies outside"),
        ("../outside.png", "outside.png: lies outside .*--root"),
        ("link.png", "link.png: lies outside"),
        ("pipe", "pipe: is no regular file"),
        (".", "is no regular file|Is a directory"),
    ],
)
def test_a_strangers_jsonl_reads_files_of_its_folder_alone(tmp_path, path, message):
    (tmp_path / "outside.png").write_bytes(image_bytes(8, 8))
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    line = {"id": "1", "text": PLACEHOLDER, "items": [{"modality": "image", "path": path}]}
    file = write_jsonl(folder, line)
    with pytest.raises(DataError, match=message):
        build_from_jsonl(file, tmp_path / "set", BYTES)
    if "png" in path:
        assert build_from_jsonl(file, tmp_path / "set", BYTES, root=tmp_path)


def test_control_characters_are_shown_and_not_obeyed(tmp_path, capsys):
    file = write_jsonl(tmp_path, {"id": "a\x1b[2J", "text": "b\x1b]0;c\x07 d\u202e"})
    assert omni_data("build", "--from-jsonl", file, "--out", tmp_path / "set") == 0
    assert omni_data("inspect", tmp_path / "set") == 0
    out = capsys.readouterr().out
    assert not set(out) & set("\x1b\x07\u202e")
    assert "\\x1b[2J" in out


def test_command_hash(tmp_path, capsys):
    path = write_dataset(tmp_path / "set")
    without_hashes(path)
    assert omni_data("verify", path) == 0
    assert f"omni data hash {path}" in capsys.readouterr().out
    assert omni_data("hash", tmp_path) == omni_data("hash", path) == omni_data("verify", path) == 0
    assert "hashes written" in (out := capsys.readouterr().out)
    assert "has hashes; omni data verify" in out
