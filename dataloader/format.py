"""The sample format on disk: what a sample is, and the schemas of a shard and of an index."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa

PLACEHOLDER = "\ufffc"  # Unicode OBJECT REPLACEMENT CHARACTER: marks where an item stands in the text

# Formats that the built-in decoders read. A modality that is not listed belongs to a user's encoder, which
# brings its own decoder: any format name is then accepted.
FORMATS: Mapping[str, tuple[str, ...]] = {
    "audio": ("flac", "mp3", "ogg", "wav"),
    "image": ("jpeg", "png", "webp"),
}

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

TURNS = pa.field("turns", pa.list_(pa.int32()), nullable=False)
"""Of a shard the characters, of an index the text tokens, after which a sample may be cut: a column only
where samples are cut so.
"""

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


class UnreadableError(SampleError):
    """A sample whose bytes cannot be read where they lie, or are no longer those that were indexed; `name`
    is its id.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


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
    all text. A span may run across a placeholder: items never carry loss. `turns` are the ends, ascending, of
    the turns of a chat, after which it may be cut if it is too long; None means after any token.
    """

    id: str
    text: str
    items: tuple[Item, ...] = ()
    targets: tuple[tuple[int, int], ...] | None = None
    turns: tuple[int, ...] | None = None


def validate_sample(sample: Sample) -> None:
    """Raise DataError naming the sample if it breaks the format."""
    name = f"sample {sample.id!r}"
    if not sample.id:
        raise DataError(f"a sample with text {sample.text[:40]!r} has an empty id: give each sample a name")
    if not sample.text:
        raise DataError(f"{name} has no text and no placeholder: leave it out")
    written = [("text", sample.text), ("id", sample.id)]
    written += [
        pair for item in sample.items for pair in (("modality", item.modality), ("format", item.format))
    ]
    for what, text in written:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{name}: its {what} is not valid Unicode ({error}): remove lone surrogates"
            ) from None
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
    ends = (0, *(sample.turns or ()))
    in_order = all(start < stop <= len(sample.text) for start, stop in pairwise(ends))
    if not in_order or any(sample.text[stop - 1] == PLACEHOLDER for stop in ends[1:]):
        raise DataError(
            f"{name}: its turns end after {list(ends[1:])} of {len(sample.text)} characters: give ascending "
            "ends, each after text and not after an item"
        )


def _validate_item(name: str, item: Item) -> None:
    known = FORMATS.get(item.modality)
    if not item.modality or not item.format or (known is not None and item.format not in known):
        raise DataError(
            f"{name}: unknown format {item.format!r} of modality {item.modality!r}: known are "
            + "; ".join(f"{modality}: {', '.join(formats)}" for modality, formats in FORMATS.items())
        )
    if (
        not item.size
        or min(item.size) < 1
        or max(item.size) >= 2**31
        or (known is not None and len(item.size) != 2)
    ):
        raise DataError(
            f"{name}: size {item.size} must be positive numbers of 31 bits, (height, width) for images, "
            "(samples, sampling rate) for audio: fix or drop it"
        )
    if not item.data:
        raise DataError(f"{name}: has no bytes: its file is empty; fix or drop it")
