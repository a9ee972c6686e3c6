"""The tables of an index of samples that lie elsewhere, and how they are written.

`samples.arrow` has a row for each sample: its key, and where its text and items are. `files.arrow` has the
files that these are in. Neither knows a tokenizer: what one makes of the texts is in an `index-*.arrow`, the
index that planning reads of any dataset.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dataloader.format import INDEX_SCHEMA, TURNS

SAMPLES = "samples.arrow"
FILES = "files.arrow"
LEFT_OUT = "left_out.jsonl"
BATCH_ROWS = 65_536

_PLACE = [("file", pa.int32()), ("at", pa.int64()), ("bytes", pa.int64()), ("crc", pa.uint32())]
ITEM = pa.struct(
    [("modality", pa.string()), ("format", pa.string()), ("size", pa.list_(pa.int32())), *_PLACE]
)
SAMPLES_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),  # of its text and items together
        pa.field("text", pa.struct(_PLACE), nullable=False),
        pa.field("items", pa.list_(ITEM), nullable=False),
    ]
)
FILES_SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),  # below the source's root
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("tag", pa.string(), nullable=False),  # its store's name for its content, "" without one
        pa.field("first", pa.int64(), nullable=False),  # row of `samples.arrow`
        pa.field("rows", pa.int64(), nullable=False),  # from there on that were found by scanning it
    ]
)
COUNTS_SCHEMA = pa.schema(
    [
        pa.field("text_tokens", pa.int32(), nullable=False),
        pa.field("at", pa.list_(pa.int32()), nullable=False),  # text tokens before each item
        TURNS,  # empty where samples have none
    ]
)
"""What a tokenizer makes of the samples of one file, until all are put together."""


class BatchWriter:
    """Writes an Arrow IPC file whose record batches, but the last, have `batch_rows` rows, however they came.

    `close` it, or it is no file.
    """

    def __init__(self, file: Path, schema: pa.Schema, batch_rows: int = BATCH_ROWS) -> None:
        self.num_rows = 0
        self._schema = schema
        self._batch_rows = batch_rows
        self._waiting: list[pa.Table] = []
        self._count = 0
        self._file = pa.ipc.new_file(str(file), schema)

    def add(self, table: pa.Table) -> None:
        """Append rows."""
        self._waiting.append(table)
        self._count += len(table)
        self.num_rows += len(table)
        if self._count >= self._batch_rows:
            self._write(self._batch_rows)

    def close(self) -> None:
        """Write what is left."""
        if self._count:
            self._write(1)
        self._file.close()

    def _write(self, least: int) -> None:
        """Write batches, until fewer than `least` rows wait."""
        table = pa.concat_tables(self._waiting).combine_chunks()
        at = 0
        while len(table) - at >= least:
            rows = np.arange(at, min(at + self._batch_rows, len(table)))
            # Taken, not sliced: the buffers of a slice have the sizes of what it was cut from.
            (batch,) = table.take(pa.array(rows)).combine_chunks().to_batches()
            self._file.write_batch(batch)
            at += len(rows)
        self._waiting = [table.slice(at)]
        self._count = len(table) - at


def renumbered(rows: pa.Table, numbers: npt.NDArray[np.int32]) -> pa.Table:
    """Rows of `SAMPLES_SCHEMA` of which file i becomes file `numbers[i]`."""

    def moved(places: pa.StructArray) -> pa.StructArray:
        values = dict(zip(places.type.names, places.flatten(), strict=True))
        values["file"] = pa.array(numbers[values["file"].to_numpy()])
        return pa.StructArray.from_arrays(list(values.values()), fields=list(places.type))

    edges, items = lists(rows["items"])
    listed = pa.ListArray.from_arrays(edges, moved(items))
    columns = [rows["id"], rows["bytes"], moved(rows["text"].combine_chunks()), listed]
    return pa.Table.from_arrays(columns, schema=SAMPLES_SCHEMA)


def index_schema(turns: bool) -> pa.Schema:
    """Columns of an index, whose samples are cut at the ends of turns or not."""
    return INDEX_SCHEMA.append(TURNS) if turns else INDEX_SCHEMA


def index_rows(rows: pa.Table, counts: pa.Table, modalities: Sequence[str], turns: bool) -> pa.Table:
    """Rows of `index_schema` from those of samples and what a tokenizer makes of them."""
    edges, items = lists(rows["items"])
    of = dict(zip(items.type.names, items.flatten(), strict=True))
    number = pc.index_in(of["modality"], value_set=pa.array(modalities, pa.string())).cast(pa.int16())
    fields = INDEX_SCHEMA.field("items").type.value_type
    placed = pa.StructArray.from_arrays([number, lists(counts["at"])[1], of["size"]], fields=list(fields))
    columns = [counts["text_tokens"], rows["bytes"], pa.ListArray.from_arrays(edges, placed), counts["turns"]]
    schema = index_schema(turns)
    return pa.Table.from_arrays(columns[: len(schema)], schema=schema)


def lists(column: pa.ChunkedArray) -> tuple[pa.Array, pa.Array]:
    """The offsets of a column of lists, from 0 on, and the values of all of them."""
    array = column.combine_chunks()
    offsets = array.offsets.to_numpy()
    return pa.array(offsets - offsets[0] if len(offsets) else [0], pa.int32()), array.flatten()


def write_table(file: Path, rows: list[dict[str, Any]], schema: pa.Schema, notes: bytes = b"") -> None:
    """Write rows as one record batch, with notes beside the schema."""
    noted = schema.with_metadata({"notes": notes})
    with pa.ipc.new_file(str(file), noted) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=noted))


def read_table(file: Path) -> tuple[pa.Table, bytes]:
    """The rows and notes of `write_table`. Raises pyarrow's errors and OSError."""
    with pa.memory_map(str(file)) as mapped:
        table = pa.ipc.open_file(mapped).read_all()
    notes: bytes = table.schema.metadata[b"notes"]
    return table.replace_schema_metadata(None), notes
