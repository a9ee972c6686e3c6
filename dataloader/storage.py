"""Where checkpoints and data lie: a folder of any file system that fsspec knows, local, shared or a store.

Object stores cannot rename or append, so neither is asked for: a file is written once and whole. On a local
file system a write is on the disk when it returns.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

SYNCED = 256 * 2**20  # bytes that a local file system may hold in memory while a file is written
REMOVED = 100  # files of a store that are removed at once: many stores take them in one request
_TAGS = ("ETag", "etag", "md5Hash", "content_md5", "sha256")  # what file systems call a name for content


@dataclass(frozen=True)
class Storage:
    """The folder `root` of a file system. Names are paths below it, with slashes. Making one touches nothing.

    Whatever fails raises OSError; what is not there, FileNotFoundError.
    """

    fs: AbstractFileSystem
    root: str

    @classmethod
    def at(cls, url: str | Path) -> Self:
        """Return the storage at a path, or at a URL such as s3://bucket/folder. A path may hold
        any characters.

        Raises:
            ValueError: for a protocol that fsspec does not know, or whose package is not installed; for a
                chain of URLs, of which fsspec would take one and drop the others; and for a password, since
                URLs are written to run folders, indexes and logs.
        """
        if isinstance(url, Path) or "://" not in url:
            return cls(LocalFileSystem(), os.path.abspath(os.path.expanduser(url)).rstrip("/"))
        if urlsplit(url).password is not None:
            raise ValueError(
                "its URL holds a password, which would be written to files and logs: leave it out there, and "
                "give it to fsspec (~/.config/fsspec) or in the environment"
            )
        try:
            if "::" in url:
                raise ValueError("it has ::, which chains several URLs; give one")
            fs, root = url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ValueError(f"{url} is nowhere that checkpoints can be kept: {error}") from error
        return cls(fs, root.rstrip("/"))

    def __str__(self) -> str:
        return self.root if self.is_local else str(self.fs.unstrip_protocol(self.root))

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of this machine, shared file systems that are mounted here among them."""
        return "file" in (self.fs.protocol if isinstance(self.fs.protocol, tuple) else (self.fs.protocol,))

    def path(self, name: str) -> str:
        """The full path of a name, for the file system."""
        return f"{self.root}/{name}"

    def locate(self, name: str) -> str:
        """Where a name lies, for people and trackers: a path of this machine, or a URL."""
        return f"{self}/{name}"

    def sizes(self, folder: str = "") -> dict[str, int | None]:
        """The names in a folder with the bytes of each, None for folders. What is no folder is empty."""
        self.fs.invalidate_cache()  # other ranks and other runs write, too
        try:
            found = self.fs.ls(self.path(folder).rstrip("/"), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {
            entry["name"].rstrip("/").rpartition("/")[2]: None
            if entry["type"] == "directory"
            else entry["size"]
            for entry in found
        }

    def identity(self, name: str) -> tuple[int, str]:
        """The bytes of a file, and the store's name for its content, "" where it has none. What is there and
        no file is an IsADirectoryError.
        """
        info = self.fs.info(self.path(name))
        if info["type"] != "file":
            raise IsADirectoryError(f"{self.locate(name)} is no file")
        return _identity(info)

    def listing(self) -> dict[str, tuple[int, str]]:
        """All files below the root by name, in order, with what `identity` says of each."""
        self.fs.invalidate_cache()
        found = self.fs.find(self.root, detail=True)
        below = len(self.root) + 1
        return {path[below:]: _identity(found[path]) for path in sorted(found)}

    def holds(self, name: str) -> bool:
        """Whether there is a file of this name."""
        self.fs.invalidate_cache()
        return bool(self.fs.isfile(self.path(name)))

    def read(self, name: str) -> bytes:
        """The content of a file."""
        return bytes(self.fs.cat_file(self.path(name)))

    def open(self, name: str) -> Any:
        """A binary file to seek and read in; only what is asked for is fetched."""
        if self.is_local:
            return open(self.path(name), "rb")
        return self.fs.open(self.path(name), "rb", cache_type="none")

    def write(self, name: str, parts: Iterable[Any]) -> None:
        """Write a file of `parts`, which are buffers, one after the other. Its folder is made if need be.

        The next part is asked for when those before are written, and on a local file system all but SYNCED
        bytes of them are on the disk: that a part is asked for is progress of the store.
        """
        path = self.path(name)
        self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self.fs.open(path, "wb") as file:
            pending = 0
            for part in parts:
                file.write(part)
                pending += memoryview(part).nbytes
                if self.is_local and pending >= SYNCED:
                    file.flush()
                    os.fsync(file.fileno())
                    pending = 0
            if self.is_local:
                file.flush()
                os.fsync(file.fileno())

    def commit(self, name: str, content: bytes) -> None:
        """Write a file that is there as a whole or not at all, after all that was written to its folder."""
        if not self.is_local:
            self.write(name, (content,))
            return
        path = self.path(name)
        folder = path.rpartition("/")[0]
        os.makedirs(folder, exist_ok=True)
        _sync(folder)  # what is in the folder outlives a crash before the file that vouches for it does
        self.write(f"{name}.tmp", (content,))
        os.replace(f"{path}.tmp", path)
        _sync(folder)
        _sync(folder.rpartition("/")[0])

    def move(self, name: str, other: str) -> None:
        """Give a small file another name."""
        self.commit(other, self.read(name))
        self.fs.rm_file(self.path(name))

    def remove(self, folder: str, first: str, going_on: Callable[[], object] = lambda: None) -> None:
        """Remove a folder, if it is there, and of all in it the file `first` before the rest. Many files may
        take long: `going_on` is called after every one, of a store after every REMOVED.
        """
        with suppress(FileNotFoundError):
            self.fs.rm_file(self.path(f"{folder}/{first}"))
        names = [name for name, size in self.sizes(folder).items() if size is not None]
        at_once = 1 if self.is_local else REMOVED
        for at in range(0, len(names), at_once):
            with suppress(FileNotFoundError):
                self.fs.rm([self.path(f"{folder}/{name}") for name in names[at : at + at_once]])
            going_on()
        with suppress(FileNotFoundError):
            self.fs.rm(self.path(folder), recursive=True)


def _identity(info: dict[str, Any]) -> tuple[int, str]:
    """What `identity` says, from fsspec's `info`."""
    tag = next((str(info[key]) for key in _TAGS if info.get(key)), "")
    return int(info["size"]), tag.strip('"')


def _sync(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
