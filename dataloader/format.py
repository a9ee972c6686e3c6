"""The sample format on disk: what a sample is, the Parquet schema of a shard, the dataset's manifest."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa

FORMAT_VERSION = 1
PLACEHOLDER = "\ufffc"  # Unicode OBJECT REPLACEMENT CHARACTER: marks where an item stands in the text
MANIFEST = "dataset.json"

# Formats that the built-in decoders read. A modality that is not listed belongs to a user's encoder, which
# brings its own decoder: any format name is then accepted.
FORMATS: Mapping[str, tuple[str, ...]] = {"audio": ("flac", "wav"), "image": ("jpeg", "png")}

SHARD_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        # null: all text carries loss; an empty list: none does
        pa.field("targets", pa.list_(pa.struct([("start", pa.int32()), ("stop", pa.int32())]))),
        pa.field(
            "items",
            pa.list_(
                pa.struct(
                    [
                        ("modality", pa.string()),
                        ("format", pa.string()),
                        ("size", pa.list_(pa.int32())),
                        # 64-bit offsets: a row group of videos may exceed 2 GiB
                        ("data", pa.large_binary()),
                    ]
                )
            ),
        ),
    ]
)

TEXT_COLUMNS = ("id", "text", "targets")
ITEM_COLUMNS = ("id", "items")

INDEX_SCHEMA = pa.schema(
    [
        pa.field("text_tokens", pa.int32(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field(
            "items",
            pa.list_(
                pa.struct(
                    [
                        ("modality", pa.int16()),  # position in the manifest's `modalities`
                        ("at", pa.int32()),
                        ("size", pa.list_(pa.int32())),
                    ]
                )
            ),
            nullable=False,
        ),
    ]
)


class DataError(ValueError):
    """Data that cannot be used: the message names the file or sample, the value and the remedy."""


class SampleError(DataError):
    """One item that cannot be decoded; what happens to its sample is the caller's policy."""


@dataclass(frozen=True)
class Item:
    """One image, clip or recording inside a sample.

    `size` is what the item's encoder counts tokens from. For images it is (height, width) in pixels, for
    audio (samples of a channel, sampling rate in Hz); other modalities belong to a user's encoder, which
    documents its own (a clip might use (frames, height, width)). `data` holds the encoded file, as `format`
    says.
    """

    modality: str
    format: str
    size: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class Sample:
    """One training document: a text in which each `PLACEHOLDER` stands for the next item.

    `targets` are half-open, ascending character spans [start, stop) of `text` that carry loss; None means
    all text. A span may run across a placeholder: items never carry loss.
    """

    id: str
    text: str
    items: tuple[Item, ...] = ()
    targets: tuple[tuple[int, int], ...] | None = None


def validate_sample(sample: Sample) -> None:
    """Raise DataError naming the sample if it breaks the format."""
    name = f"sample {sample.id!r}"
    if not sample.id:
        raise DataError(f"a sample with text {sample.text[:40]!r} has an empty id: give each sample a name")
    if not sample.text:
        raise DataError(f"{name} has no text and no placeholder: leave it out")
    try:
        sample.text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{name}: its text is not valid Unicode ({error}): remove lone surrogates") from None
    count = sample.text.count(PLACEHOLDER)
    if count != len(sample.items):
        raise DataError(
            f"{name} has {count} placeholders (U+FFFC) in its text and {len(sample.items)} items: "
            "write one placeholder where each item stands"
        )
    for position, item in enumerate(sample.items):
        _validate_item(f"{name}, item {position}", item)
    end = 0
    for start, stop in sample.targets or ():
        if not end <= start < stop <= len(sample.text):
            raise DataError(
                f"{name}: target span [{start}, {stop}) is empty, out of order, overlaps the one before it "
                f"or leaves the text of {len(sample.text)} characters: give ascending [start, stop) spans"
            )
        end = stop


def _validate_item(name: str, item: Item) -> None:
    known = FORMATS.get(item.modality)
    if not item.modality or not item.format or (known is not None and item.format not in known):
        raise DataError(
            f"{name}: unknown format {item.format!r} of modality {item.modality!r}: known are "
            + "; ".join(f"{modality}: {', '.join(formats)}" for modality, formats in FORMATS.items())
        )
    if not item.size or min(item.size) < 1 or (known is not None and len(item.size) != 2):
        raise DataError(
            f"{name}: size {item.size} must be positive numbers, (height, width) for images, "
            "(samples, sampling rate) for audio: fix or drop it"
        )
    if not item.data:
        raise DataError(f"{name}: has no bytes: its file is empty; fix or drop it")


@dataclass(frozen=True)
class DataFile:
    """One Parquet file of a dataset: its name, size in bytes and number of samples."""

    file: str
    bytes: int
    rows: int


@dataclass(frozen=True)
class DatasetTotals:
    """Sums over a dataset; `items` counts them by modality, `bytes` is payload (text and items)."""

    text_tokens: int
    bytes: int
    items: dict[str, int]


@dataclass(frozen=True)
class Manifest:
    """What `dataset.json` says: everything about a dataset except its samples."""

    format_version: int
    recipe: str
    tokenizer: str
    num_samples: int
    rows_per_group: int
    shards: tuple[DataFile, ...]
    index: DataFile
    modalities: tuple[str, ...]
    totals: DatasetTotals


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write `dataset.json` into the folder `path`."""
    (path / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")


def read_manifest(path: Path) -> Manifest:
    """Read `dataset.json` of the folder `path`; DataError if it is missing, damaged or of another version."""
    file = path / MANIFEST
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{path} is not a dataset: {file} is missing; build it with omni data build"
        ) from None
    except ValueError as error:
        raise DataError(f"{file} is not valid JSON ({error}): rebuild with omni data build") from None
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(
            f"{file}: format_version is {version!r}, this version reads {FORMAT_VERSION}: "
            "rebuild with omni data build"
        )
    try:
        manifest = Manifest(
            **{
                **raw,
                "shards": tuple(DataFile(**shard) for shard in raw["shards"]),
                "index": DataFile(**raw["index"]),
                "modalities": tuple(raw["modalities"]),
                "totals": DatasetTotals(**raw["totals"]),
            }
        )
    except (KeyError, TypeError) as error:
        raise DataError(f"{file} lacks or misspells a key ({error}): rebuild with omni data build") from None
    _check_manifest(file, manifest)
    return manifest


def _check_manifest(file: Path, manifest: Manifest) -> None:
    rows = [shard.rows for shard in manifest.shards]
    if manifest.rows_per_group < 1 or manifest.num_samples < 1 or sum(rows) != manifest.num_samples:
        raise DataError(
            f"{file}: num_samples {manifest.num_samples} must be positive and the sum of the shards' rows "
            f"{sum(rows)}, rows_per_group {manifest.rows_per_group} positive: rebuild with omni data build"
        )
    for shard in manifest.shards[:-1]:
        if shard.rows % manifest.rows_per_group:
            raise DataError(
                f"{file}: shard {shard.file} has {shard.rows} rows, not whole groups of "
                f"{manifest.rows_per_group}: only the last shard may end in a partial group"
            )


def check_files(path: Path, manifest: Manifest) -> None:
    """Raise DataError if a file of the dataset is missing or does not have its recorded size."""
    for shard in (*manifest.shards, manifest.index):
        file = path / shard.file
        size = file.stat().st_size if file.is_file() else None
        if size != shard.bytes:
            state = "is missing" if size is None else f"is {size} bytes: it is truncated or was changed"
            raise DataError(
                f"{file} {state}, {MANIFEST} says {shard.bytes} bytes; "
                "restore it or rebuild with omni data build --overwrite"
            )
