"""Samples that lost an item: the ranks of a domain tell each other which, while a step begins.

A rank knows what failed of its own items as soon as its step is prepared. Who else must know are the ranks
that compute losses, and not before their first loss. So every rank begins the exchange before its first op
and nobody waits for it until then.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist

from dataloader.loader import Failure
from omni.models.llm_stage import MicrobatchInputs
from omni.rank.build import Rank
from omni.rank.step import waiting_at
from pipeline.plan import StepPlan


class Tombstones:
    """Which samples of a step have a bad item on any rank of the domain.

    Every rank of the domain makes one, before the step's first op, with the failures of its own items, and
    asks for `samples` before the next step: so all exchange in the order of steps, and what a rank waits for
    never waits for the rank's ops.
    """

    def __init__(self, rank: Rank, plan: StepPlan, failures: Sequence[Failure]) -> None:
        self.rank = rank
        self.plan = plan
        self.group = rank.groups.domain_control
        bad = {(f.source, f.sample) for f in failures}
        lost = [(sample.source, sample.id) in bad for sample in plan.domain.samples]
        self.flags = torch.tensor(lost, dtype=torch.uint8)
        self.work: dist.Work | None = None
        if self.group.size() > 1 and any(plan.domain.routes):
            self.work = dist.all_reduce(self.flags, dist.ReduceOp.MAX, self.group, async_op=True)

    @cached_property
    def samples(self) -> frozenset[int]:
        """The samples, by their numbers in the domain's plan; the first to ask waits for the other ranks.

        Raises:
            StallError: if one of them does not answer in time.
        """
        if self.work is not None:
            with waiting_at(self.rank, f"step {self.plan.step}: sharing which items are bad", self.group):
                self.work.wait()
        return frozenset(self.flags.nonzero().flatten().tolist())

    def mask(self, microbatch: int, inputs: MicrobatchInputs) -> None:
        """Take the targets of tombstones out of the loss of a microbatch, where this rank computes it."""
        for number, sample in enumerate(self.plan.domain.microbatches[microbatch].samples):
            if sample in self.samples:
                assert inputs.weights is not None
                assert inputs.sequences is not None
                inputs.weights.masked_fill_(inputs.sequences == number, 0.0)
