"""Reading samples back from a dataset's shards: their own bytes, or the row group that they are in."""

import bisect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dataloader.fetching import Fetcher, chunk_bytes, file_identity
from dataloader.format import ITEM_COLUMNS, TEXT_COLUMNS, TURNS, DataError, Item, Sample
from dataloader.manifest import read_manifest
from dataloader.ranges import RANGES, Marks, is_lost, item_crc, marks_of, open_ranges, text_crc
from dataloader.shared_files import SharedFiles
from dataloader.storage import Storage

_UNMARKED: Marks = (None, None)


class Reader:
    """Random access to the samples of one dataset; safe to share between threads.

    What is asked for of a sample is read, and no more, where the dataset says where its bytes lie
    (`ranges.arrow`). Without that, or if not `ranged`, its texts and its items are read a row group at a
    time, and kept in the cache of `files`, which the readers of a rank share.
    """

    def __init__(self, path: str | Path, files: SharedFiles | None = None, ranged: bool = True) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        self.files = SharedFiles() if files is None else files
        self._fetcher = Fetcher(Storage.at(self.path), self.files)
        self._text_columns = TEXT_COLUMNS + (TURNS.name,) * self.manifest.text.frame.turns
        self._paths = [str(self.path / shard.file) for shard in self.manifest.shards]
        self._first_rows = [0]
        for shard in self.manifest.shards:
            self._first_rows.append(self._first_rows[-1] + shard.rows)
        ranged = ranged and (self.path / RANGES).exists()
        self._ranges = open_ranges(self.path, self.manifest) if ranged else None

    def read(self, i: int, text: bool, items: bool | Sequence[int]) -> Sample:
        """Sample `i` with its text and targets, its items or those of some numbers, or both; what is not
        asked for, or not there, is left out.

        Raises DataError naming file and row group if they cannot be read.
        """
        if not 0 <= i < self.manifest.num_samples:
            raise IndexError(f"{self.path} has {self.manifest.num_samples} samples, there is no sample {i}")
        row = None if self._ranges is None else self._ranges.row(i)
        if row is None or is_lost(row):
            return self._of_group(i, text, items)
        asked = chosen(row["items"] or (), items)
        places = [(one["at"], one["bytes"]) for one in ([row["text"], *asked] if text else asked)]
        content = self._content(i, places)
        said, marks, found = "", _UNMARKED, []
        try:
            if text:
                marks = marks_of(row)
                written = content.pop(0)
                _check(text_crc(written, marks), row["text"]["crc"])
                said = written.decode()
            for one, data in zip(asked, content, strict=True):
                item = Item(one["modality"], one["format"], tuple(one["size"]), data)
                _check(item_crc(item), one["crc"])
                found.append(item)
        except ValueError as error:
            raise self._damaged(i // self.manifest.rows_per_group, error) from error
        return Sample(row["id"], said, tuple(found), *marks)

    def _content(self, i: int, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read bytes (at, size) of the shard of sample `i`, neighbours together."""
        group = i // self.manifest.rows_per_group
        try:
            return self._fetcher.ranges(self.manifest.shards[self._shard_of(group)].file, places)
        except (OSError, ValueError) as error:
            raise self._damaged(group, ValueError(f"by {RANGES}, {error}")) from error

    def _of_group(self, i: int, text: bool, items: bool | Sequence[int]) -> Sample:
        group, row = divmod(i, self.manifest.rows_per_group)
        sample = Sample("", "")
        if text:
            values = self._row(group, row, self._text_columns)
            spans, ends = marks_of(values)
            sample = Sample(values["id"], values["text"], (), spans, ends)
        if items is not False:
            values = self._row(group, row, ITEM_COLUMNS)
            found = tuple(
                Item(v["modality"], v["format"], tuple(v["size"]), v["data"])
                for v in chosen(values["items"] or (), items)
            )
            sample = replace(sample, id=values["id"], items=found)
        return sample

    def _row(self, group: int, row: int, columns: tuple[str, ...]) -> dict[str, Any]:
        table = self.files.table(
            (str(self.path), group, *columns),
            lambda: self._identity(group),
            lambda: self._read(group, columns),
        )
        try:
            values: dict[str, Any] = table.slice(row, 1).to_pylist()[0]
        except ValueError as error:  # text that is not UTF-8
            raise self._damaged(group, error) from error
        return values

    def _identity(self, group: int) -> tuple[int, int]:
        try:
            return file_identity(self._paths[self._shard_of(group)])
        except OSError as error:
            raise self._damaged(group, error) from error

    def _read(self, group: int, columns: tuple[str, ...]) -> pa.Table:
        """Read columns of a row group."""
        shard = self._shard_of(group)
        local = group - self._first_rows[shard] // self.manifest.rows_per_group
        path = self._paths[shard]
        rows = min(
            self.manifest.rows_per_group, self.manifest.num_samples - group * self.manifest.rows_per_group
        )

        def read(source: pa.NativeFile) -> tuple[pa.Table, int]:
            footer = self.files.cached(path, lambda: _footer(source))
            file = pq.ParquetFile(source, metadata=footer, pre_buffer=False, page_checksum_verification=True)
            if file.num_row_groups <= local or footer.row_group(local).num_rows != rows:
                raise ValueError(f"it should hold {rows} rows")
            table = file.read_row_group(local, columns=list(columns), use_threads=False)
            return table, chunk_bytes(footer.row_group(local), columns)

        try:
            # Not memory-mapped: a file cut short under a map kills the process instead of raising.
            table, size = self.files.read(path, read)
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise self._damaged(group, error) from error
        self.files.count(size)
        return table

    def _shard_of(self, group: int) -> int:
        return bisect.bisect_right(self._first_rows, group * self.manifest.rows_per_group) - 1

    def _damaged(self, group: int, error: Exception) -> DataError:
        shard = self._shard_of(group)
        local = group - self._first_rows[shard] // self.manifest.rows_per_group
        return DataError(
            f"{self._paths[shard]}, row group {local}: cannot be read ({error}); "
            "restore the file or rebuild with omni data build --overwrite"
        )


def chosen(values: Sequence[Any], items: bool | Sequence[int]) -> Sequence[Any]:
    """All values, none, or those of the numbers that are there."""
    if isinstance(items, bool):
        return values if items else ()
    return [values[number] for number in items if 0 <= number < len(values)]


def _check(found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"bytes are not those that {RANGES} has counted: remove it if the shard is new")


def _footer(source: pa.NativeFile) -> tuple[pq.FileMetaData, int]:
    footer = pq.read_metadata(source)
    return footer, footer.serialized_size
