"""Reading samples back from a dataset's shards, by row group, with a bounded cache."""

import bisect
import threading
from collections import OrderedDict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dataloader.format import ITEM_COLUMNS, TEXT_COLUMNS, DataError, Item, Sample, read_manifest

_OPEN_SHARDS = 16  # a dataset may have more shards than a process may have files open


class Reader:
    """Random access to the samples of one dataset; safe to share between threads.

    Text and item columns are read separately, a row group at a time, and the least recently used are
    forgotten: of each the cache holds as many groups as a stream shuffles together (`window_groups`) and a
    quarter more, since those of a window that is left are not read again in an epoch, and at most
    `cache_bytes` in all. `bytes_read` counts the bytes of the column chunks read from disk so far.
    """

    def __init__(self, path: str | Path, window_groups: int = 64, cache_bytes: int = 256 << 20) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        self.bytes_read = 0
        self._cache_bytes = cache_bytes
        self._cache_tables = 2 * (window_groups + -(-window_groups // 4))  # texts and items
        self._cached = 0
        self._cache: OrderedDict[tuple[int, tuple[str, ...]], pa.Table] = OrderedDict()
        self._open: OrderedDict[int, pq.ParquetFile] = OrderedDict()
        self._lock = threading.Lock()
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
            values = self._row(group, row, TEXT_COLUMNS)
            targets = values["targets"]
            spans = None if targets is None else tuple((t["start"], t["stop"]) for t in targets)
            sample = Sample(values["id"], values["text"], (), spans)
        if items:
            values = self._row(group, row, ITEM_COLUMNS)
            found = tuple(
                Item(v["modality"], v["format"], tuple(v["size"]), v["data"]) for v in values["items"] or ()
            )
            sample = Sample(values["id"], sample.text, found, sample.targets)
        return sample

    def close(self) -> None:
        """Close the shards and forget the cache."""
        with self._lock:
            for file in self._open.values():
                file.close()
            self._open.clear()
            self._cache.clear()
            self._cached = 0

    def _row(self, group: int, row: int, columns: tuple[str, ...]) -> dict:
        with self._lock:
            table = self._group(group, columns)
        try:
            return table.slice(row, 1).to_pylist()[0]
        except ValueError as error:  # text that is not UTF-8
            raise self._damaged(group, error) from error

    def _group(self, group: int, columns: tuple[str, ...]) -> pa.Table:
        key = (group, columns)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        shard = self._shard_of(group)
        local = group - self._first_rows[shard] // self.manifest.rows_per_group
        try:
            file = self._shard(shard)
            expected = min(
                self.manifest.rows_per_group,
                self.manifest.num_samples - group * self.manifest.rows_per_group,
            )
            if file.num_row_groups <= local or file.metadata.row_group(local).num_rows != expected:
                raise ValueError(f"it should hold {expected} rows")
            table = file.read_row_group(local, columns=list(columns), use_threads=False)
            self.bytes_read += _chunk_bytes(file.metadata.row_group(local), columns)
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise self._damaged(group, error) from error
        self._cache[key] = table
        self._cached += table.nbytes
        while len(self._cache) > 1 and (
            self._cached > self._cache_bytes or len(self._cache) > self._cache_tables
        ):
            _, evicted = self._cache.popitem(last=False)
            self._cached -= evicted.nbytes
        return table

    def _shard_of(self, group: int) -> int:
        return bisect.bisect_right(self._first_rows, group * self.manifest.rows_per_group) - 1

    def _shard(self, shard: int) -> pq.ParquetFile:
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        # Not memory-mapped: a file cut short under a map kills the process instead of raising.
        file = pq.ParquetFile(
            self.path / self.manifest.shards[shard].file, pre_buffer=False, page_checksum_verification=True
        )
        self._open[shard] = file
        if len(self._open) > _OPEN_SHARDS:
            self._open.popitem(last=False)[1].close()
        return file

    def _damaged(self, group: int, error: Exception) -> DataError:
        shard = self._shard_of(group)
        local = group - self._first_rows[shard] // self.manifest.rows_per_group
        file = self.path / self.manifest.shards[shard].file
        return DataError(
            f"{file}, row group {local}: cannot be read ({error}); "
            "restore the file or rebuild with omni data build --overwrite"
        )


def _chunk_bytes(group: pq.RowGroupMetaData, columns: tuple[str, ...]) -> int:
    chunks = (group.column(c) for c in range(group.num_columns))
    return sum(c.total_compressed_size for c in chunks if c.path_in_schema.split(".")[0] in columns)
