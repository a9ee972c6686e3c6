"""The `dataset.json` of a dataset: its files, totals and texts, and where samples lie that lie elsewhere."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dataloader.format import DataError

FORMAT_VERSION = 2
UNHASHED_VERSION = 1  # the same files; its dataset.json holds no hashes
PLACED_VERSION = 3  # an index of samples that lie elsewhere
MANIFEST = "dataset.json"


@dataclass(frozen=True)
class DataFile:
    """One file of a dataset: its name, size in bytes, number of samples and `hash_of`; of format 1 the hash
    is not known and empty.
    """

    file: str
    bytes: int
    rows: int
    # Not shown: the names that checkpoints hold of datasets' sizes are made of what is shown.
    hash: str = field(default="", repr=False)


@dataclass(frozen=True)
class DatasetTotals:
    """Sums over a dataset; `items` counts them by modality, `bytes` is payload (text and items)."""

    text_tokens: int
    bytes: int
    items: dict[str, int]


@dataclass(frozen=True)
class Frame:
    """Which tokens stand around a sample's text: a bos before it, an end_of_item after the rows of each item.
    The eos is always the last label; `eos` says whether it carries loss where targets reach the text's end.
    With `turns` a sample that is too long is cut where a turn ends, and nowhere else.
    """

    bos: bool = True
    end_of_item: bool = True
    eos: bool = True
    turns: bool = False


PLAIN = Frame()


@dataclass(frozen=True)
class TextForm:
    """What the tokens of a dataset's text depend on beside the tokenizer's name: digests of the tokenizer and
    of the chat template that wrote the text, "" where there is none, and the frame of its samples.
    """

    tokenizer: str = ""
    template: str = ""
    frame: Frame = PLAIN


_NOTHING_SAID = TextForm()


@dataclass(frozen=True)
class Place:
    """Where samples lie that are not in the dataset's own files: a folder or URL, the recipe that reads them
    with its keys, the table of their files, a name of all that was there when they were indexed, and the
    rows of their tags if they have any.
    """

    root: str
    recipe: dict[str, Any]
    files: DataFile
    listing: str
    tags: DataFile | None = field(default=None, repr=False)  # no part of what names a dataset's content


@dataclass(frozen=True)
class Manifest:
    """What `dataset.json` says: everything about a dataset except its samples.

    Where these lie in another `place`, `shards` are the tables that say where, and the index is that of one
    vocabulary of several.
    """

    format_version: int
    recipe: str
    tokenizer: str
    num_samples: int
    rows_per_group: int
    shards: tuple[DataFile, ...]
    index: DataFile
    modalities: tuple[str, ...]
    totals: DatasetTotals
    # Not shown, as hashes are not. `dataset.json` has it where it says more than that there is nothing.
    text: TextForm = field(default=_NOTHING_SAID, repr=False)
    place: Place | None = field(default=None, repr=False)

    @property
    def files(self) -> tuple[DataFile, ...]:
        """The dataset's files, the index last."""
        place = self.place
        placed = () if place is None else (place.files, *([] if place.tags is None else [place.tags]))
        return (*self.shards, *placed, self.index)

    @property
    def hash(self) -> str | None:
        """A name of all that the files hold, 32 hexadecimal digits; None if it is not known."""
        if self.format_version == UNHASHED_VERSION:
            return None
        return hashlib.blake2b("".join(f.hash for f in self.files).encode(), digest_size=16).hexdigest()


