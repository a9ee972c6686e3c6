"""Break a hang: when a rank stops making progress, say what it was doing and end the process.

A collective that one rank never enters blocks the others for ever and without a word. Ending the process lets
torchrun's agent restart the group from the last checkpoint.
"""

import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from typing import Self, TextIO

EXIT_CODE = 75  # EX_TEMPFAIL: try again
DESCRIBE_S = 5.0  # how long `describe` may take before the process ends without its answer


class Watchdog:
    """Ends the process with code 75 when nobody called `beat` for `timeout_s` seconds.

    Before that it writes to `out` (which needs a file descriptor; default stderr) the text of `describe`,
    which should name the rank, its current op, since when, and whom it waits for, and then the stack of
    every thread. The time the whole process is stopped (a debugger, a suspended job) does not count.
    `start` or `with` begins. Raises ValueError if `timeout_s` is not positive.
    """

    def __init__(self, timeout_s: float, describe: Callable[[], str], out: TextIO | None = None) -> None:
        if timeout_s <= 0:
            raise ValueError(
                f"watchdog timeout_s={timeout_s} must be positive: give seconds, well above a step"
            )
        self.exit_process: Callable[[int], object] = os._exit
        self._timeout_s = timeout_s
        self._describe = describe
        # The original stderr: a live progress display replaces sys.stderr by one with a lock.
        self._out = out or sys.__stderr__ or sys.stderr
        self._beats = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch; counts as a beat."""
        self._thread.start()

    def beat(self) -> None:
        """Say that there was progress. Costs one addition."""
        self._beats += 1

    def stop(self) -> None:
        """Stop watching. Harmless when called twice or before `start`."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _watch(self) -> None:
        # Silence is counted in polls, not read from a clock: while the process is stopped nobody polls.
        poll_s = min(1.0, self._timeout_s / 10)
        beats, silent_polls = self._beats, 0
        while not self._stopped.wait(poll_s):
            silent_polls = silent_polls + 1 if beats == self._beats else 0
            beats = self._beats
            if silent_polls * poll_s >= self._timeout_s:
                self._end()
                return

    def _end(self) -> None:
        try:
            self._out.write(f"\nwatchdog: no progress for {self._timeout_s:g} s: {self._described()}\n")
            self._out.flush()
            faulthandler.dump_traceback(self._out, all_threads=True)
        finally:  # a full disk or a closed pipe must not keep a hung process alive
            self.exit_process(EXIT_CODE)

    def _described(self) -> str:
        # In a thread of its own: what hangs may hold a lock that `describe` needs.
        answer = ["(describing the state hung too)"]

        def ask() -> None:
            try:
                answer[0] = self._describe()
            except Exception as error:
                answer[0] = f"(describing the state failed: {error!r})"

        asking = threading.Thread(target=ask, name="watchdog-describe", daemon=True)
        asking.start()
        asking.join(DESCRIBE_S)
        return answer[0]
