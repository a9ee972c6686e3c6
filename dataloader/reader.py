"""Reading samples back from a dataset's shards, by row group."""

import bisect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dataloader.format import ITEM_COLUMNS, TEXT_COLUMNS, TURNS, DataError, Item, Sample, read_manifest
from dataloader.shared_files import SharedFiles


class Reader:
    """Random access to the samples of one dataset; safe to share between threads.

    Text and item columns are read separately, a row group at a time, and kept in the cache of `files`, which
    the readers of a rank share.
    """

    def __init__(self, path: str | Path, files: SharedFiles | None = None) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        self.files = SharedFiles() if files is None else files
        self._text_columns = TEXT_COLUMNS + (TURNS.name,) * self.manifest.text.frame.turns
        self._first_rows = [0]
        for shard in self.manifest.shards:
            self._first_rows.append(self._first_rows[-1] + shard.rows)

    def read(self, i: int, text: bool, items: bool) -> Sample:
        """Sample `i` with its text and targets, its items, or both; what is not asked for is left empty.

        Raises DataError naming file and row group if they cannot be read.
        """
        if not 0 <= i < self.manifest.num_samples:
            raise IndexError(f"{self.path} has {self.manifest.num_samples} samples, there is no sample {i}")
        group, row = divmod(i, self.manifest.rows_per_group)
        sample = Sample("", "")
        if text:
            values = self._row(group, row, self._text_columns)
            targets, turns = values["targets"], values.get(TURNS.name)
            spans = None if targets is None else tuple((t["start"], t["stop"]) for t in targets)
            ends = None if turns is None else tuple(turns)
            sample = Sample(values["id"], values["text"], (), spans, ends)
        if items:
            values = self._row(group, row, ITEM_COLUMNS)
            found = tuple(
                Item(v["modality"], v["format"], tuple(v["size"]), v["data"]) for v in values["items"] or ()
            )
            sample = replace(sample, id=values["id"], items=found)
        return sample

    def _row(self, group: int, row: int, columns: tuple[str, ...]) -> dict[str, Any]:
        name = str(self.path)
        table: pa.Table = self.files.cached((name, group, columns), lambda: self._read(group, columns))
        try:
            values: dict[str, Any] = table.slice(row, 1).to_pylist()[0]
        except ValueError as error:  # text that is not UTF-8
            raise self._damaged(group, error) from error
        return values

    def _read(self, group: int, columns: tuple[str, ...]) -> tuple[pa.Table, int]:
        """Read columns of a row group, and tell how large they are."""
        shard = self._shard_of(group)
        local = group - self._first_rows[shard] // self.manifest.rows_per_group
        path = str(self.path / self.manifest.shards[shard].file)
        try:
            # Not memory-mapped: a file cut short under a map kills the process instead of raising.
            with self.files.opened(path) as source:
                footer = self.files.cached(path, lambda: _footer(source))
                file = pq.ParquetFile(
                    source, metadata=footer, pre_buffer=False, page_checksum_verification=True
                )
                expected = min(
                    self.manifest.rows_per_group,
                    self.manifest.num_samples - group * self.manifest.rows_per_group,
                )
                if file.num_row_groups <= local or footer.row_group(local).num_rows != expected:
                    raise ValueError(f"it should hold {expected} rows")
                table = file.read_row_group(local, columns=list(columns), use_threads=False)
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise self._damaged(group, error) from error
        self.files.count(_chunk_bytes(footer.row_group(local), columns))
        return table, table.nbytes

    def _shard_of(self, group: int) -> int:
        return bisect.bisect_right(self._first_rows, group * self.manifest.rows_per_group) - 1

    def _damaged(self, group: int, error: Exception) -> DataError:
        shard = self._shard_of(group)
        local = group - self._first_rows[shard] // self.manifest.rows_per_group
        file = self.path / self.manifest.shards[shard].file
        return DataError(
            f"{file}, row group {local}: cannot be read ({error}); "
            "restore the file or rebuild with omni data build --overwrite"
        )


def _footer(source: pa.NativeFile) -> tuple[pq.FileMetaData, int]:
    footer = pq.read_metadata(source)
    return footer, footer.serialized_size


def _chunk_bytes(group: pq.RowGroupMetaData, columns: tuple[str, ...]) -> int:
    chunks = (group.column(c) for c in range(group.num_columns))
    return sum(c.total_compressed_size for c in chunks if c.path_in_schema.split(".")[0] in columns)
