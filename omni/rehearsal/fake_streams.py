"""Streams, events and works of a GPU that is not there: nothing runs on them, but they tell what they order.

They tell the `Recorder` that is entered on the thread, if there is one: see `order.py`.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch

from omni.rehearsal.call_sites import CallSites
from omni.rehearsal.clocks import Clock
from omni.rehearsal.recorder import Recorder, note_wait, recorder_here

# What the guard tells: of what, which event or storage, and which stream.
_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_MARK, _WAIT, _KEEP = range(3)


class Stream:
    """A stream on which nothing runs, named by who made it."""

    device = torch.device("cuda", 0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.name = f"the stream of {CallSites().here().function}"

    def __str__(self) -> str:
        return self.name

    def wait_stream(self, other: "Stream") -> None:
        """Order this stream after another: the host does not wait."""
        self.wait_event(other.record_event())

    def wait_event(self, event: "Event") -> None:
        """Order this stream after an event: the host does not wait."""
        event.wait(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Put an event on the stream, and return it."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Make the host wait."""
        note_wait("stream.synchronize()")
        self.record_event().over()

    def query(self) -> bool:
        """Whether all work is done: who asks knows it then."""
        return self.record_event().query()


class Event:
    """An event that has always happened; `clock` is what it stands for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        """Put the event on a stream."""
        recorder = recorder_here()
        if recorder is not None:
            self.clock = recorder.order.clocks.mark(stream or torch.cuda.current_stream())

    def wait(self, stream: Stream | None = None) -> None:
        """Order a stream after the event: the host does not wait."""
        recorder = recorder_here()
        if recorder is not None:
            recorder.order.clocks.wait(stream or torch.cuda.current_stream(), self.clock)

    def query(self) -> bool:
        """Whether it has happened: who asks knows it then."""
        self.over()
        return True

    def synchronize(self) -> None:
        """Make the host wait."""
        note_wait("event.synchronize()")
        self.over()

    def over(self) -> None:
        """Have the host know that it has happened."""
        recorder = recorder_here()
        if recorder is not None:
            recorder.order.clocks.wait_on_host(self.clock)

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds to a later event."""
        return 0.0


class CurrentStream:
    """What a thread launches on: the default stream, which all threads share, unless it enters another one.

    The guard of `noop_cuda.cpp` keeps it, by numbers, because autograd goes back to the stream that a forward
    ran on; and it tells of the events by which autograd orders what it runs on several.
    """

    def __init__(self, guard: ctypes.PyDLL, default: Stream) -> None:
        self._guard = guard
        guard.omni_current_stream.restype = ctypes.c_int64
        guard.omni_enter_stream.argtypes = (ctypes.c_int64,)
        self._streams = {0: default}
        self._events: dict[int, Clock] = {}
        # Who watched when a stream was entered: autograd ends a backward outside of all modes.
        self._recorder: Recorder | None = None
        self._listener = _LISTENER(self._hear)
        guard.omni_hear(self._listener)

    def get(self, *args: Any) -> Stream:
        """Return it."""
        return self._streams[self._guard.omni_current_stream()]

    @contextlib.contextmanager
    def entered(self, stream: Stream | None) -> Iterator[None]:
        """Launch on a stream inside the block."""
        before = self._guard.omni_current_stream()
        if stream is not None:
            self._recorder = recorder_here() or self._recorder
            self._streams.setdefault(id(stream), stream)
            self._guard.omni_enter_stream(0 if stream is self._streams[0] else id(stream))
        try:
            yield
        finally:
            self._guard.omni_enter_stream(before)

    def _hear(self, heard: int, of: int, number: int) -> None:
        if self._recorder is None:
            return
        order, stream = self._recorder.order, self._streams[number]
        if heard == _MARK:
            self._events[of] = order.clocks.mark(stream)
        elif heard == _WAIT:
            order.clocks.wait(stream, self._events.get(of, {}))
        elif heard == _KEEP:
            order.keep(of, stream)


def install(guard: ctypes.PyDLL) -> None:
    """Answer torch.cuda's calls of streams and events, and hear of works that are waited for."""
    cuda: Any = torch.cuda
    default = Stream()
    default.name = "the default stream"
    current = CurrentStream(guard, default)
    cuda.Stream, cuda.Event = Stream, Event
    cuda.stream, cuda.current_stream = current.entered, current.get
    cuda.default_stream = lambda *args: default
    cuda.synchronize = _synchronize
    tensor: Any = torch.Tensor
    tensor.record_stream = _record_stream
    work: Any = torch._C._distributed_c10d.FakeWork
    work.wait = _heard(work.wait)


def _synchronize(*args: Any) -> None:
    note_wait("cuda.synchronize()")
    recorder = recorder_here()
    if recorder is not None:
        recorder.order.clocks.wait_for_all()


def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    recorder = recorder_here()
    if recorder is not None:
        recorder.order.keep(tensor.untyped_storage()._cdata, stream)


def _heard(original: Callable[..., bool]) -> Callable[..., bool]:
    """Work.wait(), by which the current stream waits."""

    def wait(work: Any, *args: Any, **kwargs: Any) -> bool:
        recorder = recorder_here()
        if recorder is not None:
            recorder.order.waited(work)
        return original(work, *args, **kwargs)

    return wait
