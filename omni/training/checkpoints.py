"""What a rank saves and continues from: its state, in checkpoints that all ranks write and read together."""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from dataloader.storage import Storage
from infra.checkpoint import (
    DAMAGED,
    MANIFEST,
    RUN,
    CheckpointError,
    Keep,
    attempt,
    claim,
    folder_of,
    newest,
    set_aside,
)
from infra.last_checkpoint import check_last, note_last
from infra.run_folder import RunFolder, write_text
from infra.saver import Saved, Saver
from omni.rank.build import Rank
from omni.rank.state import snapshot
from omni.training.loading import from_first, load
from parallel.control import Control


class Checkpoints:
    """The checkpoints of the run of a folder in a storage, as one of its ranks sees them."""

    def __init__(self, storage: Storage, folder: RunFolder, rank: Rank, control: Control, keep: Keep) -> None:
        self.storage = storage
        self.folder = folder
        self.rank = rank
        self.control = control
        self.keep = keep
        self.saver: Saver | None = None
        self.room: torch.Tensor | None = None

    def save(self, step: int, describe: Mapping[str, Any]) -> None:
        """Copy this rank's state and begin to write it. A save that is still under way is waited for.

        Raises:
            CheckpointError: on every rank, if the save before this one failed.
        """
        self.wait()
        if self.saver is None:
            run = from_first(self.control, self._own)
            self.saver = Saver(self.storage, run, self.keep, self.control)
        shard = snapshot(self.rank.components, self.rank.names, self.rank.stage, self.room)
        self.room = shard.data
        self.saver.start(step, shard, describe)

    def wait(
        self, timeout_s: float | None = None, going_on: Callable[[], object] = lambda: None
    ) -> Saved | None:
        """Wait until what was saved is written. Returns it, unless `finished` has already. `going_on` is
        called now and then while any rank is writing.

        Raises:
            CheckpointError: if it could not be, or not in time.
        """
        return self._noted(self.saver.wait(timeout_s, going_on)) if self.saver is not None else None

    def finished(self) -> Saved | None:
        """Return what was written since this was last asked, without waiting."""
        return self._noted(self.saver.finished()) if self.saver is not None else None

    def _noted(self, saved: Saved | None) -> Saved | None:
        """Note what was saved in the run folder: the first rank does."""
        if saved is not None and self.rank.is_first:
            note_last(self.folder, self.storage, saved.step)
        return saved

    def restore(self, check: Callable[[Mapping[str, Any]], None]) -> dict[str, Any] | None:
        """Load the newest good checkpoint on all ranks. Returns its manifest, None if there is no checkpoint.

        The first rank chooses, once it has seen that the checkpoints are this run's. A checkpoint that two
        ranks find damaged is set aside with a warning, and the one before it is tried. `check` raises for one
        that must not be continued.

        Raises:
            CheckpointError: on every rank, if no checkpoint is good, are another run's, or one does not fit,
                or if a rank reads one otherwise than the others do; if there is none, and was one before.
        """
        # Before `_own`, which would write into a folder that something is to be mounted on.
        from_first(self.control, partial(check_last, self.folder, self.storage))
        from_first(self.control, self._own)
        while (manifest := self._choose()) is not None:
            check(manifest)
            damage = load(self.storage, manifest, self.rank, self.control, self.rank.components)
            if damage is None:
                if self.rank.is_first:
                    note_last(self.folder, self.storage, manifest["step"])
                return manifest
            self._give_up(manifest["step"], damage)
        return None

    def _own(self) -> str:
        """Return the id of this run, which its folder and its checkpoints both say. A folder without
        an id takes that of the checkpoints where it has records, of a version that kept it there alone: two
        new runs that begin at once are told apart.

        Raises:
            CheckpointError: if the checkpoints are another run's.
        """
        path = self.folder.path / RUN
        own = path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else None
        inside = self.storage == Storage.at(self.folder.checkpoints)
        known = inside or self.folder.metrics.exists()
        run = claim(self.storage, own, adopt=known)
        if run != own:
            write_text(path, run + "\n")
        return run

    def _choose(self) -> dict[str, Any] | None:
        """Return the manifest of the newest checkpoint whose files are all there, as the first rank sees
        it.
        """
        manifest, problems = from_first(self.control, lambda: newest(self.storage))
        for step, problem in problems:
            self._give_up(step, problem)
        return manifest

    def _give_up(self, step: int, problem: str) -> None:
        """Set a damaged checkpoint aside, and say so: the first rank does.

        Raises:
            CheckpointError: on every rank, if that fails: the checkpoint would be chosen again, for ever.
        """
        unmoved = attempt(lambda: set_aside(self.storage, step)) if self.rank.is_first else None
        unmoved = self.control.broadcast("loading", unmoved)
        if unmoved is not None:
            raise CheckpointError(
                f"{folder_of(step)} in {self.storage} is damaged: {problem}. It cannot be set aside "
                f"({unmoved}): let this user write there, or rename its {MANIFEST} to {DAMAGED} yourself, "
                f"and resume"
            )
        if not self.rank.is_first:
            return
        print(
            f"warning: {folder_of(step)} in {self.storage} is damaged: {problem}. It is kept, marked "
            f"as damaged, and the run goes on from an older one. Until step {step} is saved again, to take "
            f"it back rename its {DAMAGED} to {MANIFEST}.",
            file=sys.stderr,
            flush=True,
        )
