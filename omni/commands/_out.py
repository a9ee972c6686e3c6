"""Where a command is to write: looked at before it works for it."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_out(option: str, out: str | Path | None, *, folder: bool = False) -> None:
    """Refuse a file, or a folder, in which nothing can be written; what is above it may be missing. None is
    not asked for.

    Raises:
        ConfigError: naming the option, its value, and the folder that takes nothing.
    """
    from omni.config import ConfigError

    if out is None:
        return
    path = Path(out).absolute()
    if path.is_dir() and not folder:
        raise ConfigError(f"{option} {out}: is a folder: name a file")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError(f"{option} {out}: is a device or a pipe, which a file would replace: name a file")
    there = next(each for each in (path, *path.parents) if each.exists() and (folder or each != path))
    try:
        with TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(
            f"{option} {out}: nothing can be written in {there} ({error.strerror}): name another place"
        ) from error


@contextmanager
def writing(option: str, out: str | Path | None) -> Iterator[None]:
    """Write to `out`, if anything: a disk that is full, or takes no file of that size, is told by its place.

    Raises:
        OSError: naming the option, its value and the remedy.
    """
    try:
        yield
    except OSError as error:
        if out is None or error.errno not in _FULL:
            raise
        raise OSError(
            f"{option} {out}: cannot be written: {os.strerror(error.errno)}. Make room there or name another "
            f"place; what was there is as it was"
        ) from error


def make_room(out: Path) -> Path:
    """Make the folder of a file that is to be written, and return the file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    return out
