"""What each step tells of all ranks: what their time went into while nothing was computed, and what memory
they have held.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipeline.laps import CAUSES


class OfAllRanks(NamedTuple):
    """The share of all ranks' steps that went into each cause, and the most bytes that each rank has held."""

    idle: dict[str, float]
    peaks: tuple[int, ...]


class IdleShares:
    """Sums the idle time of a step over all ranks of a CPU group, beside what the ranks do next.

    Every rank makes one for the same step, with the nanoseconds that it idled for each cause, those of its
    whole step and the most bytes that it has held, and calls `settle`.
    """

    def __init__(
        self, idle_ns: Mapping[str, int], whole_ns: int, peak_bytes: int, group: dist.ProcessGroup
    ) -> None:
        times = [*(idle_ns[cause] for cause in CAUSES), whole_ns]
        peaks = [peak_bytes if rank == group.rank() else 0 for rank in range(group.size())]
        self.sums = torch.tensor([*times, *peaks], dtype=torch.int64)
        self.work = None
        if group.size() > 1:
            self.work = dist.all_reduce(self.sums, group=group, async_op=True)

    def settle(self) -> OfAllRanks:
        """Wait for the sums, and return what they say."""
        if self.work is not None:
            self.work.wait()
        count = len(CAUSES)
        *idle, whole = self.sums[: count + 1].tolist()
        shares = {cause: ns / whole for cause, ns in zip(CAUSES, idle, strict=True)}
        return OfAllRanks(shares, tuple(self.sums[count + 1 :].tolist()))
