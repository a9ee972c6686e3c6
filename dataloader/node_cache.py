"""Tables that the ranks of a machine make once: Arrow files in a folder that they share, bounded in bytes.

    rank 0: group 7 is not there: reads and decodes it, leaves it     (1 read of the source)
    rank 1: asks for group 7 meanwhile: waits, and maps the file      (none)
    rank 2: asks for group 7 later: maps the file                     (none)

What is read of a compressed file is a whole row group, of which each rank needs a few rows. Plans of steps
lie in a folder of their own. Whoever comes first holds a lock (flock), which ends with its process, while the
others wait. Whatever goes wrong with the folder, such as a full disk, costs what it saves and no more.
"""

import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa

from dataloader.locks import take

WAIT_S = 120.0  # how long a rank waits for one that makes a table, before it makes it, too
_LOOK_S = 0.01
_LOCKS = 64  # files to lock: tables share them, so that their number is bounded
_ENDING = ".arrow"


class NodeCache:
    """Tables by key in `folder`, which is made for the first of them: of `most_bytes` at most, and of half of
    what would be free on its disk without them. The least recently opened go first. `say` is told once what
    is wrong with the folder. Safe to share between threads and processes of one user.
    """

    def __init__(self, folder: Path, most_bytes: int, say: Callable[[str], None] = print) -> None:
        self.folder = folder
        self._most_bytes = most_bytes
        self._say = say
        self._said = False
        self._made = False

    def table(self, key: Sequence[object], make: Callable[[], pa.Table]) -> pa.Table:
        """The table of a key, which must name all that it depends on, such as the size and time of its file.
        If no rank has it, what `make` returns, or the error that it raises.
        """
        if not self._ready():
            return make()
        path = self._path(key)
        found = self._open(path)
        if found is not None:
            return found
        with self._alone(int(path.stem[:8], 16) % _LOCKS):
            found = self._open(path)  # made by another meanwhile
            if found is not None:
                return found
            table = make()
            self._keep(path, table)
        return table

    def drop(self, key: Sequence[object]) -> None:
        """Remove the table of a key, which nobody will ask for any more. Who has opened it keeps it."""
        with suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: Sequence[object]) -> Path:
        return self.folder / (blake2b(repr(tuple(key)).encode(), digest_size=16).hexdigest() + _ENDING)

    def _ready(self) -> bool:
        """Make the folder before its first use; where that fails, it is not asked again."""
        if self._most_bytes and not self._made:
            try:
                make_own(self.folder)
                self._made = True
            except OSError as error:
                self.tell(error)
                self._most_bytes = 0
        return self._made

    def _open(self, path: Path) -> pa.Table | None:
        """Map a table. A file that is none, such as one that a crash of the machine has left, is removed."""
        try:
            with pa.memory_map(str(path)) as mapped:
                table = pa.ipc.open_file(mapped).read_all()
            table.validate(full=True)
            os.utime(path)
        except FileNotFoundError:
            return None
        except (pa.ArrowException, OSError):
            with suppress(OSError):
                path.unlink()
            return None
        return table

    @contextmanager
    def _alone(self, number: int) -> Iterator[None]:
        """Hold a lock, or go on without where it cannot be had in time."""
        path = self.folder / f"{number}.lock"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            self.tell(error)
            yield
            return
        try:
            self._wait_for(handle, path)
            yield
        finally:
            os.close(handle)

    def _wait_for(self, handle: int, path: Path) -> None:
        end = time.monotonic() + WAIT_S
        try:
            while not take(handle, path) and time.monotonic() < end:
                time.sleep(_LOOK_S)
        except TimeoutError as error:  # each further table would wait as long
            self.tell(error)
            self._most_bytes, self._made = 0, False
        except OSError as error:  # a file system without locks
            self.tell(error)

    def _keep(self, path: Path, table: pa.Table) -> None:
        # Never written in place: a map of a file that is cut would kill its process.
        part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        try:
            if not self._has_room(table.nbytes):
                raise OSError(f"no room for a table of {table.nbytes:,} bytes")
            with pa.OSFile(str(part), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
            os.replace(part, path)
        except (pa.ArrowException, OSError) as error:
            with suppress(OSError):
                part.unlink()
            self.tell(error)

    def _has_room(self, size: int) -> bool:
        """Remove the tables that were opened longest ago until there is room for one of `size` bytes."""
        files = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if not entry.name.endswith(".lock"):
                    with suppress(FileNotFoundError):  # removed by another rank
                        found = entry.stat()
                        files.append((found.st_mtime_ns, found.st_size, entry.path))
        held = sum(size_of for _, size_of, _ in files)
        most = min(self._most_bytes, (shutil.disk_usage(self.folder).free + held) // 2)
        for _, size_of, path in sorted(files) if size <= most else ():
            if held + size <= most:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            held -= size_of
        return held + size <= most

    def tell(self, error: Exception) -> None:
        """Say what is wrong with the folder, once."""
        if not self._said:
            self._said = True
            self._say(
                f"ranks of a node cannot share what lies in {self.folder} ({error}): each makes it by "
                "itself, which takes longer; make room there, or set data.cache_dir or data.cache_gb=0"
            )


def cache_folder(given: str | None) -> Path:
    """The folder that is given, or this user's below the machine's folder for temporary files."""
    return Path(given or Path(tempfile.gettempdir()) / f"omni-cache-{os.getuid()}")


def make_own(folder: Path) -> None:
    """Make a folder that nobody else can write to. Raises OSError if it is somebody else's."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to another user, or others may write to it")
