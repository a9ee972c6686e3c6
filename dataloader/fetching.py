"""Ranges of files that lie anywhere: neighbours in one read, again where a store fails, and not for ever."""

import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from dataloader.shared_files import SharedFiles
from dataloader.storage import Storage
from dataloader.within import within

Range = tuple[int, int]  # where it begins, and its bytes
T = TypeVar("T")

NEAR = 64 << 10  # bytes between ranges that are read with them of a store, where a request costs as much
ATTEMPT_S = 20.0  # how long one request may take,
DEADLINE_S = 90.0  # and all that repeat it
_AHEAD = 8 << 20  # the most bytes that one request asks for of a file that is gone through
_PAUSE_S = 0.1  # before the first repetition; twice as long before each further one
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


class StoreError(OSError):
    """A store gave no answer, or none but errors, for as long as it was asked."""


def is_of_machine(error: Exception) -> bool:
    """Whether an error is of a store or this machine, such as a failing disk, not of what a file holds."""
    return isinstance(error, StoreError) or (isinstance(error, OSError) and error.errno is not None)


class Fetcher:
    """Reads ranges of the files of a storage. Files of this machine stay open in `files`, whose count of
    bytes all reads add to. Safe to share between threads.
    """

    def __init__(
        self,
        storage: Storage,
        files: SharedFiles,
        attempt_s: float = ATTEMPT_S,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.storage = storage
        self._files = files
        self._is_local = storage.is_local
        self._identities: dict[str, tuple[int, str]] = {}
        self._attempt_s = attempt_s
        self._deadline_s = deadline_s

    def ranges(self, name: str, places: Sequence[Range]) -> list[bytes]:
        """The bytes of ranges of a file, in their order. Of a store those that lie near each other are read
        together; of a file of this machine the kernel does that, and what is read need not be cut out again.

        Raises OSError if they cannot be read by the deadline, FileNotFoundError if there is no such file,
        ValueError if it ends before one of them does.
        """
        if self._is_local:
            found = contents = self._read(name, places)
        else:
            found, reads = [b""] * len(places), list(joined(places, NEAR))
            contents = self._read(name, [(at, stop - at) for at, stop, _ in reads])
            for (start, _, numbers), content in zip(reads, contents, strict=True):
                for number in numbers:
                    at, size = places[number]
                    found[number] = content[at - start : at - start + size]
        self._files.count(sum(map(len, contents)))
        return found

    def group(self, name: str, group: int, columns: Sequence[str]) -> pa.Table:
        """Columns of a row group of a Parquet file, as they are kept in the cache of `files`; raises as
        `ranges`.
        """
        path = self.storage.path(name)

        def read(file: Any) -> pa.Table:
            parquet = pq.ParquetFile(file, pre_buffer=not self._is_local)
            if group >= parquet.num_row_groups:
                raise ValueError(f"{name} has {parquet.num_row_groups} row groups")
            table = parquet.read_row_group(group, columns=list(columns), use_threads=False)
            self._files.count(chunk_bytes(parquet.metadata.row_group(group), columns))
            return table

        def once() -> pa.Table:
            with self.storage.open(name) as file:
                return read(file)

        def make() -> pa.Table:
            try:
                return self._files.read(path, read) if self._is_local else self._again(name, once)
            except pa.ArrowException as error:
                raise OSError(f"{name}: {error}") from error

        key = (str(self.storage), name, group, *columns)
        return self._files.table(key, lambda: self._identity(name), make)

    def _identity(self, name: str) -> tuple[object, ...]:
        """What tells a file from another that has its name."""
        if self._is_local:
            return file_identity(self.storage.path(name))
        if name not in self._identities:
            self._identities[name] = self.known(name)
        return self._identities[name]

    def known(self, name: str) -> tuple[int, str]:
        """The bytes of a file, and the name that its store has for its content, "" where it has none; raises
        as `ranges`.
        """
        if self._is_local:
            return self.storage.identity(name)
        return self._again(name, lambda: self.storage.identity(name))

    def _read(self, name: str, reads: Sequence[Range]) -> list[bytes]:
        path = self.storage.path(name)
        try:
            if self._is_local:
                return self._files.read(
                    path, lambda file: [_whole(at, size, file.read_at(size, at)) for at, size in reads]
                )
            return [self._again(name, partial(self._ask, path, at, size)) for at, size in reads]
        except _ShortError as error:
            raise ValueError(f"{name}: {error}: it is cut, or another file") from error
        except pa.ArrowException as error:
            raise OSError(f"{name}: {error}") from error

    def _ask(self, path: str, at: int, size: int) -> bytes:
        """What a store gives of a file."""
        return _whole(at, size, self.storage.fs.cat_file(path, start=at, end=at + size) if size else b"")

    def _again(self, name: str, once: Callable[[], T]) -> T:
        """What `once` returns, at the first time that it does in time. What lasts is raised as it is."""
        end = time.monotonic() + self._deadline_s
        pause = _PAUSE_S
        while True:
            try:
                return within(min(self._attempt_s, max(0.0, end - time.monotonic())), once)
            except _LASTING:
                raise
            except Exception as error:  # each store has errors of its own
                if time.monotonic() + pause > end:
                    if isinstance(error, _ShortError):
                        raise
                    raise StoreError(
                        f"{name}: the store gave nothing in {self._deadline_s:g} s; at last: "
                        f"{type(error).__name__}: {error}"
                    ) from error
            time.sleep(pause)
            pause *= 2


def _whole(at: int, size: int, content: Any) -> bytes:
    if len(content) != size:
        raise _ShortError(f"from byte {at} on {len(content)} of {size} bytes came")
    return bytes(content)


def opened(storage: Storage, name: str, ahead: bool = False) -> Any:
    """A binary file to seek and read in. Of a store only what is asked for is read, and with `ahead` what
    follows it; raises as `Fetcher.ranges`.
    """
    if storage.is_local:
        return storage.open(name)
    file = _StoreFile(Fetcher(storage, SharedFiles()), name)
    return io.BufferedReader(file, _AHEAD) if ahead else file


class _StoreFile(io.RawIOBase):
    """A file of a store, of which each read is a request that is repeated where it fails."""

    def __init__(self, fetcher: Fetcher, name: str) -> None:
        self._fetcher = fetcher
        self._name = name
        self._size, _ = fetcher.known(name)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._size - self._at))
        for at in range(0, size, _AHEAD):  # a request for all of a large file would take longer than one may
            count = min(_AHEAD, size - at)
            (buffer[at : at + count],) = self._fetcher.ranges(self._name, [(self._at + at, count)])
        self._at += size
        return size

    def readall(self) -> bytes:
        return self.read(max(0, self._size - self._at)) or b""


def file_identity(path: str) -> tuple[int, int]:
    """The bytes of a file of this machine, and when it was changed. Raises OSError."""
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def chunk_bytes(group: pq.RowGroupMetaData, columns: Sequence[str]) -> int:
    """Bytes that columns of a row group take in its file."""
    chunks = (group.column(c) for c in range(group.num_columns))
    return sum(c.total_compressed_size for c in chunks if c.path_in_schema.split(".")[0] in columns)


class _ShortError(Exception):
    """A store gave fewer bytes than were asked for."""


def joined(places: Sequence[Range], near: int) -> Iterator[tuple[int, int, list[int]]]:
    """Ranges as reads (at, stop, which of the ranges) of those with at most `near` bytes between them."""
    order = sorted(range(len(places)), key=places.__getitem__)
    numbers: list[int] = []
    first = stop = 0
    for number in order:
        at, size = places[number]
        if numbers and at - stop > near:
            yield first, stop, numbers
            numbers = []
        if not numbers:
            first = stop = at
        numbers.append(number)
        stop = max(stop, at + size)
    if numbers:
        yield first, stop, numbers
