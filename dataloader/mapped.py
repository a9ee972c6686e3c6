"""Rows of a memory-mapped Arrow file, one at a time."""

import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dataloader.format import DataError

Getter = Callable[[int], Any]
"""From the number of a row to its value."""
_AGAIN_S = 0.001  # after which a file is looked at again


class HeldFile:
    """A file of so many bytes that is held open while it is mapped, to see whether it is still that one: to
    read a map of a file that was cut would kill the process. Raises OSError if it cannot be opened.
    """

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._handle = os.open(name, os.O_RDONLY)
        self._fresh_until = 0.0
        weakref.finalize(self, os.close, self._handle)

    def check(self) -> None:
        """Raise DataError if the file was cut, or removed, a millisecond ago or before: looking at it costs
        as much as a row, and it may be cut right after a look, too.
        """
        now = time.monotonic()
        if now < self._fresh_until:
            return
        try:
            found = os.fstat(self._handle)
        except OSError as error:  # of a file system that is gone
            raise DataError(f"{self._name}: {error.strerror}: it was there when the run began") from error
        if found.st_nlink == 0:
            raise DataError(f"{self._name}: it was there when the run began, and was removed or replaced")
        if found.st_size != self._size:
            raise DataError(
                f"{self._name} is {found.st_size} bytes, and was {self._size} when it was opened: it was "
                "changed while it is in use; restore it, and let nothing write to a dataset that is read"
            )
        self._fresh_until = now + _AGAIN_S


class MappedRows:
    """The rows of an Arrow IPC file whose record batches, but the last, are of equal length. Opening reads no
    rows. Safe to share between threads.
    """

    def __init__(self, file: Path, schema: pa.Schema, rows: int | None, remedy: str) -> None:
        """Map a file. Raises DataError, saying the remedy, if it is damaged, has other columns or not `rows`
        rows; None takes any number.
        """
        self._name = str(file)
        self._lock = threading.Lock()
        self._batches: dict[int, tuple[tuple[str, Getter], ...]] = {}
        try:
            self._held = HeldFile(self._name, os.stat(self._name).st_size)
            self._file = pa.ipc.open_file(pa.memory_map(self._name))
            if self._file.schema != schema or self._file.num_record_batches == 0:
                raise ValueError("it lacks columns, or rows")
            self._rows = self._file.get_batch(0).num_rows
            last = self._file.num_record_batches - 1
            self.num_rows = last * self._rows + self._file.get_batch(last).num_rows
            if rows not in (None, self.num_rows):
                raise ValueError(f"it has {self.num_rows} rows of {rows}")
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{self._name}: {error}; {remedy}") from error

    def row(self, i: int) -> dict[str, Any]:
        """The values of row `i`, 0 ≤ i < num_rows, by column. Raises DataError if the file was changed."""
        self._held.check()
        number, row = divmod(i, self._rows)
        columns = self._batches.get(number) or self._opened(number)
        return {name: get(row) for name, get in columns}

    def _opened(self, number: int) -> tuple[tuple[str, Getter], ...]:
        with self._lock:
            batch = self._file.get_batch(number)
        columns = self._batches[number] = tuple(zip(batch.schema.names, map(getter, batch), strict=True))
        return columns


def getter(array: pa.Array) -> Getter:
    """Return what gives the value of a row of a whole array, as its `to_pylist` does: at a fifth of its cost,
    since a row has few values. Takes integers, strings, structs and lists of these.
    """
    assert array.offset == 0, "a part of an array shares the buffers of the whole"
    get = _value_of(array)
    if array.null_count == 0:
        return get
    valid = np.asarray(array.is_valid())
    return lambda row: get(row) if valid[row] else None


def _value_of(array: pa.Array) -> Getter:
    kind = array.type
    if pa.types.is_struct(kind):
        fields = [(kind.field(at).name, getter(array.field(at))) for at in range(kind.num_fields)]
        return lambda row: {name: get(row) for name, get in fields}
    if pa.types.is_list(kind):
        edges, get = array.offsets.to_numpy().data, getter(array.values)
        return lambda row: [get(at) for at in range(edges[row], edges[row + 1])]
    if pa.types.is_string(kind):
        _, places, content = array.buffers()
        ends, text = np.frombuffer(places, np.int32).data, memoryview(content or b"")
        return lambda row: str(text[ends[row] : ends[row + 1]], "utf-8")
    values: Any = np.frombuffer(array.buffers()[1] or b"", kind.to_pandas_dtype()).data
    return lambda row: values[row]
