"""A trace of some steps of every rank, which https://ui.perfetto.dev and chrome://tracing open.

Example: `profile.steps=[20,22]` leaves RUN/profile/steps_20_to_22_rank_0.json and one for each other rank,
with every operator, kernel and copy of steps 20, 21 and 22. torch.profiler records, and steps take longer.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from infra.screen import going_on


class Profile:
    """Records the first of `steps` to the second, or to the `last` of the run; nothing if there are none.
    A run that goes on between them records from there; one that is stopped there leaves no trace.
    """

    def __init__(self, steps: Sequence[int], last: int, folder: Path, rank: int) -> None:
        self.first, self.end = (steps[0], min(steps[1], last)) if steps else (1, 0)
        self.folder, self.rank = folder, rank
        self._began = 0
        self._running: profile | None = None

    def before(self, step: int) -> None:
        """Begin with the first step that is to be recorded."""
        if self._running is None and self.first <= step <= self.end:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._began, self._running = step, profile(activities=activities, acc_events=True)
            self._running.start()

    def after(self, step: int) -> float:
        """Write the trace once the last step is done. A GPU finishes its work first. Returns how many seconds
        writing took.
        """
        if self._running is None or step < self.end:
            return 0.0
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        self._running.stop()
        path = self.folder / f"steps_{self._began}_to_{step}_rank_{self.rank}.json"
        with going_on(f"rank {self.rank}: the trace {path}"):
            self.folder.mkdir(exist_ok=True)
            self._running.export_chrome_trace(str(path))
            if not path.stat().st_size:  # the profiler does not say that a disk is full
                raise OSError("it is empty")
        self._running = None
        return time.perf_counter() - start
