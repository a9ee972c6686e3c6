"""A full check of a dataset: every file, row, item and count."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from dataloader.format import DataError, Item, Sample, SampleError, validate_sample
from dataloader.index import Index
from dataloader.loader import SampleReader
from dataloader.manifest import MANIFEST, hash_of
from dataloader.ranges import RANGES
from dataloader.reader import Reader
from dataloader.sources.reader import open_reader
from dataloader.tokenizer import Tokenizer
from dataloader.tokens import text_tokens

_EXAMPLES = 5


@dataclass(frozen=True)
class Report:
    """What a check found: problems by reason with a few examples, and what was not checked: items without a
    decoder, and files if the dataset has no hashes.
    """

    samples: int
    items: int
    problems: dict[str, int]
    examples: tuple[str, ...]
    not_decoded: dict[str, int]
    hashed: bool


def verify_dataset(
    path: str | Path, tokenizer: Tokenizer, decoders: Mapping[str, Callable[[Item], np.ndarray]]
) -> Report:
    """Read every row, decode every item that has a decoder, and compare with index and manifest.

    Every file is compared with its hash, if the dataset has hashes. Reasons are `changed` (a file),
    `unreadable`, `misplaced` (by its ranges it is another sample), `invalid`, `undecodable`, `miscounted` and
    `repeated` (an id). Raises DataError if the dataset cannot be opened at all (missing or resized files).
    """
    index = Index.open(path, tokenizer, checked=False)
    reader, ranged = _readers(path, index, tokenizer)
    problems: Counter[str] = Counter()
    not_decoded: Counter[str] = Counter()
    examples: list[str] = []
    items = 0

    def found(reason: str, what: str) -> None:
        problems[reason] += 1
        if problems[reason] <= _EXAMPLES:
            examples.append(f"{reason}: {what}")

    hashed = index.manifest.hash is not None
    for file in index.manifest.files if hashed else ():
        if (now := hash_of(index.path / file.file)) != file.hash:
            found("changed", f"{index.path / file.file}: its hash is {now}, {MANIFEST} says {file.hash}")
    ids: set[bytes] = set()
    for i in range(len(index)):
        try:
            sample = reader.read(i, text=True, items=True)
        except DataError as error:
            found("unreadable", f"sample {i}: {error}")
            continue
        if ranged is not None and (wrong := _misplaced(ranged, i, sample)):
            found("misplaced", f"sample {i}, by {RANGES}: {wrong}")
        try:
            validate_sample(sample)
        except DataError as error:
            found("invalid", str(error))
            continue
        name = blake2b(sample.id.encode(), digest_size=16).digest()
        if name in ids:
            found("repeated", f"sample {sample.id!r} ({i}): another one has this id")
        ids.add(name)
        items += len(sample.items)
        tokens = text_tokens(sample, tokenizer)
        meta = index.meta(i, "", lambda modality, size: (0, 0))
        recorded = [(item.modality, item.at, item.size) for item in meta.items]
        counted = [
            (item.modality, at, item.size) for item, at in zip(sample.items, tokens.items, strict=True)
        ]
        if (meta.text_tokens, recorded, meta.turns) != (len(tokens.ids), counted, tokens.turns):
            found("miscounted", f"sample {sample.id!r} ({i}): the index disagrees with the shard")
        for position, item in enumerate(sample.items):
            if item.modality not in decoders:
                not_decoded[item.modality] += 1
            elif wrong := _undecodable(decoders[item.modality], item):
                found("undecodable", f"sample {sample.id!r} ({i}), item {position}: {wrong}")
    return Report(len(index), items, dict(problems), tuple(examples), dict(not_decoded), hashed)


def _readers(path: str | Path, index: Index, tokenizer: Tokenizer) -> tuple[SampleReader, Reader | None]:
    """What reads samples, and what else must read the same: shards by row groups, and by ranges."""
    if index.manifest.place is not None:
        return open_reader(path, tokenizer=tokenizer), None
    return Reader(path, ranged=False), Reader(path)


def _misplaced(ranged: Reader, i: int, sample: Sample) -> str:
    """What is wrong with sample `i` as it is read by its ranges, if anything."""
    try:
        same = ranged.read(i, text=True, items=True) == sample
    except DataError as error:
        return str(error)
    return "" if same else "it is not what the shard has"


def _undecodable(decode: Callable[[Item], np.ndarray], item: Item) -> str:
    """Why an item cannot be decoded, if it cannot."""
    try:
        decode(item)
    except SampleError as error:
        return str(error)
    return ""
