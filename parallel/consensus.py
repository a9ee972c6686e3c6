"""Do all ranks hold the same plan? Digests are compared before a plan runs; divergence has a name."""

from collections.abc import Callable
from typing import Any, Protocol

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


class Plan(Protocol):
    """What can be compared by a number."""

    @property
    def digest(self) -> int:
        """Equal for equal plans."""


def explain(plan: Plan, diff: Callable[[Any, Any], list[str]], group: dist.ProcessGroup, step: int) -> str:
    """Say which ranks have the plan of `step` that rank 0 has, and where the first other plan differs.

    Every rank of `group` calls it. Two plans travel, however many ranks and plans there are.
    """
    digests: list[int] = [0] * group.size()
    dist.all_gather_object(digests, plan.digest, group=group)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), 0)
    plans = []
    for rank in (0, other):
        sent = [plan if group.rank() == rank else None]
        dist.broadcast_object_list(sent, group=group, group_src=rank)
        plans.append(sent[0])
    alike = digests.count(digests[0])
    lines = [
        f"ranks planned step {step} differently; nothing of it has run.",
        f"  {alike} of {len(digests)} ranks have the plan of rank 0, {digests.count(digests[other])} that of "
        f"rank {other}; there are {len(set(digests))} plans.",
        *(f"  rank 0 against rank {other}: {difference}" for difference in diff(*plans)[:10]),
        "Check that all ranks read the same data, configuration and code.",
    ]
    return "\n".join(lines)
