"""The kind of policy that says which domain, then which of its replicas, takes a sample."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dataloader.balance.costs import Bins, SampleCosts
from parallel.policy import Policy


@dataclass(frozen=True)
class BalancePolicy(Policy):
    """Which bin takes which sample.

    `decide(samples, bins)` gives for each of `samples` its bin in 0 … bins.count-1. It is called at two
    levels: the samples of a group over its domains, then those of each domain over its replicas. Bins may be
    empty.
    """

    group: ClassVar[str] = "omni.balance"
    decide: Callable[[SampleCosts, Bins], Sequence[int]]

    def __call__(self, samples: SampleCosts, bins: Bins) -> tuple[int, ...]:
        """Return the bin of each sample."""
        with self.asked():
            chosen = tuple(map(int, self.decide(samples, bins)))
        self.require(
            len(chosen) == len(samples) and all(0 <= number < bins.count for number in chosen),
            f"each of {len(samples)} samples goes to one of {bins.count} bins",
        )
        return chosen
