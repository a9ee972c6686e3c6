"""What all readers of a rank share: a cache bounded in bytes, open files bounded in number, and their counts.

Reading holds no lock, so that threads wait for a slow store side by side. What several of them ask for at
once is read once.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import pyarrow as pa

from dataloader.node_cache import NodeCache

CACHE_BYTES = 256 << 20
_OPEN_FILES = 64  # kept open: sources may have more files than a process may have open

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
        self._open: OrderedDict[str, pa.NativeFile] = OrderedDict()  # the last read path last
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

    def read(self, path: str, read: Callable[[pa.NativeFile], V]) -> V:
        """What `read` returns of a file, of which threads may read places at once, with `read_at` and as
        Parquet. It stays open, unless that fails; one that was read long ago is forgotten, and closed when
        nobody reads it any more. Raises OSError.
        """
        with self._lock:
            file = self._open.get(path)
            if file is not None:
                self._open.move_to_end(path)
        if file is None:
            file = self._open_file(path)
            with self._lock:
                self._open[path] = file
                if len(self._open) > _OPEN_FILES:
                    self._open.popitem(last=False)
        try:
            return read(file)
        except BaseException:
            with self._lock:
                self._open.pop(path, None)  # it may be another file by then
            raise

    def count(self, size: int) -> None:
        """Count bytes that were read."""
        with self._lock:
            self.bytes_read += size

    def close(self) -> None:
        """Forget all files, and the cache."""
        with self._lock:
            self._open.clear()
            self._cache.clear()
            self.cached_bytes = 0

    def _keep(self, key: Any, value: Any, size: int) -> None:
        self._cache[key] = (value, size)
        self.cached_bytes += size
        while len(self._cache) > 1 and self.cached_bytes > self._cache_bytes:
            self.cached_bytes -= self._cache.popitem(last=False)[1][1]
