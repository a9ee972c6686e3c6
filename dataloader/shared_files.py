"""What all readers of a rank share: a cache bounded in bytes, open files bounded in number, and their counts.

Reading holds no lock, so that threads wait for a slow store side by side. What several of them ask for at
once is read once.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import pyarrow as pa

from dataloader.node_cache import NodeCache

CACHE_BYTES = 256 << 20
_IDLE_FILES = 64  # open and not in use: sources may have more files than a process may have open

V = TypeVar("V")


class SharedFiles:
    """Files that are read, and what is kept of them; safe to share between threads.

    The cache holds at most `cache_bytes`, or one value that is larger; the least recently used go first.
    Tables are looked for in that of the `node`, too, if there is one. `bytes_read` counts what was read of
    files so far, without those of the node's cache, `cached_bytes` what the own cache holds now.
    """

    def __init__(
        self,
        cache_bytes: int = CACHE_BYTES,
        open_file: Callable[[str], pa.NativeFile] = pa.OSFile,
        node: NodeCache | None = None,
    ) -> None:
        self.bytes_read = 0
        self.cached_bytes = 0
        self._cache_bytes = cache_bytes
        self._open_file = open_file
        self._node = node
        self._cache: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._making: dict[Any, Future[Any]] = {}
        self._idle: OrderedDict[str, list[pa.NativeFile]] = OrderedDict()  # the last read path last
        self._num_idle = 0
        self._lock = threading.Lock()

    def cached(self, key: Any, make: Callable[[], tuple[V, int]]) -> V:
        """Return what `make` returns for a key, a value and its size in bytes, from the cache if it is there.
        Of threads that ask at once one calls `make`, and all get its value, or the error that it raised.
        """
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                value: V = self._cache[key][0]
                return value
            under_way = self._making.get(key)
            own: Future[V] = Future()
            if under_way is None:
                self._making[key] = own
        if under_way is not None:
            value = under_way.result()
            return value
        try:
            value, size = make()
        except BaseException as error:
            with self._lock:
                del self._making[key]
            own.set_exception(error)
            raise
        with self._lock:
            del self._making[key]
            self._keep(key, value, size)
        own.set_result(value)
        return value

    def table(
        self, key: Sequence[object], identity: Callable[[], Sequence[object]], make: Callable[[], pa.Table]
    ) -> pa.Table:
        """The table of a key that `make` reads of a file, which the `identity` tells from another of its
        name; from a cache if it is there. Raises as these do.
        """

        def found() -> tuple[pa.Table, int]:
            table = make() if self._node is None else self._node.table((*key, *identity()), make)
            return table, table.nbytes

        return self.cached(tuple(key), found)

    @contextmanager
    def opened(self, path: str) -> Iterator[pa.NativeFile]:
        """A file that nobody else uses meanwhile. Raises OSError."""
        with self._lock:
            idle = self._idle.get(path)
            file = idle.pop() if idle else None
            self._num_idle -= file is not None
        if file is None:
            file = self._open_file(path)
        try:
            yield file
        except BaseException:
            file.close()
            raise
        oldest = None
        with self._lock:
            self._idle.setdefault(path, []).append(file)
            self._idle.move_to_end(path)
            self._num_idle += 1
            if self._num_idle > _IDLE_FILES:
                oldest = self._forget_oldest()
        if oldest is not None:
            oldest.close()

    def _forget_oldest(self) -> pa.NativeFile:
        """Take a file out of those that nobody uses: of the path that was read longest ago."""
        while True:
            path, files = next(iter(self._idle.items()))
            if files:
                self._num_idle -= 1
                return files.pop()
            del self._idle[path]

    def count(self, size: int) -> None:
        """Count bytes that were read."""
        with self._lock:
            self.bytes_read += size

    def close(self) -> None:
        """Close the files that nobody uses, and forget the cache."""
        with self._lock:
            idle, self._idle = self._idle, OrderedDict()
            self._num_idle = 0
            self._cache.clear()
            self.cached_bytes = 0
        for file in (file for files in idle.values() for file in files):
            file.close()

    def _keep(self, key: Any, value: Any, size: int) -> None:
        self._cache[key] = (value, size)
        self.cached_bytes += size
        while len(self._cache) > 1 and self.cached_bytes > self._cache_bytes:
            self.cached_bytes -= self._cache.popitem(last=False)[1][1]
