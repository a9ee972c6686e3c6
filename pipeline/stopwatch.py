"""Times what a rank does by the clock of the device that does it.

Laps follow each other: one mark ends a lap and begins the next. On a CPU a mark is the time of the wall and
that of the calling thread, which computes whatever an op computes, autograd's backward too, and stands still
while it waits. On a GPU it is an event on the current stream: the host goes on at once.
"""

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from pipeline.laps import Lap
from pipeline.ops import COMPUTE, ISSUED, Op

_WORK = COMPUTE | ISSUED


class Timing(NamedTuple):
    """An op that ran, in seconds since the step's start on this rank; `busy_ns` as `Stopwatch` tells it."""

    op: Op
    start_s: float
    end_s: float
    busy_ns: int


class Stopwatch:
    """Times laps from when it is made on; `made_ns` is that moment by `time.perf_counter_ns` of the host.

    A rank is busy on a CPU while the calling thread computes. On a GPU it is busy with all of an op but a
    WAIT, collectives inside layers too, and with nothing of other laps.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.made_ns = time.perf_counter_ns()
        self.ended: list[Op | str] = []
        self.marks: list[Any] = [self._mark()]

    def done(self, what: Op | str) -> None:
        """Say that a lap is over, or on a GPU that all of it is queued; the next one starts now."""
        self.ended.append(what)
        self.marks.append(self._mark())

    def standing(self) -> str:
        """Say what a GPU is at: the host may be far ahead of it. Nothing waits; empty on a CPU."""
        if not self.on_gpu:
            return ""
        passed = sum(mark.query() for mark in self.marks) - 1  # an event is passed when all before it are
        ended = self.ended[max(0, passed) :]
        return f"the device at {ended[0]}" if ended else "the device idle"

    def laps(self) -> list[Lap]:
        """Return the laps so far, in order of time. The host waits until a GPU is through with them."""
        times = self._device_ns() if self.on_gpu else self.marks
        first = times[0][0]
        laps = []
        for what, ((start, before), (end, after)) in zip(self.ended, pairwise(times), strict=True):
            busy = min(end - start, after - before)
            if self.on_gpu and not (isinstance(what, Op) and what.kind in _WORK):
                busy = 0
            laps.append(Lap(what, start - first, end - first, busy))
        return laps

    def _mark(self) -> Any:
        """A moment: (the wall's, the thread's) on a CPU, an event on a GPU."""
        if not self.on_gpu:
            return time.perf_counter_ns(), time.thread_time_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _device_ns(self) -> list[tuple[int, int]]:
        """When the device passed each mark, all of it being work."""
        self.marks[-1].synchronize()
        passed = [round(self.marks[0].elapsed_time(mark) * 1e6) for mark in self.marks]
        return [(ns, ns) for ns in passed]


def timings_of(laps: Sequence[Lap]) -> list[Timing]:
    """Return the laps of ops."""
    return [
        Timing(lap.what, lap.start_ns / 1e9, lap.end_ns / 1e9, lap.busy_ns)
        for lap in laps
        if isinstance(lap.what, Op)
    ]
