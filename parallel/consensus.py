"""Do all ranks hold the same plan? Digests are compared before a plan runs; divergence has a name.

A plan has levels: what the whole world shares, what a group of domains shares, what the ranks of a domain do
together. Each level is compared among its own ranks, all in one collective: every level of every number has
a place of its own in a vector of which the maximum is taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

_ABSENT = -(2**63)


class DivergenceError(RuntimeError):
    """Ranks computed different plans for one step."""


@dataclass(frozen=True)
class Divergence:
    """The widest level at which ranks differ, by its place among levels, and the number it has there."""

    level: int
    number: int


@dataclass(frozen=True)
class Agreement:
    """What ranks learnt of each other's plans: where they differ, if they do, and the largest of the
    `figures` that each of them offered.
    """

    divergence: Divergence | None
    figures: tuple[int, ...]


class Consensus:
    """Compares digests over a CPU group, off the critical path: offered early, settled before use.

    `sizes` are, for each level, how many numbers there are: one world, some groups, more domains.
    """

    def __init__(self, group: dist.ProcessGroup, sizes: Sequence[int]) -> None:
        self.group = group
        self.sizes = tuple(sizes)
        self.offered: dict[int, tuple[torch.Tensor, dist.Work | None]] = {}

    def offer(
        self, step: int, digests: Sequence[int], numbers: Sequence[int], figures: Sequence[int] = ()
    ) -> None:
        """Start comparing the digests of `step`, one for each level, of which this rank's have `numbers`.
        Every rank offers the same steps in the same order, and as many figures.
        """
        # The maxima of d and -d over all ranks cancel if all digests are equal, and only then.
        vector = [_ABSENT] * (2 * sum(self.sizes))
        first = 0
        for size, digest, number in zip(self.sizes, digests, numbers, strict=True):
            vector[2 * (first + number)], vector[2 * (first + number) + 1] = digest, -digest
            first += size
        pairs = torch.tensor([*vector, *figures], dtype=torch.int64)
        work = None
        if self.group.size() > 1:
            work = dist.all_reduce(pairs, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        self.offered[step] = (pairs, work)

    def settle(self, step: int) -> Agreement:
        """Wait for the comparison of `step` and say where ranks differ."""
        pairs, work = self.offered.pop(step)
        if work is not None:
            work.wait()
        values, divergence, first = pairs.tolist(), None, 0
        for level, size in enumerate(self.sizes):
            for number in range(size):
                highest, negated_lowest = values[2 * (first + number) : 2 * (first + number) + 2]
                if divergence is None and highest != _ABSENT and highest != -negated_lowest:
                    divergence = Divergence(level, number)
            first += size
        return Agreement(divergence, tuple(values[2 * first :]))


class Plan(Protocol):
    """What has levels that can be compared by numbers."""

    @property
    def step(self) -> int:
        """The step that is planned."""

    @property
    def levels(self) -> Sequence[tuple[str, int, int, Any]]:
        """Name, number, digest and content of each level, from the widest on."""


def explain(
    plan: Plan,
    divergence: Divergence,
    diff: Callable[[Any, Any, str], list[str]],
    group: dist.ProcessGroup,
    behind: Callable[[str], Sequence[str]] = lambda difference: (),
) -> str:
    """Say which ranks of a level have the plan that the first of them has, and where another one differs.
    `behind` tells the policies that decide what a difference is about.

    Every rank of `group` calls it. Two plans of that level travel, however many ranks and plans there are.
    """
    name, number, digest, content = plan.levels[divergence.level]
    found: list[tuple[int, int]] = [(0, 0)] * group.size()
    dist.all_gather_object(found, (number, digest), group=group)
    ranks = [rank for rank, (of, _) in enumerate(found) if of == divergence.number]
    digests = [found[rank][1] for rank in ranks]
    first = ranks[0]
    other = next(rank for rank, of in zip(ranks, digests, strict=True) if of != digests[0])
    contents: list[Any] = []
    for rank in (first, other):
        sent = [content if group.rank() == rank else None]
        dist.broadcast_object_list(sent, group=group, group_src=rank)
        contents.append(sent[0])
    differences = diff(contents[0], contents[1], f"plan.{name}")
    where = "the world" if name == "world" else f"{name} {divergence.number}"
    check = "Check that all ranks read the same data, configuration and code"
    if policies := behind(differences[0]) if differences else ():
        check += (
            f", and that no policy that decides this is random or asks which rank it is on: "
            f"{', '.join(policies)}"
        )
    lines = [
        f"ranks planned step {plan.step} differently; nothing of it has run.",
        f"  It is the plan of {where}: {digests.count(digests[0])} of {len(ranks)} ranks have that of rank "
        f"{first}, {digests.count(found[other][1])} that of rank {other}; there are {len(set(digests))} "
        "plans.",
        *(f"  rank {first} against rank {other}: {line}" for line in differences[:10]),
        f"{check}.",
    ]
    return "\n".join(lines)
