"""Traces as Parquet files: the lengths of samples, one row each, written or brought by a user."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from dataloader.format import DataError
from dataloader.tokens import ItemMeta, SampleMeta

MOST = 2**31 - 1
TOKENS_PER_ROW = 4  # where a trace has an item's encoder tokens alone: 2 × 2 merging is a common choice

_NUMBERS = [(name, pa.int32()) for name in ("tokens", "rows", "at")]
TRACE_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.int64(), nullable=False),
        pa.field("phase", pa.int32(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("text_tokens", pa.int32(), nullable=False),
        pa.field("items", pa.list_(pa.struct([("modality", pa.string()), *_NUMBERS])), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
    ]
)
"""What is written. Of what is read `text_tokens` must be there; items may have a `size`."""

_REMEDY = "omni data trace generate writes an example, docs/data.md has the columns"


def write_trace(out: str | Path | IO[bytes], trace: Sequence[SampleMeta]) -> None:
    """Write a trace as Parquet to a path or an open file; the items' sizes are not part of it."""
    rows = [
        {
            "sample_id": meta.id,
            "phase": meta.phase,
            "source": meta.source,
            "text_tokens": meta.text_tokens,
            "items": [
                {"modality": i.modality, "tokens": i.tokens, "rows": i.rows, "at": i.at} for i in meta.items
            ],
            "bytes": meta.bytes,
        }
        for meta in trace
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=TRACE_SCHEMA), out, compression="zstd")


def read_trace(path: str | Path) -> list[SampleMeta]:
    """Read a trace in its order. Items that have a `size` have no tokens and no rows: an encoder counts them.

    Raises:
        DataError: if the file is missing or damaged, has no lengths, or holds some that cannot be: with the
            file, the row, what was found and the remedy.
    """
    try:
        with pq.ParquetFile(Path(path)) as file:
            _check_columns(path, file.schema_arrow)
            known = [name for name in file.schema_arrow.names if name in TRACE_SCHEMA.names]
            rows = file.read(columns=known).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable trace ({error}): {_REMEDY}") from error
    if not rows:
        raise DataError(f"{path} is a trace without rows: give at least one sample; {_REMEDY}")
    return [_sample(f"{path}, row {number}", number, row) for number, row in enumerate(rows)]


def _check_columns(path: str | Path, schema: pa.Schema) -> None:
    """Refuse a table without lengths, or with columns of other types."""
    if "text_tokens" not in schema.names:
        raise DataError(
            f"{path} is a trace without lengths: it has the columns {', '.join(schema.names) or 'none'}, and "
            f"needs text_tokens, beside it items if there are any; {_REMEDY}"
        )
    whole = ("text_tokens", "sample_id", "phase", "bytes")
    for name, kind in zip(schema.names, schema.types, strict=True):
        if name in whole and not pa.types.is_integer(kind):
            raise DataError(f"{path}: column {name} is of type {kind}, and must be of integers; {_REMEDY}")
    if "items" not in schema.names:
        return
    kind = schema.field("items").type
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    structs = listed and pa.types.is_struct(kind.value_type)
    fields = {field.name for field in kind.value_type} if structs else set()
    if "modality" not in fields or not {"size", "tokens"} & fields:
        raise DataError(
            f"{path}: column items is of type {kind}, and must be a list of structs with modality and either "
            f"size or tokens; {_REMEDY}"
        )


def _sample(where: str, number: int, row: Mapping[str, Any]) -> SampleMeta:
    text = _whole(where, "text_tokens", row["text_tokens"], 0)
    items = tuple(_items(where, row.get("items") or []))
    if not text and not items:
        raise DataError(f"{where}: a sample without text and items: leave it out")
    ats = [0, *(item.at for item in items), text]
    if any(after < before for before, after in pairwise(ats)):
        raise DataError(
            f"{where}: items stand after {ats[1:-1]} of {text} text tokens: give `at` in order, from 0 to "
            "text_tokens, or leave it out"
        )
    return SampleMeta(
        id=_whole(where, "sample_id", row.get("sample_id", number), 0, 2**63 - 1),
        source=str(row.get("source") or "trace"),
        text_tokens=text,
        items=items,
        bytes=_whole(where, "bytes", row.get("bytes", 0), 0, 2**63 - 1),
        phase=_whole(where, "phase", row.get("phase", 0), 0),
    )


def _items(where: str, items: Sequence[Mapping[str, Any]]) -> Iterator[ItemMeta]:
    for place, item in enumerate(items):
        own = f"{where}, item {place}"
        modality, at = item["modality"], item.get("at")
        if not modality or not isinstance(modality, str):
            raise DataError(f"{own}: its modality is {modality!r}: name one, such as image")
        at = _whole(own, "at", 0 if at is None else at, 0)
        size = item.get("size")
        if size and not isinstance(size, list):
            raise DataError(f"{own}: size is {size!r}: give a list, such as [height, width] of an image")
        if size:
            yield ItemMeta(modality, 0, 0, at, tuple(_whole(own, "size", side, 1) for side in size))
            continue
        tokens = _whole(own, "tokens (it has no size)", item.get("tokens"), 1)
        rows = item.get("rows")
        rows = -(-tokens // TOKENS_PER_ROW) if rows is None else _whole(own, "rows", rows, 1)
        yield ItemMeta(modality, tokens, rows, at, ())


def _whole(where: str, key: str, value: Any, least: int, most: int = MOST) -> int:
    if not isinstance(value, int) or not least <= value <= most:
        raise DataError(f"{where}: {key} is {value!r}, and must be from {least} to {most}: mend the row")
    return value
