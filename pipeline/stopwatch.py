"""What a rank's ops took, by the clock of the device that ran them.

Ops follow each other, so one mark between two of them ends the one and begins the next. On a CPU a mark is
the time of the wall and that of the calling thread, which computes whatever an op computes, autograd's
backward too, and stands still while it waits. On a GPU it is an event on the current stream: the host goes on
at once, and the times are there once the device has passed the last mark.
"""

import time
from typing import Any, NamedTuple

import torch

from pipeline.ops import Kind, Op


class Timing(NamedTuple):
    """An op that ran, in seconds since the stopwatch was started, and how long its rank was busy with it.

    `busy_ns` leaves out waiting for peers: on a CPU it is the time that the calling thread computed; on a GPU
    it is the time of the device, 0 for a WAIT, and collectives inside layers and reductions count whole.
    """

    op: Op
    start_s: float
    end_s: float
    busy_ns: int


class Stopwatch:
    """Times ops that run one after the other, from `start` on."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.ops: list[Op] = []
        self.marks: list[Any] = []

    def start(self) -> None:
        """Begin: the first op starts now."""
        self.ops, self.marks = [], [self._mark()]

    def done(self, op: Op) -> None:
        """Say that an op has run, or on a GPU that all of it is queued; the next one starts now."""
        self.ops.append(op)
        self.marks.append(self._mark())

    def timings(self) -> list[Timing]:
        """Return what the ops took, in the order in which they ran.

        Raises:
            RuntimeError: on a GPU that has not passed the last mark.
        """
        times = [self._since_start(mark) for mark in self.marks]
        return [
            Timing(op, start / 1e9, end / 1e9, 0 if self.on_gpu and op.kind is Kind.WAIT else after - before)
            for op, (start, before), (end, after) in zip(self.ops, times, times[1:], strict=False)
        ]

    def _mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter_ns(), time.thread_time_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since_start(self, mark: Any) -> tuple[int, int]:
        """Nanoseconds from the start to a mark: of the clock, and of work."""
        first = self.marks[0]
        if self.on_gpu:
            ns = round(first.elapsed_time(mark) * 1e6)
            return ns, ns
        return mark[0] - first[0], mark[1] - first[1]
