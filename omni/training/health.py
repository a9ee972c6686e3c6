"""What a run watches itself for: copies of weights that differ, and ranks that are slow."""

import socket
from collections.abc import Iterable, Mapping, Sequence

import torch

from infra.run_folder import RunFolder
from infra.screen import beside
from omni.config import HealthConfig
from omni.rank.build import Rank
from omni.rank.step import waiting_at
from omni.training.seats import remember_slow
from omni.training.slowness import Slowest, SlowRanks
from parallel.control import Control
from parallel.control_values import Part
from parallel.copies import Copies
from parallel.costs import CostTable
from parallel.learning import Sample


class Health:
    """What one rank notes of its steps; all ranks call each method at the same step. `parts` are those of the
    cost table.
    """

    def __init__(
        self, config: HealthConfig, rank: Rank, parts: Iterable[str], folder: RunFolder, control: Control
    ) -> None:
        self.config = config
        self.rank = rank
        self.control = control
        self.folder = folder
        self.copies = Copies(rank.copies(), rank.device, rank.moments)
        self.slow_ranks = SlowRanks(parts, rank.rank, control.tree.world)

    def compare(self, step: int) -> torch.Tensor | None:
        """Note with which bits a step computed. Every `health.compare_every` steps compare them, and return
        what `Copies.differing` does: the step's totals tell all ranks, before anything is updated.
        """
        every = self.config.compare_every
        if every == 0:
            return None
        self.copies.note(step)
        if step % every:
            return None
        with waiting_at(self.rank, f"step {step}: comparing copies of weights", self.rank.groups.world):
            return self.copies.differing()

    def seal(self) -> None:
        """Note with which bits an update left the optimizer's state."""
        if self.config.compare_every:
            self.copies.seal()

    def judge(self, corrupted: bool) -> None:
        """Begin anew after a comparison, before anything is updated.

        Raises:
            CorruptionError: naming the rank that differs, if some rank's copies do.
        """
        if corrupted:
            raise self.copies.explain(self.control)
        self.copies.forget()

    def compare_now(self, step: int) -> None:
        """Compare what was noted since the last comparison: what is saved is to come of sound weights.

        Raises:
            CorruptionError: as `judge`.
        """
        if not self.copies.steps:
            return
        with waiting_at(self.rank, f"step {step}: comparing copies of weights", self.rank.groups.world):
            differing = bool(self.copies.differing().item())
        found = self.control.share("copies", {str(self.rank.rank): True} if differing else {})
        self.judge(bool(found))

    def tell(self, passes: Iterable[Sample], table: CostTable) -> dict[str, Part]:
        """Return what this rank tells of the time of its ops in a step: see `SlowRanks`."""
        return self.slow_ranks.tell(passes, table)

    def hear(self, step: int, found: Mapping[str, Sequence[int]]) -> Slowest | None:
        """Compare ranks by what all of them told. One that is slow says where it is."""
        slowest = self.slow_ranks.hear(found)
        if slowest is not None and slowest.is_slow and slowest.rank == self.rank.rank:
            where = f"rank {slowest.rank} is on {socket.gethostname()}"
            beside(f"step {step}: {slowest}; {where}")
            if self.config.exclude_slow:
                try:
                    remember_slow(self.folder)
                except OSError as error:
                    beside(f"{where}, which is not noted for the next restart: {error}")
        return slowest
