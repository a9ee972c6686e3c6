"""What policies of balance are given: the costs of samples, in columns, and the bins that samples go to.

n samples, C components. All numbers are int64; nanoseconds are of forward passes, by the cost table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ops.ints import Ints


@dataclass(frozen=True, eq=False)
class SampleCosts:
    """What samples cost, in the order of the step, `components` naming the columns: the LLM, then encoders.

    ns [n, C]          what a sample takes a replica: of the LLM on its slowest stage, over its cp ranks; of
                       an encoder, over the tp groups that a replica has on average
    unsplit_ns [n, C]  what it takes at least, whoever helps: its sequence on as many cp ranks as the LLM's
                       sharing policy may cut it over, its longest item on as many tp groups as the encoders'
    tokens [n]         tokens of the LLM
    bytes [n]          stored payload
    kept_bytes [n]     activations that its forward passes keep until their backward, of the LLM's fullest
                       stage and of encoders together
    """

    components: tuple[str, ...]
    ns: Ints
    unsplit_ns: Ints
    tokens: Ints
    bytes: Ints
    kept_bytes: Ints

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, numbers: Sequence[int]) -> "SampleCosts":
        """Return the costs of some samples, given by their places here."""
        rows = np.array(numbers, np.int64)
        return SampleCosts(
            self.components,
            self.ns[rows],
            self.unsplit_ns[rows],
            self.tokens[rows],
            self.bytes[rows],
            self.kept_bytes[rows],
        )

    @cached_property
    def total_ns(self) -> list[int]:
        """What each sample takes a replica, of all components together."""
        total: list[int] = self.ns.sum(1).tolist()
        return total


@dataclass(frozen=True)
class Bins:
    """The equal bins that samples are divided over: `count` domains of a group, or replicas of a domain.

    `width` replicas make up a bin: all of a domain's share its work, so that it takes the sum of its samples'
    `ns` over `width`, and never less than any of their `unsplit_ns`. `alone` tells for each component whether
    a bin does the work of its samples by itself. Domains do. Replicas share the domain's tp groups, and its
    pool if sequences are cut beyond a replica: which of them a sample belongs to then decides with which
    others it passes, and no longer who works.
    """

    count: int
    width: int
    alone: tuple[bool, ...]

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"the number of bins is {self.count}: it must be at least 1")


def bin_ns(chosen: Sequence[int], samples: SampleCosts, bins: Bins) -> Ints:
    """Return what each component takes in each bin [count, C], if sample i goes to bin `chosen[i]`.

    Sums are rounded up to whole nanoseconds.
    """
    into = np.array(chosen, np.int64)
    summed = np.zeros((bins.count, samples.ns.shape[1]), np.int64)
    longest = np.zeros_like(summed)
    np.add.at(summed, into, samples.ns)
    np.maximum.at(longest, into, samples.unsplit_ns)
    taken: Ints = np.maximum(-(-summed // bins.width), longest)
    return taken
