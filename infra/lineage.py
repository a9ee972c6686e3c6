"""Processes that end together: a child ends when the process that started it does, however that ended.

A parent that is killed by SIGKILL cannot tell its children. So each child of a launch asks the kernel, as
the first thing it does, to be killed with its parent: the agent with the launcher, ranks with their agent,
planner processes with their rank. When a child asks, its parent may be gone already; therefore whoever starts
a child hands it the own process number, under STARTED_BY, to compare.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

STARTED_BY = "OMNI_STARTED_BY"
KILLED_S = 10.0  # for a process to end after SIGKILL: longer takes one that hangs in a call of the kernel
_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0


def end_with_parent(parent: int | None = None) -> None:
    """Have this process killed by SIGKILL when `parent` ends, at once if it has ended before.

    `parent` is taken from the environment if it is not given, and from there removed; else it is the parent
    of now. To the kernel, the end of the thread that started this process is the end of the parent: start
    children from a thread that stays. On systems other than Linux a thread looks every second.
    """
    named = os.environ.pop(STARTED_BY, None)
    if parent is None:
        parent = int(named) if named else os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before the request
        _end()


def outlives_parent(parent: int) -> bool:
    """Whether `parent`, which started this process, has ended though nothing says that it may.

    A process may outlive its parent if it leads a session of its own (setsid) or ignores hang-ups (nohup).
    """
    if os.getppid() == parent:
        return False
    return os.getsid(0) != os.getpid() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


def unended(what: str, pids: Sequence[int]) -> str:
    """Say that processes have not ended though they were killed."""
    numbers = ", ".join(map(str, pids))
    return (
        f"{what} has not ended in {KILLED_S:g} s after SIGKILL (process {numbers}): it hangs in a call of "
        f"the kernel, such as to a file system or a driver that does not answer, and ends when that is "
        f"mended. Nobody waits for it any longer"
    )


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    _end()


def _end() -> None:
    os._exit(128 + signal.SIGKILL)
