"""A communicator's lane: its shipments in the order of issue, the longer ones beside the host."""

import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from parallel.collectives import Handle


class Lane:
    """Runs the shipments of one communicator in the order of issue, those of two hops too, beside the host.

    The second hop needs what the first one brings, yet all ranks must issue both before the next shipment's
    first. If the hop were issued where the shipment is waited for, ranks that wait in different places would
    hang: in a pipeline the last stage waits for a shipment after its backward, which needs the first stage's
    forward, which needs the rows. So on a GPU both hops are queued at once on a stream, and on a CPU they run
    on a thread. Whoever owns the communicator makes one lane for it, and ships everything through it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: _Turn | None = None

    def run(self, job: Callable[[], Handle]) -> Handle:
        """Start a job that issues one collective: at once, unless a longer one is still under way."""
        if self._last is None or self._last.is_over():
            return job()
        return self.run_long(job)

    def run_long(self, job: Callable[[], Handle]) -> Handle:
        """Start a job that issues several collectives, each after waiting for the one before it."""
        if self._stream is None:
            self._last = _Turn(job, self._last)
            return self._last
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            return job()


class _Turn:
    """A job on a thread, which begins when the turn before it has ended."""

    def __init__(self, job: Callable[[], Handle], before: "_Turn | None") -> None:
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(job, before), daemon=True)
        self._thread.start()

    def _run(self, job: Callable[[], Handle], before: "_Turn | None") -> None:
        try:
            if before is not None:
                before.wait()
            with torch.no_grad():
                job().wait()
        except Exception as error:  # raised where the shipment is waited for
            self._error = error

    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout: timedelta = timedelta(0)) -> None:
        self._thread.join(timeout.total_seconds() or None)
        if self._thread.is_alive():
            raise dist.DistError(f"not done after {timeout.total_seconds()} s")
        if self._error is not None:
            raise self._error  # as it is: not all of them are a peer's fault
