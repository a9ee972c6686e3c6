"""The folder in which torchrun keeps what it knows of workers, below that for temporary files.

An agent that is killed leaves it. So each holds a lock on a file in its own, which ends with its process, and
folders that nobody holds are removed by the launcher and by the next agent of the user on this machine.
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dataloader.locks import take

PREFIX = "omni-agent-"
_USED = "used"


@contextmanager
def agent_folder() -> Iterator[str]:
    """Make a folder of this process, which is there until the block ends."""
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
        path = Path(folder) / _USED
        with path.with_suffix(".new").open("w") as file:
            with suppress(OSError):  # a file system without locks: then nobody removes the folder either
                take(file.fileno(), path)
                os.rename(file.name, path)  # a file of this name has its lock from the first moment on
            yield folder


def remove_unused() -> None:
    """Remove the folders of this user whose processes have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # removed meanwhile, or not locked since it is about to be used
            found = folder.lstat()
            if found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode):
                with (folder / _USED).open() as file:
                    if take(file.fileno(), folder / _USED):
                        shutil.rmtree(folder, ignore_errors=True)
