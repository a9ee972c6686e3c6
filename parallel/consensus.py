"""Do all ranks hold the same plan? Digests are compared before a plan runs; divergence has a name."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class DivergenceError(RuntimeError):
    """Ranks computed different plans for one step."""


class Consensus:
    """Compares digests over a CPU group, off the critical path: offered early, settled before use."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.offered: dict[int, tuple[torch.Tensor, dist.Work | None]] = {}

    def offer(self, step: int, digest: int) -> None:
        """Start comparing the digest of `step`. Every rank offers the same steps in the same order."""
        # The maxima of d and -d over all ranks cancel if all digests are equal, and only then.
        pair = torch.tensor([digest, -digest], dtype=torch.int64)
        work = None
        if self.group.size() > 1:
            work = dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        self.offered[step] = (pair, work)

    def settle(self, step: int) -> bool:
        """Wait for the comparison of `step` and say whether all ranks agree."""
        pair, work = self.offered.pop(step)
        if work is not None:
            work.wait()
        highest, negated_lowest = pair.tolist()
        return highest == -negated_lowest


def explain(plan: Any, diff: Callable[[Any, Any], list[str]], group: dist.ProcessGroup, step: int) -> str:
    """Exchange the plans of `step` and return the first differences. Every rank of `group` calls it."""
    plans: list[Any] = [None] * group.size()
    dist.all_gather_object(plans, plan, group=group)
    lines = [f"ranks planned step {step} differently; nothing of it has run."]
    for other in range(1, len(plans)):
        for difference in diff(plans[0], plans[other])[:5]:
            lines.append(f"  rank 0 against rank {other}: {difference}")
    lines.append("Check that all ranks read the same data, configuration and code.")
    return "\n".join(lines)