def hash_of(file: Path) -> str:
    """BLAKE2b of a file's bytes, 128 bits, as 32 hexadecimal digits. Raises OSError."""
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write `dataset.json` into the folder `path`, whole or not at all.

    With samples in another place, its vocabulary is put beside those that the file has.
    """
    values = asdict(manifest)
    if manifest.text == _NOTHING_SAID:
        del values["text"]
    if manifest.place is None:
        del values["place"]
    else:
        if manifest.place.tags is None:
            del values["place"]["tags"]
        own = {key: values.pop(key) for key in _OF_VOCABULARY if key in values}
        own["text_tokens"] = values["totals"].pop("text_tokens")
        held = _raw(path)["vocabularies"] if (path / MANIFEST).exists() else []
        values["vocabularies"] = [*held, own]
    _replace_manifest(path, values)


def move_place(path: Path, root: str) -> None:
    """Note that samples of the dataset `path`, which lie in another place, now lie below `root`."""
    values = _raw(path)
    values["place"]["root"] = root
    _replace_manifest(path, values)


def _replace_manifest(path: Path, values: dict[str, Any]) -> None:
    new = path / f"{MANIFEST}.new"
    with open(new, "w", encoding="utf-8") as handle:
        handle.write(json.dumps(values, indent=2) + "\n")
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(new, path / MANIFEST)


_OF_VOCABULARY = ("tokenizer", "text", "index")


def read_manifest(path: Path, vocabulary: tuple[str, str] | None = None) -> Manifest:
    """Read `dataset.json` of the folder `path`; DataError if it is missing, damaged or of another version.

    With samples in another place it is that of a `vocabulary`, a tokenizer's name and digest; if there is
    none of it, of one by the name, or of the first.
    """
    file = path / MANIFEST
    raw = _raw(path)
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version not in (UNHASHED_VERSION, FORMAT_VERSION, PLACED_VERSION):
        raise DataError(
            f"{file}: format_version is {version!r}, this version reads {UNHASHED_VERSION} to "
            f"{PLACED_VERSION}: rebuild with omni data build"
        )
    try:
        if version == PLACED_VERSION:
            raw = _with_vocabulary(raw, vocabulary)
        manifest = Manifest(
            **{
                **raw,
                "shards": tuple(DataFile(**shard) for shard in raw["shards"]),
                "index": DataFile(**raw["index"]),
                "modalities": tuple(raw["modalities"]),
                "totals": DatasetTotals(**raw["totals"]),
                "text": _text_form(raw.get("text", {})),
            }
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{file} lacks or misspells a key ({error}): rebuild with omni data build") from None
    for listed in manifest.files:
        _check_listed(file, listed, manifest.format_version)
    _check_manifest(file, manifest)
    return manifest


def _raw(path: Path) -> Any:
    """The values of a `dataset.json`."""
    file = path / MANIFEST
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{path} is not a dataset: {file} is missing; build it with omni data build or omni data index"
        ) from None
    except ValueError as error:
        raise DataError(f"{file} is not valid JSON ({error}): rebuild with omni data build") from None


def _with_vocabulary(raw: dict[str, Any], vocabulary: tuple[str, str] | None) -> dict[str, Any]:
    """The values of a manifest with samples in another place, with those of one of its vocabularies."""
    values = dict(raw)
    held = values.pop("vocabularies")
    name, digest = vocabulary or ("", "")

    def other(of: dict[str, Any]) -> tuple[bool, bool]:
        return of["tokenizer"] != name, of.get("text", {}).get("tokenizer", "") != digest

    own = dict(sorted(held, key=other)[0])
    totals = {**values["totals"], "text_tokens": own.pop("text_tokens")}
    files = {key: DataFile(**values["place"][key]) for key in ("files", "tags") if key in values["place"]}
    place = Place(**{**values["place"], **files})
    return {**values, **own, "totals": totals, "place": place}


def _text_form(raw: dict[str, Any]) -> TextForm:
    return TextForm(**{**raw, "frame": Frame(**raw.get("frame", {}))})


def _check_listed(file: Path, listed: DataFile, version: int) -> None:
    """Refuse a listed file that lies elsewhere, or with numbers that make no sense: strangers write these."""
    name = listed.file
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\\0"):
        raise DataError(f"{file}: {name!r} is no name of a file beside it, where a dataset's files lie")
    for key, value in (("bytes", listed.bytes), ("rows", listed.rows)):
        if type(value) is not int or value < 0:
            raise DataError(f"{file}: {key} of {name} is {value!r}, not a number from 0 on: rebuild it")
    digits = isinstance(listed.hash, str) and set(listed.hash) <= set("0123456789abcdef")
    if not digits or len(listed.hash) != (0 if version == UNHASHED_VERSION else 32):
        raise DataError(
            f"{file}: hash of {name} is {listed.hash!r}; format {version} has "
            f"{'none' if version == UNHASHED_VERSION else '32 hexadecimal digits (BLAKE2b)'}: write "
            f"format_version {UNHASHED_VERSION} without hashes, and then omni data hash"
        )


def _check_manifest(file: Path, manifest: Manifest) -> None:
    for key in ("num_samples", "rows_per_group"):
        if type(getattr(manifest, key)) is not int:
            raise DataError(f"{file}: {key} is {getattr(manifest, key)!r}, not a number: rebuild it")
    rows = [shard.rows for shard in manifest.shards]
    if manifest.rows_per_group < 1 or manifest.num_samples < 1 or sum(rows) != manifest.num_samples:
        raise DataError(
            f"{file}: num_samples {manifest.num_samples} must be positive and the sum of the shards' rows "
            f"{sum(rows)}, rows_per_group {manifest.rows_per_group} positive: rebuild with omni data build"
        )
    place = manifest.place
    if place is not None and not (
        isinstance(place.root, str) and isinstance(place.recipe, dict) and len(rows) == 1
    ):
        raise DataError(
            f"{file}: place must have a root, a recipe with its keys, and one table of samples: index anew"
        )
    for shard in manifest.shards[:-1]:
        if shard.rows % manifest.rows_per_group:
            raise DataError(
                f"{file}: shard {shard.file} has {shard.rows} rows, not whole groups of "
                f"{manifest.rows_per_group}: only the last shard may end in a partial group"
            )


def check_files(path: Path, manifest: Manifest) -> None:
    """Raise DataError if a file of the dataset is missing or does not have its recorded size."""
    for shard in manifest.files:
        file = path / shard.file
        size = file.stat().st_size if file.is_file() else None
        if size != shard.bytes:
            state = "is missing" if size is None else f"is {size} bytes: it is truncated or was changed"
            raise DataError(
                f"{file} {state}, {MANIFEST} says {shard.bytes} bytes; "
                "restore it or rebuild with omni data build --overwrite"
            )
