"""What ops are said to have taken, and how much of it their rank computed."""

import threading
import time
from itertools import pairwise

import pytest
import torch

from pipeline.ops import Kind, Op
from pipeline.stopwatch import Stopwatch

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
    watch = Stopwatch(torch.device("cpu"))
    output = Burn.apply(torch.ones(1, requires_grad=True))
    watch.start()
    burn(30_000_000)
    watch.done(FORWARD)
    output.backward()
    watch.done(BACKWARD)
    time.sleep(0.05)
    watch.done(WAIT)
    forward, backward, wait = watch.timings()
    assert 30e6 <= forward.busy_ns < 40e6
    assert 20e6 <= backward.busy_ns < 30e6, "autograd computes on the thread that calls it"
    assert wait.busy_ns < 5e6
    assert wait.end_s - wait.start_s >= 0.05
    for timing in (forward, backward, wait):
        assert timing.busy_ns / 1e9 <= timing.end_s - timing.start_s + 1e-3


def test_what_other_threads_compute_is_not_the_ops_own():
    watch = Stopwatch(torch.device("cpu"))
    other = threading.Thread(target=burn, args=(50_000_000,))
    watch.start()
    other.start()
    other.join()
    watch.done(WAIT)
    assert watch.timings()[0].busy_ns < 10e6


def test_ops_follow_each_other_from_the_start_on_and_a_second_start_begins_anew():
    watch = Stopwatch(torch.device("cpu"))
    assert watch.timings() == []
    for ops in ((FORWARD, WAIT, BACKWARD), (REDUCE,)):
        watch.start()
        for op in ops:
            watch.done(op)
        timings = watch.timings()
        assert [timing.op for timing in timings] == list(ops)
        assert timings[0].start_s == 0
        assert all(a.end_s == b.start_s for a, b in pairwise(timings))


class Event:
    """A CUDA event that the device passes 10 ms after the one before it, once it is told to go on."""

    passed = 0
    recorded = 0

    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self):
        Event.recorded += 1
        self.number = Event.recorded

    def elapsed_time(self, end):
        if end.number > Event.passed:
            raise RuntimeError("device not ready")
        return 10.0 * (end.number - self.number)


def test_on_a_gpu_times_are_those_of_events_and_are_read_later(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = Stopwatch(torch.device("cuda", 0))
    watch.start()
    for op in (FORWARD, WAIT, REDUCE):
        watch.done(op)
    with pytest.raises(RuntimeError, match="not ready"):
        watch.timings()
    Event.passed = Event.recorded
    assert watch.timings() == [
        (FORWARD, 0, 0.01, 10_000_000),
        (WAIT, 0.01, 0.02, 0),
        (REDUCE, 0.02, 0.03, 10_000_000),
    ]
