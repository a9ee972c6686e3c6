"""A file of JSON lines whose disk may take no more for a while, such as one with a quota: what a run writes
about itself ends no training.
"""

import logging
import os
from pathlib import Path

from infra.run_folder import line_of

KEPT_BYTES = 2**26  # of lines that wait: some ten thousand steps of metrics

logger = logging.getLogger(__name__)


class JsonLines:
    """Appends lines to the file `path`. Lines that its disk does not take wait in memory, KEPT_BYTES of them,
    and are tried again with the next one; a warning says so when the first one waits. Of a line that was cut
    short the rest is written before the next one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._waiting = bytearray()
        self._dropped = 0
        self._said = False

    def append(self, obj: object) -> None:
        """Append `obj` as one line: a killed process loses at most the line that it was writing, and those
        that wait.
        """
        line = line_of(obj).encode()
        self._waiting += line
        try:
            self._write()
        except OSError as error:
            self._say(error)
            if len(self._waiting) > max(KEPT_BYTES, len(line)):
                del self._waiting[-len(line) :]
                self._dropped += 1

    def settle(self) -> None:
        """Have all lines on the disk.

        Raises:
            OSError: if they cannot be written, or some were dropped.
        """
        try:
            self._write()
            os.fsync(self._file.fileno())
        except OSError as error:
            self._say(error)
            raise
        if self._dropped:
            raise OSError(f"{self._dropped} lines were dropped while the disk took none")

    @property
    def is_in_place(self) -> bool:
        """Whether the file is still the one at its path."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except OSError:
            return False

    def close(self) -> None:
        """Write what waits if that can be done, and close the file. What is lost is told."""
        problem: OSError | str = ""
        for act in (self._write, self._file.close):
            try:
                act()
            except OSError as error:
                problem = problem or error
        lost = self._dropped + self._waiting.count(b"\n")
        if problem or lost:
            logger.warning("%s lacks %d lines that its disk did not take. %s", self.path, lost, problem)

    def _write(self) -> None:
        while self._waiting:
            del self._waiting[: self._file.write(self._waiting)]
        self._said = False

    def _say(self, error: OSError) -> None:
        if not self._said:
            self._said = True
            logger.warning("%s cannot be written (%s): its lines wait, the run goes on", self.path, error)
