"""Rows of a memory-mapped Arrow file, one at a time."""

import os
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa

from dataloader.format import DataError


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
        self._batches: dict[int, pa.RecordBatch] = {}
        try:
            self._size = os.stat(self._name).st_size
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
        try:
            size = os.stat(self._name).st_size
        except OSError as error:
            raise DataError(f"{self._name}: {error.strerror}: it was there when the run began") from error
        if size != self._size:  # to read a file that was cut under its map would kill the process
            raise DataError(f"{self._name} was changed while it is in use: restore it, or write it anew")
        number, row = divmod(i, self._rows)
        with self._lock:
            batch = self._batches.get(number)
            if batch is None:
                batch = self._batches[number] = self._file.get_batch(number)
        values: dict[str, Any] = batch.slice(row, 1).to_pylist()[0]
        return values
