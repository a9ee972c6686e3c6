"""Samples and datasets for the tests of this folder."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from dataloader.format import PLACEHOLDER, Item, Sample
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter


def image_bytes(height: int, width: int, kind: str = "PNG", gray: bool = True, seed: int = 0) -> bytes:
    shape = (height, width) if gray else (height, width, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def image_item(height: int, width: int, kind: str = "PNG", gray: bool = True, seed: int = 0) -> Item:
    return Item("image", kind.lower(), (height, width), image_bytes(height, width, kind, gray, seed))


def make_sample(i: int) -> Sample:
    """Sample i has i % 3 images and a text of its own."""
    items = tuple(image_item(8, 8 * (1 + (i + k) % 4), seed=i + k) for k in range(i % 3))
    text = f"sample {i} " + "".join(f"image {k} {PLACEHOLDER} " for k in range(i % 3)) + "é" * (i % 5)
    return Sample(f"id-{i}", text, items)


def write_dataset(path: Path, count: int = 50, rows_per_group: int = 4, groups_per_shard: int = 3) -> Path:
    with DatasetWriter(path, ByteTokenizer(), rows_per_group, groups_per_shard) as writer:
        for i in range(count):
            writer.add(make_sample(i))
    return path


def item_counts(modality: str, size: tuple[int, ...]) -> tuple[int, int]:
    assert modality == "image"
    height, width = size
    return height * width // 4, height * width // 16
