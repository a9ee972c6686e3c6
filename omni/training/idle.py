"""What the ranks' time went into while nothing was computed: shares of a step, over all ranks."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from pipeline.laps import CAUSES


class IdleShares:
    """Sums the idle time of a step over all ranks of a CPU group, beside what the ranks do next.

    Every rank makes one for the same step, with the nanoseconds that it idled for each cause and those of
    its whole step, and calls `settle`.
    """

    def __init__(self, idle_ns: Mapping[str, int], whole_ns: int, group: dist.ProcessGroup) -> None:
        self.sums = torch.tensor([*(idle_ns[cause] for cause in CAUSES), whole_ns], dtype=torch.int64)
        self.work = None
        if group.size() > 1:
            self.work = dist.all_reduce(self.sums, group=group, async_op=True)

    def settle(self) -> dict[str, float]:
        """Wait for the sums; return the share of all ranks' steps that went into each cause."""
        if self.work is not None:
            self.work.wait()
        *idle, whole = self.sums.tolist()
        return {cause: ns / whole for cause, ns in zip(CAUSES, idle, strict=True)}
