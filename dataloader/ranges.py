"""Where the bytes of each sample lie in its shard, so that a rank reads those that it needs and no others.

A shard that is neither compressed nor coded holds each text and each item whole: `locate` finds them, byte
for byte, in any such file, whoever wrote it. `ranges.arrow` beside the shards keeps what it found. It adds
nothing to a dataset, which is read by whole row groups without it.
"""

import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from isal.isal_zlib import crc32

from dataloader.format import TURNS, Item
from dataloader.manifest import Manifest
from dataloader.mapped import MappedRows

Marks = tuple[tuple[tuple[int, int], ...] | None, tuple[int, ...] | None]

RANGES = "ranges.arrow"
NOWHERE = -1  # the place of what is not found: compressed, or in a dictionary
_BATCH_ROWS = 65_536
_UNMARKED = repr((None, None)).encode()

_RANGE = [("at", pa.int64()), ("bytes", pa.int64()), ("crc", pa.uint32())]
_SPAN = pa.struct([("start", pa.int32()), ("stop", pa.int32())])
RANGES_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.struct(_RANGE)),
        ("targets", pa.list_(_SPAN)),
        (TURNS.name, pa.list_(TURNS.type.value_type)),
        (
            "items",
            pa.list_(
                pa.struct(
                    [
                        ("modality", pa.string()),
                        ("format", pa.string()),
                        ("size", pa.list_(pa.int32())),
                        *_RANGE,
                    ]
                )
            ),
        ),
    ]
)


def marks_of(row: Mapping[str, Any]) -> Marks:
    """The targets and the turns of a sample, as `Sample` has them, from a row of a shard or of ranges."""
    targets, turns = row["targets"], row.get(TURNS.name)
    spans = None if targets is None else tuple((t["start"], t["stop"]) for t in targets)
    return spans, None if turns is None else tuple(turns)


def text_crc(text: bytes, marks: Marks) -> int:
    """CRC-32 of a text and of its targets and turns."""
    return crc32(_UNMARKED if marks == (None, None) else repr(marks).encode(), crc32(text))


def item_crc(item: Item) -> int:
    """CRC-32 of an item's bytes and of what is said of it."""
    return crc32(repr((item.modality, item.format, item.size)).encode(), crc32(item.data))


def locate(file: Path) -> Iterator[dict[str, Any]]:
    """Yield a row of `RANGES_SCHEMA` for each sample of a shard. Raises pyarrow's errors and OSError."""
    with open(file, "rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
        parquet = pq.ParquetFile(file, page_checksum_verification=True)
        for group in range(parquet.num_row_groups):
            chunks = chunks_of(parquet.metadata.row_group(group))
            rows = parquet.read_row_group(group, use_threads=False).to_pylist()
            texts = [row["text"].encode() for row in rows]
            items = [_item(value) for row in rows for value in row["items"] or ()]
            text_at = iter(places_of(content, *chunks["text"], texts))
            item_at = iter(places_of(content, *chunks["data"], [item.data for item in items]))
            item = iter(items)
            for row, text in zip(rows, texts, strict=True):
                crc = text_crc(text, marks_of(row))
                yield {
                    "id": row["id"],
                    "text": {"at": next(text_at), "bytes": len(text), "crc": crc},
                    "targets": row["targets"],
                    TURNS.name: row.get(TURNS.name),
                    "items": [_item_row(next(item), next(item_at)) for _ in row["items"] or ()],
                }


def _item(value: dict[str, Any]) -> Item:
    return Item(value["modality"], value["format"], tuple(value["size"]), value["data"])


def _item_row(item: Item, at: int) -> dict[str, Any]:
    said = {"modality": item.modality, "format": item.format, "size": item.size}
    return {**said, "at": at, "bytes": len(item.data), "crc": item_crc(item)}


def chunks_of(group: pq.RowGroupMetaData) -> dict[str, tuple[int, int]]:
    """Where the column chunks of texts and of items' bytes begin and end in the file."""
    found = {}
    for column in (group.column(c) for c in range(group.num_columns)):
        start = column.data_page_offset
        if column.has_dictionary_page:
            start = min(start, column.dictionary_page_offset)
        found[column.path_in_schema.split(".")[-1]] = (start, start + column.total_compressed_size)
    return found


def places_of(content: mmap.mmap | bytes, start: int, stop: int, values: Sequence[bytes]) -> list[int]:
    """Where values stand, one behind the other, between `start` and `stop`; NOWHERE for all if one is not."""
    places = []
    for value in values:
        at = start + 4  # a value has its length before it, but where a page begins
        if content[at : at + len(value)] != value:
            at = content.find(value, start, stop)
        if at < 0 or at + len(value) > stop:
            return [NOWHERE] * len(values)
        places.append(at)
        start = at + len(value)
    return places


def is_lost(row: dict[str, Any]) -> bool:
    """Whether something of a sample was not found in its shard."""
    return NOWHERE in (row["text"]["at"], *(item["at"] for item in row["items"] or ()))


class RangesWriter:
    """Writes a `ranges.arrow`; `close` it, or it is no file."""

    def __init__(self, file: Path) -> None:
        self._rows: list[dict[str, Any]] = []
        self._file = pa.ipc.new_file(str(file), RANGES_SCHEMA)

    def add(self, row: dict[str, Any]) -> None:
        """Append the ranges of a sample."""
        self._rows.append(row)
        if len(self._rows) == _BATCH_ROWS:
            self._write()

    def close(self) -> None:
        """Write what is left."""
        if self._rows:
            self._write()
        self._file.close()

    def _write(self) -> None:
        self._file.write_batch(pa.RecordBatch.from_pylist(self._rows, schema=RANGES_SCHEMA))
        self._rows = []


def open_ranges(path: Path, manifest: Manifest) -> MappedRows:
    """Map the ranges of the dataset at `path`. Raises DataError if they are damaged, or another dataset's."""
    remedy = "remove it, and write it anew with omni data hash"
    return MappedRows(path / RANGES, RANGES_SCHEMA, manifest.num_samples, remedy)
