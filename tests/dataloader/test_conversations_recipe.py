"""Chats in JSON beside their pictures, read where they lie, against a dataset of the same chats."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from dataset_samples import image_bytes
from test_chat_items import FORMS, PARTS
from tiny_bpe import write_tokenizer

from dataloader.format import DataError, UnreadableError
from dataloader.index import Index
from dataloader.reader import Reader
from dataloader.recipes.from_messages import build_from_messages
from dataloader.sources.build import build_index
from dataloader.sources.reader import PlacedReader
from dataloader.tokenizer import get_tokenizer
from dataloader.verify import verify_dataset

LLAVA = {
    "image": "a.png",
    "conversations": [
        {"from": "human", "value": "<image>\nWas ist das? ñ日本"},
        {"from": "gpt", "value": "Ein Strauß."},
    ],
}


@pytest.fixture
def hf(tmp_path) -> dict[str, str]:
    return {"name": "hf", "path": str(write_tokenizer(tmp_path / "bpe", PARTS)), "item": "<image>"}


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for name, width in (("a", 8), ("b", 16)):
        (folder / f"{name}.png").write_bytes(image_bytes(8, width))
    return folder


def chats() -> list[dict]:
    return [{"id": f"chat-{n}", **form} for n, form in enumerate([LLAVA, *FORMS.values(), LLAVA])]


@pytest.mark.parametrize("form", ["lines", "array", "indented array"])
def test_an_index_of_chats_is_the_dataset_of_the_same_chats(source, tmp_path, hf, form):
    tokenizer = get_tokenizer(hf)
    own = source / "own.jsonl"
    own.write_text("".join(json.dumps(chat) + "\n" for chat in chats()))
    build_from_messages(own, tmp_path / "own", tokenizer)
    own.unlink()
    if form == "lines":
        text = "\n".join(json.dumps(chat, ensure_ascii=False) for chat in chats()) + "\n\n"
    else:
        text = json.dumps(chats(), ensure_ascii=False, indent=2 if "indented" in form else None)
    (source / "chats.json").write_text(text)
    assert build_index(source, tmp_path / "index", "conversations", hf)
    placed, prepared = (Index.open(tmp_path / name, tokenizer) for name in ("index", "own"))
    assert placed.manifest.text == prepared.manifest.text
    reader, other = PlacedReader(tmp_path / "index", tokenizer=tokenizer), Reader(tmp_path / "own")
    assert len(placed) == len(prepared) == len(chats())
    for i in range(len(placed)):
        sample = other.read(i, True, True)
        assert reader.read(i, True, True) == replace(sample, id=f"chats.json/{sample.id}")
        mine, theirs = (index.meta(i, "s", lambda modality, size: (4, 3)) for index in (placed, prepared))
        assert replace(mine, bytes=0) == replace(theirs, bytes=0)
        assert len(mine.turns) == len(sample.turns)
    assert not verify_dataset(tmp_path / "index", tokenizer, {}).problems


def left_out(index: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in (index / "left_out.jsonl").read_text().splitlines()]
    return {line["key"]: line["reason"] for line in lines}


def test_what_is_not_taken_is_told(source, tmp_path, hf):
    (tmp_path / "secret.png").write_bytes(image_bytes(8, 8))
    (source / "link.png").symlink_to(tmp_path / "secret.png")
    (source / "bad.png").write_bytes(b"no picture")
    (source / "folder.png").mkdir()
    (source / "loop.png").symlink_to("loop.png")

    def of(path: str, **more) -> dict:
        return {**LLAVA, "image": path, **more}

    given = {
        "good": {**LLAVA, "dataset": "of somebody"},
        "up": of("../secret.png"),
        "abs": of(str(tmp_path / "secret.png")),
        "link": of("link.png"),
        "gone": of("gone.png"),
        "folder": of("folder.png"),
        "long": of("a" * 300),
        "zero": of("a\0.png"),
        "surrogate": of("\ud800.png"),
        "loop": of("loop.png"),
        "data": of("data:image/png;base64," + "A" * 4000),
        "link_url": of("https://x/a.png"),
        "bad": of("bad.png"),
        "url": {"messages": [{"role": "user", "content": [{"type": "image", "image": "http://x/a.png"}]}]},
        "film": {**LLAVA, "video": "a.mp4"},
        "two": {**LLAVA, "image": "a.png", "images": ["a.png", "b.png"]},
        "silent": {"conversations": [{"from": "human", "value": "hello"}]},
        "none": {"conversations": 3},
    }
    (source / "chats.json").write_text(json.dumps([{"id": key, **chat} for key, chat in given.items()]))
    (source / "cut.json").write_text(json.dumps([LLAVA, LLAVA])[:-30])
    seven = json.dumps({**LLAVA, "id": 7})
    (source / "lines.jsonl").write_text(f"{seven}\nno json\n{seven}\n{'[' * 9999}\n")
    (source / "nested.json").write_text("[" * 9999)
    assert build_index(source, tmp_path / "index", "conversations", hf)
    assert left_out(tmp_path / "index") == {
        **dict.fromkeys(("up", "abs", "link"), "outside the root"),
        **dict.fromkeys(("gone", "folder", "long", "zero", "surrogate", "loop"), "no file"),
        **dict.fromkeys(("data", "link_url"), "by URL alone"),
        "bad": "bad item",
        **dict.fromkeys(("url", "film", "two", "silent", "none"), "bad sample"),
        "": "damaged file",
        **dict.fromkeys(("line 2", "line 4"), "bad sample"),
    }
    reader = PlacedReader(tmp_path / "index", tokenizer=get_tokenizer(hf))
    ids = [reader.read(i, True, False).id for i in range(reader.manifest.num_samples)]
    assert ids == ["chats.json/good", "cut.json/0", "lines.jsonl/7", "lines.jsonl/7#2"]


def test_pictures_lie_below_a_folder_and_each_is_a_file_of_the_index(source, tmp_path, hf):
    (source / "pictures").mkdir()
    for name in ("a", "b"):
        (source / f"{name}.png").rename(source / "pictures" / f"{name}.png")
    (source / "chats.json").write_text(json.dumps(chats()))
    recipe = {"name": "conversations", "folder": "pictures"}
    assert build_index(source / "chats.json", tmp_path / "index", recipe, hf)
    assert Index.open(tmp_path / "index").manifest.place.files.rows == 3
    reader = PlacedReader(tmp_path / "index", tokenizer=get_tokenizer(hf))
    (source / "pictures" / "b.png").write_bytes(image_bytes(8, 16, seed=5))
    assert reader.read(1, False, (0,)).items[0].size == (8, 8)
    with pytest.raises(UnreadableError, match=r"b.png|not what was indexed"):
        reader.read(1, False, True)


def test_a_tokenizer_without_template_is_refused_and_so_is_one_that_writes_the_date(source, tmp_path, hf):
    (source / "chats.json").write_text(json.dumps(chats()))
    with pytest.raises(DataError, match="tokenizer bytes has no chat template"):
        build_index(source, tmp_path / "index", "conversations")
    dated = write_tokenizer(tmp_path / "dated", "{{ strftime_now('%d %b %Y') }}" + PARTS)
    keys = {**hf, "path": str(dated)}
    with pytest.raises(DataError, match="the chat template writes the date"):
        build_index(source, tmp_path / "index", "conversations", keys)
    recipe = {"name": "conversations", "today": "2026-11-25"}
    assert build_index(source, tmp_path / "index", recipe, keys)
    reader = PlacedReader(tmp_path / "index", tokenizer=get_tokenizer(keys))
    assert reader.read(0, True, False).text.startswith("25 Nov 2026")
    with pytest.raises(DataError, match="needs a tokenizer"):
        PlacedReader(tmp_path / "index")
