"""Processes that tests start."""

import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "OMNI_TEST"  # the variable by which `marked` finds what a test has started, however far below


def heed_signals() -> None:
    """For `preexec_fn`: heed what may be ignored where tests run: nohup ignores SIGHUP, a shell has what runs
    in the background ignore SIGINT.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def marked(folder: Path) -> list[psutil.Process]:
    """Processes that have not ended and in whose environment MARK names a folder. Some that set a title, as
    Ray's do, have overwritten theirs.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            ended = process.status() == psutil.STATUS_ZOMBIE
            if not ended and process.environ().get(MARK) == str(folder):
                found.append(process)
    return found


def end_all(processes: Iterable[psutil.Process]) -> None:
    """Kill what a failed test has left."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
