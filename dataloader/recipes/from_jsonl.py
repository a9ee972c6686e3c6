"""A dataset from a user's own files: one JSON object per line."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from dataloader.audio import read_audio_size
from dataloader.decode import read_image_size
from dataloader.format import DataError, Item, Sample
from dataloader.tokenizer import Tokenizer
from dataloader.writer import DatasetWriter, is_intact

_SAMPLE_KEYS = {"id", "text", "items", "targets"}
_ITEM_KEYS = {"modality", "path", "format", "size"}
_READ_SIZE = {"audio": read_audio_size, "image": read_image_size}


def build_from_jsonl(
    jsonl: str | Path,
    out: str | Path,
    tokenizer: Tokenizer,
    rows_per_group: int = 32,
    groups_per_shard: int = 64,
    overwrite: bool = False,
) -> bool:
    """Build the dataset `out` from the lines of `jsonl`; False if it is there, built from the same lines.

    A line is {"id": str, "text": str with U+FFFC where items stand, "items": [{"modality": "image", "path":
    str}, …], "targets": [[start, stop], …]}; items and targets may be left out, paths are relative to the
    file. Format and size of images and recordings are read from their headers; items of other modalities
    state "format" and "size" themselves. Raises DataError naming file and line.
    """
    jsonl = Path(jsonl)
    try:
        recipe = f"jsonl sha256={sha256(jsonl.read_bytes()).hexdigest()[:16]}"
    except OSError as error:
        raise DataError(
            f"{jsonl}: cannot be read ({error.strerror}): give the path of a JSONL file"
        ) from None
    if not overwrite and is_intact(out, recipe, tokenizer.name):
        return False
    with (
        DatasetWriter(out, tokenizer, rows_per_group, groups_per_shard, overwrite, recipe) as writer,
        open(jsonl, "rb") as lines,
    ):
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    writer.add(_sample(line, jsonl.parent))
                except ValueError as error:
                    raise DataError(f"{jsonl}:{number}: {error}") from error
    return True


def _sample(line: bytes, folder: Path) -> Sample:
    raw = _object(json.loads(line), "the line", _SAMPLE_KEYS)
    for key in ("id", "text"):
        if not isinstance(raw.get(key), str):
            raise DataError(f'"{key}" is {raw.get(key)!r}: it must be a string')
    listed = raw.get("items", [])
    if not isinstance(listed, list):
        raise DataError(f'"items" is {listed!r}: it must be a list of objects')
    items = tuple(_item(_object(item, "an item", _ITEM_KEYS), folder) for item in listed)
    return Sample(raw["id"], raw["text"], items, _targets(raw.get("targets")))


def _item(raw: dict[str, Any], folder: Path) -> Item:
    modality, path, kind, size = (raw.get(key) for key in ("modality", "path", "format", "size"))
    if not isinstance(modality, str) or not isinstance(path, str):
        raise DataError(f'item {raw} needs a "modality" and a "path", both strings')
    try:
        data = (folder / path).read_bytes()
    except OSError as error:
        raise DataError(
            f"{folder / path}: {error.strerror}: fix the path, it is relative to the file"
        ) from None
    if modality in _READ_SIZE:
        return Item(modality, *_READ_SIZE[modality](data), data)
    if not isinstance(kind, str) or not isinstance(size, list) or not all(type(n) is int for n in size):
        raise DataError(
            f'item {path} of modality {modality!r} must state "format" (a string) and "size" (integers): '
            f"only {', '.join(_READ_SIZE)} are read from the file"
        )
    return Item(modality, kind, tuple(size), data)


def _object(value: Any, what: str, known: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{what} is not a JSON object")
    unknown = sorted(set(value) - known)
    if unknown:
        raise DataError(f"{what} has unknown keys {unknown}: known are {sorted(known)}")
    return value


def _targets(raw: Any) -> tuple[tuple[int, int], ...] | None:
    if raw is None:
        return None
    if not isinstance(raw, list) or not all(
        isinstance(span, list) and len(span) == 2 and all(type(n) is int for n in span) for span in raw
    ):
        raise DataError(f'"targets" is {raw!r}: it must be a list of [start, stop] character positions')
    return tuple((start, stop) for start, stop in raw)
