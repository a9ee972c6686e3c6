"""A process on fake CUDA: the stand-ins for a GPU stay for its life, so a session's own process has none."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from omni.rehearsal import noop_guard


class FakeGPU:
    """Runs functions that can be imported by name, one after the other, in one process on fake CUDA."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.process = ProcessPoolExecutor(1, context, initializer=noop_guard.install)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what the function returns; what it raises is raised here."""
        return self.process.submit(function, *args).result(timeout=300)
