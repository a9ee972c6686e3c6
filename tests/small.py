"""A small model and small data for tests that train."""

import io
import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dataloader.format import PLACEHOLDER, Item, Sample
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from omni.config import Config

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def image(rng: np.random.Generator, height: int, width: int, channels: int = 1) -> Item:
    pixels = rng.integers(0, 256, (height, width, channels), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels.squeeze(-1) if channels == 1 else pixels).save(out, "PNG")
    return Item("image", "png", (height, width), out.getvalue())


def strip(rng: np.random.Generator, name: str, digits: int) -> Sample:
    text = PLACEHOLDER + " ".join(rng.choice(WORDS, digits))
    return Sample(name, text, (image(rng, 8, 8 * digits),))


def write_mixed(path: Path) -> None:
    """Uneven items, two items in one sample, texts without items, one text that fills a microbatch alone."""
    rng = np.random.default_rng(0)
    with DatasetWriter(path, ByteTokenizer(), rows_per_group=4) as writer:
        for i, digits in enumerate((1, 6, 2, 1, 3)):
            writer.add(strip(rng, f"strip{i}", digits))
        two = (image(rng, 8, 16), image(rng, 16, 24))
        writer.add(Sample("two", f"left {PLACEHOLDER} and right {PLACEHOLDER}.", two))
        writer.add(Sample("short", "no picture"))
        writer.add(Sample("long", ("text without pictures, " * 7)[:159]))


def without_hashes(path: Path) -> None:
    """Make a dataset one of format 1, as versions before this one wrote it."""
    manifest = json.loads((path / "dataset.json").read_text())
    for file in (*manifest["shards"], manifest["index"]):
        del file["hash"]
    (path / "dataset.json").write_text(json.dumps(manifest | {"format_version": 1}))


def write_one_item(path: Path) -> None:
    """Texts, and a single item: only one rank has anything to encode."""
    rng = np.random.default_rng(1)
    with DatasetWriter(path, ByteTokenizer(), rows_per_group=4) as writer:
        writer.add(strip(rng, "strip", 4))
        writer.add(Sample("a", "one text"))
        writer.add(Sample("b", "another text"))


def write_uneven(path: Path) -> None:
    """Items of 16 to 256 tokens, two of them in one sample, a short text, and texts that fill a microbatch of
    160 tokens: with seed 15 some microbatch has no items however many replicas divide the samples.
    """
    rng = np.random.default_rng(0)
    with DatasetWriter(path, ByteTokenizer(), rows_per_group=4) as writer:
        for i, digits in enumerate((1, 6, 2)):
            writer.add(strip(rng, f"strip{i}", digits))
        two = (image(rng, 8, 16), image(rng, 16, 64))
        writer.add(Sample("two", f"left {PLACEHOLDER} and right {PLACEHOLDER}.", two))
        writer.add(Sample("short", "no picture"))
        for i in range(3):
            writer.add(Sample(f"long{i}", ("text without pictures, " * 7)[: 159 - 7 * i]))


def overrides(data: Path, folder: Path, *more: str, samples: int = 8) -> list[str]:
    """The command line of a small run on `data`, taking `samples` samples a step. It leaves nothing to be
    chosen.
    """
    return [
        "~experiment",
        "system=multiplexed",
        "model=tiny",
        "model.llm.hidden=64",
        "model.llm.ffn=96",
        "model.encoders.image.hidden=32",
        "model.encoders.image.heads=2",
        "model.encoders.image.ffn=64",
        "model.encoders.image.max_side=32",
        f"+data.sources.mixed.path={data}",
        "data.microbatch_tokens=160",
        f"data.step_samples={samples}",
        "train.steps=3",
        "train.precision=fp32",
        "train.timeout_s=60",
        "optim.lr=1e-3",
        "optim.eps=1e-4",
        "tracking=jsonl",
        f"run.dir={folder}",
        *more,
    ]


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """A configuration with other values by key, such as {"layout.llm.tp": 2}: composing it takes a second."""
    config = deepcopy(config)
    for key, value in values.items():
        *path, last = key.split(".")
        section: Any = config
        for name in path:
            section = section[name] if isinstance(section, dict) else getattr(section, name)
        if isinstance(section, dict):
            section[last] = value
        else:
            assert hasattr(section, last), key
            setattr(section, last, value)
    return config
