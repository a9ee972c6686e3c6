"""The screen of a process: others write to it, too, and it may go away, as a pipe that nobody reads or a log
on a full disk. Work goes on then.

What cannot be shown is dropped from then on, with one line in `errors/screen.txt` of the run folder.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any, TextIO

from dataloader.visible import visible
from infra.run_folder import RunFolder

CLEAR_LINE = "\r\x1b[2K"  # of a terminal


def beside(text: str, out: TextIO | None = None) -> None:
    """Write lines to `out`, stderr by default, as a process that does not draw the bar: in one piece, and in
    a terminal in the bar's place, which is drawn anew below them. Control characters are shown as escapes.
    """
    out = sys.stderr if out is None else out
    out.write(f"{CLEAR_LINE if out.isatty() else ''}{visible(text)}\n")
    out.flush()


def show_as_it_can() -> None:
    """Have stdout show a character that its encoding lacks, as of a name in a locale that is not UTF-8, as an
    escape, as stderr does by itself: nothing ends for it.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def going_on(what: str) -> Iterator[None]:
    """Say that `what` a run writes about itself cannot be written, as on a full disk, and go on: that ends no
    training.
    """
    try:
        yield
    except OSError as error:
        beside(f"{what} is not written ({error}): the run goes on")


class Screen:
    """A text stream that stands for `out` and never fails where that does."""

    def __init__(self, out: TextIO, folder: RunFolder) -> None:
        self._out = out
        self._folder = folder
        self._dropped = False

    def write(self, text: str) -> int:
        """Write as `out` does, or drop it."""
        if not self._dropped:
            try:
                return self._out.write(text)
            except OSError as error:
                self._drop(error)
        return len(text)

    def flush(self) -> None:
        """Flush as `out` does, or drop it."""
        if not self._dropped:
            try:
                self._out.flush()
            except OSError as error:
                self._drop(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)

    def _drop(self, error: OSError) -> None:
        name = getattr(self._out, "name", "screen")
        # Python itself flushes the stream when the process ends: what is left in it must go somewhere.
        with suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self._out.fileno())
        self._dropped = True
        text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}: {name} takes no more ({error})"
        with suppress(OSError):
            self._folder.errors.mkdir(parents=True, exist_ok=True)
            with (self._folder.errors / "screen.txt").open("a", encoding="utf-8") as file:
                file.write(f"{text}: what is said there is dropped, the run goes on\n")


def keep_going_without(folder: RunFolder) -> None:
    """Let neither stdout nor stderr of this process end it."""
    show_as_it_can()
    sys.stdout, sys.stderr = Screen(sys.stdout, folder), Screen(sys.stderr, folder)
