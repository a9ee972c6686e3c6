"""What ops are said to have taken, and how much of it their rank computed."""

import threading
import time
from itertools import pairwise

import pytest
import torch

from pipeline.laps import DATA, END, HOST
from pipeline.ops import Kind, Op
from pipeline.stopwatch import Stopwatch, timings_of

WAIT = Op(Kind.WAIT, 0, Kind.RECV_FORWARD)
FORWARD, BACKWARD, REDUCE = Op(Kind.FORWARD, 0), Op(Kind.BACKWARD, 0), Op(Kind.REDUCE, 0)


def burn(ns: int) -> None:
    """Compute for so long on this thread, whatever else runs on its core."""
    end = time.thread_time_ns() + ns
    while time.thread_time_ns() < end:
        pass


class Burn(torch.autograd.Function):
    """The identity, whose backward computes for 20 ms."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        burn(20_000_000)
        return grad


def test_on_a_cpu_an_op_is_busy_while_it_computes_and_not_while_it_stands_still():
    output = Burn.apply(torch.ones(1, requires_grad=True))
    watch = Stopwatch(torch.device("cpu"))
    burn(30_000_000)
    watch.done(FORWARD)
    output.backward()
    watch.done(BACKWARD)
    time.sleep(0.05)
    watch.done(WAIT)
    forward, backward, wait = timings_of(watch.laps())
    assert 30e6 <= forward.busy_ns < 40e6
    assert 20e6 <= backward.busy_ns < 30e6, "autograd computes on the thread that calls it"
    assert wait.busy_ns < 5e6
    assert wait.end_s - wait.start_s >= 0.05


def test_what_other_threads_compute_is_not_the_ops_own():
    watch = Stopwatch(torch.device("cpu"))
    other = threading.Thread(target=burn, args=(50_000_000,))
    other.start()
    other.join()
    watch.done(WAIT)
    assert watch.laps()[0].busy_ns < 10e6


def test_laps_follow_each_other_from_the_start_on_and_those_of_ops_are_timings():
    watch = Stopwatch(torch.device("cpu"))
    assert watch.laps() == []
    for what in (DATA, HOST, FORWARD, WAIT, END):
        watch.done(what)
    laps = watch.laps()
    assert [lap.what for lap in laps] == [DATA, HOST, FORWARD, WAIT, END]
    assert laps[0].start_ns == 0
    assert all(a.end_ns == b.start_ns for a, b in pairwise(laps))
    assert all(0 <= lap.busy_ns <= lap.end_ns - lap.start_ns for lap in laps)
    of_ops = [lap for lap in laps if isinstance(lap.what, Op)]
    assert timings_of(laps) == [
        (lap.what, lap.start_ns / 1e9, lap.end_ns / 1e9, lap.busy_ns) for lap in of_ops
    ]


class Event:
    """A CUDA event, which the device passes 10 ms after the one before it, once the host waits for it."""

    recorded = passed = 0

    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self):
        Event.recorded += 1
        self.number = Event.recorded

    def synchronize(self):
        Event.passed = self.number

    def elapsed_time(self, end):
        assert end.number <= Event.passed, "device not ready"
        return 10.0 * (end.number - self.number)


def test_on_a_gpu_times_are_those_of_events_and_the_host_waits_only_to_read_them(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = Stopwatch(torch.device("cuda", 0))
    for what in (HOST, FORWARD, WAIT, REDUCE, END):
        watch.done(what)
    assert Event.passed == 0, "nobody has waited"
    ms = 1_000_000
    assert watch.laps() == [
        (HOST, 0, 10 * ms, 0),
        (FORWARD, 10 * ms, 20 * ms, 10 * ms),
        (WAIT, 20 * ms, 30 * ms, 0),
        (REDUCE, 30 * ms, 40 * ms, 10 * ms),
        (END, 40 * ms, 50 * ms, 0),
    ]


class Passed:
    """A GPU's event that it has passed or not."""

    def __init__(self, passed: bool) -> None:
        self.query = lambda: passed


@pytest.mark.parametrize(
    ("passed", "words"),
    [(1, f"the device at {DATA}"), (2, f"the device at {FORWARD}"), (3, "the device idle")],
)
def test_the_op_that_a_device_stands_at_is_the_first_it_has_not_passed(passed: int, words: str) -> None:
    watch = Stopwatch(torch.device("cpu"))
    assert watch.standing() == ""
    watch.on_gpu = True
    watch.ended = [DATA, FORWARD]
    watch.marks = [Passed(n < passed) for n in range(3)]
    assert watch.standing() == words
