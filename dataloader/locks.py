"""Locks of files that end with the process that holds them (flock), where no file system is waited for for
ever: one whose lock server is gone answers nobody, not even who asks without waiting.
"""

import fcntl
from pathlib import Path

from dataloader.within import within

ANSWER_S = 10.0  # for a file system to say whether a file is locked, which takes it milliseconds


def take(handle: int, path: Path) -> bool:
    """Lock the open file `path`, unless another process holds it; whether it is locked by this one now. The
    lock goes with the `handle`.

    Raises:
        TimeoutError: naming the file and the remedy, if the file system does not answer.
        OSError: if it has no locks.
    """
    try:
        within(ANSWER_S, lambda: fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except TimeoutError as error:
        raise TimeoutError(
            f"the file system has not said in {ANSWER_S:g} s whether {path} is locked: mend its lock service "
            f"or use a folder of another file system"
        ) from error
    return True
