"""Saving beside training: the step pays for a copy in memory, a thread writes it."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dataloader.storage import Storage
from infra.checkpoint import CheckpointError, Keep, attempt, folder_of, save_checkpoint
from infra.machine import give_way, release_memory
from infra.shard_file import Shard
from parallel.control import Control

POLL_S = 0.5  # how often whoever waits for a save looks whether it goes on


@dataclass(frozen=True)
class Saved:
    """A checkpoint that all ranks have written: where it lies, its bytes, and the seconds that they took."""

    step: int
    where: str
    bytes: int
    seconds: float


class Saver:
    """Writes checkpoints of a run on a thread, one at a time.

    What fails is raised by the next `start` or `wait`, on every rank.
    """

    def __init__(self, storage: Storage, run: str, keep: Keep, control: Control) -> None:
        self.storage = storage
        self.run = run
        self.keep = keep
        self.control = control
        self.thread: threading.Thread | None = None
        self.saved: Saved | None = None
        self.problem: str | None = None

    def start(self, step: int, shard: Shard, describe: Mapping[str, Any]) -> None:
        """Begin to write; `shard` must not change until `wait` has returned, or the next `start`.

        Raises:
            CheckpointError: if the save before this one failed.
        """
        self._join(None, lambda: None)
        self.thread = threading.Thread(
            target=self._save, args=(step, shard, describe), name="checkpoint", daemon=True
        )
        self.thread.start()
        # Now and then is enough. Not on the thread above: one that gives way would hold locks of malloc.
        threading.Thread(target=release_memory, name="release", daemon=True).start()

    def wait(
        self, timeout_s: float | None = None, going_on: Callable[[], object] = lambda: None
    ) -> Saved | None:
        """Wait for the save that is under way, if there is one. Returns what `finished` does. `going_on` is
        called now and then while any rank is writing: not where a write hangs.

        Raises:
            CheckpointError: if it failed, or is not done in time.
        """
        self._join(timeout_s, going_on)
        return self.finished()

    def finished(self) -> Saved | None:
        """Return what was saved since this was last asked; a save that is under way is not waited for."""
        if self.thread is not None and self.thread.is_alive():
            return None
        saved, self.saved = self.saved, None
        return saved

    def _join(self, timeout_s: float | None, going_on: Callable[[], object]) -> None:
        if self.thread is not None:
            until, came_at = time.monotonic() + (timeout_s or math.inf), self.control.came_at
            while self.thread.is_alive() and (left_s := until - time.monotonic()) > 0:
                self.thread.join(min(left_s, POLL_S))
                if self.control.came_at != came_at:
                    came_at = self.control.came_at
                    going_on()
            if self.thread.is_alive():
                raise CheckpointError(f"a checkpoint was not written in {timeout_s:g} s")
            self.thread = None
        if self.problem is not None:
            raise CheckpointError(self.problem)

    def _save(self, step: int, shard: Shard, describe: Mapping[str, Any]) -> None:
        start = time.perf_counter()

        def save() -> None:
            give_way()
            size = save_checkpoint(self.storage, self.run, step, shard, describe, self.keep, self.control)
            where = self.storage.locate(folder_of(step))
            self.saved = Saved(step, where, size, time.perf_counter() - start)

        problem = attempt(save)
        if problem is not None and not problem.startswith("the checkpoint of step"):
            problem = f"the checkpoint of step {step} could not be saved in {self.storage}: {problem}"
        self.problem = problem
