"""The page of `omni data inspect --html`: what a browser is given, and that data can do nothing in it."""

import base64
import io
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from dataset_samples import image_bytes
from PIL import Image
from sound import encoded, tone
from tars import write_tar
from test_data_recipes import omni_data

from dataloader.format import PLACEHOLDER, Item, Sample
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "firefox")
HOSTILE = '</pre><script>alert(1)</script>\x1b[31m & "quoted" é'
PICTURE, SOUND = image_bytes(8, 16), encoded(tone(440, 1600, 16000), 16000, "flac")


class Page(HTMLParser):
    """Tags with their attributes, and the text of tags by name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.texts.setdefault(tag, []).append(data)

    def data_of(self, tag: str) -> list[bytes]:
        return [
            base64.b64decode((of["src"] or "").partition("base64,")[2])
            for name, of in self.tags
            if name == tag
        ]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    items = (Item("image", "png", (8, 16), PICTURE), Item("audio", "flac", (1600, 16000), SOUND))
    text = f"{HOSTILE}{PLACEHOLDER}{PLACEHOLDER} heard"
    at = text.index("heard")
    with DatasetWriter(tmp_path / "set", ByteTokenizer(), recipe=HOSTILE) as writer:
        writer.add(Sample('"><img src=x onerror=alert(1)>', text, items, ((at, at + 5),)))
        writer.add(Sample("plain", "nothing but text"))
    file = tmp_path / "page.html"
    assert omni_data("inspect", tmp_path / "set", "--html", file) == 0
    return file


def test_a_page_shows_items_and_what_carries_loss_and_runs_nothing(written):
    page = Page(written.read_text())
    names = {name for name, _ in page.tags}
    assert "script" not in names
    assert not [key for _, attributes in page.tags for key in attributes if key.startswith("on")]
    assert page.data_of("img") == [PICTURE]
    assert page.data_of("audio") == [SOUND]
    assert page.texts["mark"] == ["heard", "nothing but text"]
    assert '</pre><script>alert(1)</script>\\x1b[31m & "quoted" é' in "".join(page.texts["pre"])
    assert page.texts["b"] == ["item 0", "item 1"]
    assert '"><img src=x onerror=alert(1)>' in page.texts["h2"]
    assert "sample 0: 5 of 56 tokens carry loss" in page.texts["p"]
    assert any(
        said.startswith("2 samples, drawn evenly: 21 of 72 tokens carry loss (29.2%); ")
        for said in page.texts["p"]
    )
    assert next(of["content"] for tag, of in page.tags if tag == "meta" and "content" in of).startswith(
        "default-src 'none';"
    )
    assert not re.findall(r'(?:src|href)="(?!data:)', written.read_text())


def test_samples_are_spread_over_a_dataset_and_a_lost_one_is_named(tmp_path, capsys):
    with DatasetWriter(tmp_path / "set", ByteTokenizer(), rows_per_group=4) as writer:
        for i in range(40):
            writer.add(Sample(f"id-{i}", f"text {i}"))
    assert omni_data("inspect", tmp_path / "set", "--samples", 4, "--html", tmp_path / "page.html") == 0
    assert Page((tmp_path / "page.html").read_text()).texts["h2"] == ["id-0", "id-10", "id-20", "id-30"]
    assert omni_data("inspect", tmp_path / "no", "--html", tmp_path / "none.html") == 2
    assert "is not a dataset" in capsys.readouterr().err
    assert not (tmp_path / "none.html").exists()


def test_what_an_index_left_out_and_what_is_read_for_samples_are_told(tmp_path, capsys):
    bad = [(f"{i}.{of}", content) for i in "ab" for of, content in (("png", b"<i>"), ("txt", b"x"))]
    write_tar(tmp_path / "t.tar", [("good.png", PICTURE), ("good.txt", b"seen"), *bad, ("c.png", PICTURE)])
    assert omni_data("index", tmp_path / "t.tar", "--out", tmp_path / "set", "--recipe", "webdataset") == 0
    assert omni_data("inspect", tmp_path / "set", "--html", tmp_path / "page.html") == 0
    page = Page((tmp_path / "page.html").read_text())
    cells = page.texts["td"]
    assert (cells[:2], cells[3:5]) == (["bad item", "2"], ["no text", "1"])
    assert cells[2].startswith("t.tar a: ")
    payload = len(PICTURE) + len("seen")
    assert any(f"{payload} bytes were read for {payload} of their texts" in said for said in page.texts["p"])
    capsys.readouterr()
    assert omni_data("inspect", tmp_path / "set") == 0
    assert "left out: 2 for bad item, first t.tar a: " in " ".join(capsys.readouterr().out.split())


def test_what_samples_cost_a_run_is_drawn_where_a_configuration_is_given(tmp_path, capsys):
    with DatasetWriter(tmp_path / "set", ByteTokenizer()) as writer:
        writer.add(Sample("picture", f"seen {PLACEHOLDER}", (Item("image", "png", (8, 16), PICTURE),)))
        writer.add(Sample("plain", "nothing but text"))
    costs = ("--costs", "experiment=quickstart")
    assert omni_data("inspect", tmp_path / "set", "--html", tmp_path / "page.html", *costs) == 0
    titles = Page((tmp_path / "page.html").read_text()).texts["text"]
    assert [of for of in titles if "forward" in of] == [
        f"{name}: microseconds of a sample's forward" for name in ("llm", "image")
    ]
    assert omni_data("inspect", tmp_path / "set", *costs) == 2
    assert "--costs experiment=quickstart: costs are drawn on a page: add --html" in capsys.readouterr().err


@pytest.mark.slow  # it starts a browser
def test_a_browser_draws_the_page(written, tmp_path):
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser among {', '.join(BROWSERS)}")
    shot = tmp_path / "shot.png"
    words = ["--headless", "--disable-gpu", "--no-sandbox", f"--screenshot={shot}", "--window-size=800,1600"]
    words = ["--headless", f"--screenshot={shot}"] if "firefox" in browser else words
    subprocess.run([browser, *words, written.as_uri()], check=True, timeout=120, capture_output=True)
    pixels = np.asarray(Image.open(io.BytesIO(shot.read_bytes())).convert("RGB")).reshape(-1, 3)
    green = (pixels == (0xBF, 0xE8, 0xBF)).all(1).mean()  # what carries loss
    assert green > 1e-4
    assert len(np.unique(pixels, axis=0)) > 100  # and the picture
