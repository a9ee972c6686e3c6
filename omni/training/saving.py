"""What a run saves and goes on from: the state of its ranks, how far it is, and the costs that it learnt."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dataloader.decoders import decoder_versions
from infra.checkpoint import CheckpointError, Keep, folder_of
from infra.run_folder import RunFolder
from omni.planning.mixture import positions
from omni.planning.run_spec import RunSpec
from omni.rank.build import Rank
from omni.training.begin import begin
from omni.training.checkpoints import Checkpoints
from omni.training.fingerprint import check_fingerprint, fingerprint, other_decoders
from omni.training.learning import CostTables
from omni.training.progression import Progression
from omni.training.reporter import Reporter, Silent
from omni.training.storage import storage_of
from parallel.control import Control

FAILED_S = 60.0  # how long a run that has failed waits for a checkpoint that is being written


class Saving:
    """Saves a run, or begins it and continues it, as one of its ranks.

    `progression` and `tables` are saved and restored with the weights. `beat` is called where there is
    progress.
    """

    def __init__(
        self,
        spec: RunSpec,
        folder: RunFolder,
        rank: Rank,
        control: Control,
        progression: Progression,
        tables: CostTables,
        beat: Callable[[], object],
    ) -> None:
        self.spec = spec
        self.folder = folder
        self.rank = rank
        self.control = control
        self.progression = progression
        self.tables = tables
        self.beat = beat
        train = spec.config.train
        keep = Keep(train.keep_checkpoints, train.keep_every)
        self.checkpoints = Checkpoints(storage_of(spec.config, folder), folder, rank, control, keep)
        self.decoders = decoder_versions()
        self.fingerprint = fingerprint(spec)  # once: it takes a tenth of a save of 250 MB

    def restore(self) -> int | None:
        """Continue from the last good checkpoint and return its step, or begin and return None."""
        self.rank.note("the start: loading weights")
        manifest = self.checkpoints.restore(self._check)
        if manifest is None:
            begin(self.spec, self.folder, self.rank, self.control)
            self.progression.cursor = self.spec.config.start.cursor or 0
            return None
        self.progression.restore(manifest)
        if not self.tables.restore(manifest["cost_tables"]) and self.rank.is_first:
            print("note: costs are as stated again: those learnt are of another layout, model or cluster")
        return self.progression.step

    def _check(self, manifest: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that another configuration wrote, before anything of it is read."""
        storage = self.checkpoints.storage
        check_fingerprint(manifest, self.fingerprint, storage)
        if not self.rank.is_first:
            return
        if others := other_decoders(manifest, self.decoders):
            print(f"warning: items may decode to other values than before: {'; '.join(others)}", flush=True)
        print(f"reading {storage.locate(folder_of(manifest['step']))} ...", flush=True)

    def save(self, report: Reporter | Silent) -> None:
        """Begin to write a checkpoint of the step just done, when the one before is written; report how long
        that held training up.
        """
        self.finish(report)
        start = time.perf_counter()
        step = self.progression.step
        self.rank.note(f"step {step}: copying what is saved")
        describe = {
            **self.progression.state(),
            "layout": self.spec.arrangement.describe(),
            "cost_tables": self.tables.state(step),
            "mixture": sorted(positions(self.spec.config.data).items()),
            "fingerprint": self.fingerprint,
            "decoders": self.decoders,
        }
        self.checkpoints.save(step, describe)
        report.held_up(time.perf_counter() - start)
        self.beat()

    def finish(self, report: Reporter | Silent) -> None:
        """Wait until the last checkpoint is written, and report it."""
        start = time.perf_counter()
        self.rank.note(f"step {self.progression.step}: waiting until the last checkpoint is written")
        report.saved(self.checkpoints.wait(going_on=self.beat))
        report.held_up(time.perf_counter() - start)
        self.beat()

    @contextlib.contextmanager
    def finishing(self, report: Reporter | Silent) -> Iterator[None]:
        """Let a checkpoint that is being written be finished also where a run fails."""
        try:
            yield
        except BaseException:
            try:
                report.saved(self.checkpoints.wait(min(self.spec.config.train.timeout_s, FAILED_S)))
            except CheckpointError as error:
                report.note(f"while the run fails of something else: {error}")
            raise
