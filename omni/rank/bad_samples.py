"""Samples that lost an item: their targets do not count, wherever their loss is computed."""

from collections.abc import Callable
from functools import cached_property

from omni.models.llm_stage import MicrobatchInputs
from pipeline.plan import StepPlan


class BadSamples:
    """Which samples of a step have a bad item on any rank of the domain. `learn` tells, by their numbers in
    the domain's plan; it is asked once, before the step's first loss on a rank that computes one.
    """

    def __init__(self, plan: StepPlan, learn: Callable[[], frozenset[int]]) -> None:
        self.plan = plan
        self.learn = learn

    @cached_property
    def samples(self) -> frozenset[int]:
        """The samples; the first to ask may wait for other ranks.

        Raises:
            StallError: if one of them does not answer in time.
        """
        return self.learn()

    def mask(self, microbatch: int, inputs: MicrobatchInputs) -> None:
        """Take the targets of bad samples out of the loss of a microbatch, where this rank computes it."""
        for number, sample in enumerate(self.plan.domain.microbatches[microbatch].samples):
            if sample in self.samples:
                assert inputs.weights is not None
                assert inputs.sequences is not None
                inputs.weights.masked_fill_(inputs.sequences == number, 0.0)
