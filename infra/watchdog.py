"""Break a hang: when a rank stops making progress, say what it is doing, and later end the process.

A collective that one rank never enters blocks the others for ever and without a word. Each of them says
where it stands: the one who stands elsewhere, or says nothing, is whom they wait for. Ending the process lets
torchrun's agent restart the group from the last checkpoint.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Self, TextIO

from dataloader.within import within
from infra.screen import beside

EXIT_CODE = 75  # EX_TEMPFAIL: try again
DESCRIBE_S = 5.0  # how long `describe` may take before the process ends without its answer
SAY_S = 10.0  # how long `out` may take nothing, as a terminal that is stopped, before it goes on unsaid


def _stacks() -> Iterator[str]:
    """The stack of every thread, without its source: to read that may hang as well."""
    frame: FrameType | None
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for number, frame in sys._current_frames().items():
        yield f"Thread {names.get(number, number)} (most recent call first):"
        while frame is not None:
            yield f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'
            frame = frame.f_back


class Watchdog:
    """Ends the process with code 75 when nobody called `beat` for `timeout_s` seconds.

    Before that, and once already after `report_s` seconds of silence if that is sooner, it writes to `out`
    (default stderr) the text of `describe`, which should name the rank, its current op, since when, and whom
    it waits for, and then the stack of every thread. The time the whole process is stopped (a debugger, a
    suspended job) does not count. `start` or `with` begins. Where `heeds` is given, another value of it is a
    beat, too. Raises ValueError if a time is not positive.
    """

    def __init__(
        self,
        timeout_s: float,
        describe: Callable[[], str],
        out: TextIO | None = None,
        report_s: float | None = None,
        heeds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        report_s = timeout_s if report_s is None else report_s
        if min(timeout_s, report_s) <= 0:
            raise ValueError(
                f"watchdog timeout_s={timeout_s}, report_s={report_s} must be positive: give seconds, well "
                f"above a step"
            )
        self.exit_process: Callable[[int], object] = os._exit
        self._timeout_s = timeout_s
        self._report_s = min(report_s, timeout_s)
        self._describe = describe
        self._heeds = heeds
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
        poll_s = min(1.0, self._report_s / 10)
        seen, silent_polls, reported = (self._beats, self._heeds()), 0, False
        while not self._stopped.wait(poll_s):
            now = self._beats, self._heeds()
            silent_polls = silent_polls + 1 if now == seen else 0
            seen, reported = now, reported and silent_polls > 0
            silent_s = silent_polls * poll_s
            if silent_s >= self._timeout_s:
                self._end()
                return
            if silent_s >= self._report_s and not reported:
                self._report(self._report_s, f" (waits for {self._timeout_s:g} s)")
                reported = True

    def _end(self) -> None:
        try:
            self._report(self._timeout_s, "")
        finally:
            self.exit_process(EXIT_CODE)

    def _report(self, silent_s: float, more: str) -> None:
        said = f"watchdog: no progress for {silent_s:g} s{more}: {self._described()}"
        text = "\n".join([said, *_stacks()])
        # A full disk, or a pipe that is closed or not read, neither ends a run that may go on nor keeps a
        # hung process alive.
        with suppress(OSError):
            within(SAY_S, lambda: beside(text, self._out))

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
