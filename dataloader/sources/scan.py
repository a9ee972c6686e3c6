"""What one file of a source holds, as rows and token counts on disk: the work of one job.

A part is written under a name made of all that it depends on, and renamed when it is whole. So a job that was
killed is done again, one that was done is not, and who does it changes nothing.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
from isal.isal_zlib import crc32

from dataloader.fetching import Fetcher
from dataloader.format import Item, Sample, validate_sample
from dataloader.shared_files import SharedFiles
from dataloader.sources.recipe import Found, LeftOut, Range, Recipe, Write, get_recipe
from dataloader.sources.tables import COUNTS_SCHEMA, SAMPLES_SCHEMA, read_table, write_table
from dataloader.storage import Storage
from dataloader.tokenizer import Tokenizer, get_tokenizer
from dataloader.tokens import text_tokens

_FORM = 2  # of a part: one of another form is written anew


@dataclass(frozen=True)
class File:
    """A file of a source: its name below the root, its bytes, and its store's name for its content."""

    name: str
    bytes: int
    tag: str


@dataclass(frozen=True)
class Work:
    """What jobs share: the source's root, its recipe and the tokenizer, as they were named, and the folder of
    parts.
    """

    root: str
    recipe: Mapping[str, Any]
    tokenizer: Any
    vocabulary: str
    parts: Path

    def rows(self, file: File) -> Path:
        """Where the rows of a file go."""
        return self.parts / f"{self._name(file)}.rows"

    def counts(self, file: File) -> Path:
        """Where its token counts go."""
        return self.parts / f"{self._name(file)}.{self.vocabulary}"

    def _name(self, file: File) -> str:
        values = [_version(), _FORM, self.root, self.recipe, *vars(file).values()]
        depends = json.dumps(values, sort_keys=True)
        return blake2b(depends.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Part:
    """What a file holds: rows of `SAMPLES_SCHEMA` whose `file` is a place in `files`, counts of
    `COUNTS_SCHEMA`, what was left out, how many items there are of which modality, and the rows of each tag.
    """

    rows: pa.Table
    counts: pa.Table
    files: tuple[File, ...]
    left_out: tuple[LeftOut, ...]
    items: dict[str, int]
    tags: dict[str, list[int]]


def scan(work: Work, file: File) -> None:
    """Write the part of a file, unless it is there. Raises OSError, and DataError for a tokenizer or recipe
    that cannot be had.
    """
    if work.rows(file).exists() and work.counts(file).exists():
        return
    recipe, tokenizer, write = _made(json.dumps(work.recipe), json.dumps(work.tokenizer))
    storage = Storage.at(work.root)
    rows: list[dict[str, Any]] = []
    counts: list[dict[str, Any]] = []
    left_out: list[LeftOut] = []
    files = {file.name: 0}
    keys: set[str] = set()
    items: Counter[str] = Counter()
    tags: dict[str, list[int]] = {}
    for found in recipe.scan(storage, file.name):
        sample = _sample(found, file, write, keys) if isinstance(found, Found) else found
        if isinstance(sample, LeftOut):
            left_out.append(sample)
            continue
        assert isinstance(found, Found)
        tokens = text_tokens(sample, tokenizer)
        counts.append({"text_tokens": len(tokens.ids), "at": tokens.items, "turns": tokens.turns})
        for tag in found.tags:
            tags.setdefault(tag, []).append(len(rows))
        rows.append(_row(sample.id, found, files))
        items.update(item.modality for item in sample.items)
    places = [vars(file), *_others(storage, files)]
    notes = {"files": places, "left_out": left_out, "items": items, "tags": tags}
    write_part(work.counts(file), counts, COUNTS_SCHEMA, {})
    write_part(work.rows(file), rows, SAMPLES_SCHEMA, notes)


@lru_cache(maxsize=1)
def _made(recipe: str, tokenizer: str) -> tuple[Recipe, Tokenizer, Write]:
    """What scans and what counts, by their names and keys in JSON: to find a package's takes milliseconds."""
    found, counts = get_recipe(json.loads(recipe)), get_tokenizer(json.loads(tokenizer))
    return found, counts, found.write(counts)


@cache
def _version() -> str:
    return version("omni-train")


def read_part(work: Work, file: File) -> Part:
    """The part of a file that was scanned."""
    rows, notes = read_table(work.rows(file))
    counts, _ = read_table(work.counts(file))
    said = json.loads(notes)
    files, left_out = [File(**of) for of in said["files"]], [LeftOut(*of) for of in said["left_out"]]
    return Part(rows, counts, tuple(files), tuple(left_out), said["items"], said["tags"])


def modalities_of(work: Work, file: File) -> set[str]:
    """The modalities of the items of a file that was scanned."""
    return set(json.loads(read_table(work.rows(file))[1])["items"])


def _sample(found: Found, file: File, write: Write, keys: set[str]) -> Sample | LeftOut:
    """A sample with its items' bytes left out, or why it is not taken."""
    try:
        text = write(found.raw, len(found.items))
        items = tuple(Item(item.modality, item.format, item.size, b"-") for item in found.items)
        sample = Sample(f"{file.name}/{found.key}", text.text, items, text.targets, text.turns)
        validate_sample(sample)
    except Exception as error:  # whatever a stranger's sample does to a parser or a template
        return LeftOut(found.key, "bad sample", str(error))
    if found.key in keys:
        return LeftOut(found.key, "repeated key", "an earlier sample of the file has it")
    keys.add(found.key)
    return sample


def _row(name: str, found: Found, files: dict[str, int]) -> dict[str, Any]:
    items = [
        {
            "modality": item.modality,
            "format": item.format,
            "size": item.size,
            **_place(item.place, item.crc, files),
        }
        for item in found.items
    ]
    size = found.text.bytes + sum(item.place.bytes for item in found.items)
    return {"id": name, "bytes": size, "text": _place(found.text, crc32(found.raw), files), "items": items}


def _place(place: Range, crc: int, files: dict[str, int]) -> dict[str, Any]:
    number = files.setdefault(place.file, len(files))
    return {"file": number, "at": place.at, "bytes": place.bytes, "crc": crc}


def _others(storage: Storage, files: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """What is known of the files but the first, in their order."""
    fetcher = Fetcher(storage, SharedFiles())
    for name in list(files)[1:]:
        yield vars(File(name, *fetcher.known(name)))


def write_part(
    path: Path, rows: Sequence[dict[str, Any]], schema: pa.Schema, notes: Mapping[str, Any]
) -> None:
    """Write rows, and notes of them, as a part: whole, or not at all."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    write_table(new, list(rows), schema, json.dumps(notes).encode())
    os.replace(new, path)
