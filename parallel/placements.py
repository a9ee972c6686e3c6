"""Which ranks of a domain encode: policies of placement."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from parallel.policy import Policy


@dataclass(frozen=True)
class DomainSizes:
    """How many ranks a domain has: `stages` stages of the LLM of `stage_size` each, one after the other,
    then `beside` that hold no stage of the LLM.
    """

    stages: int
    stage_size: int
    beside: int

    @property
    def llm_size(self) -> int:
        """Ranks that hold a stage of the LLM."""
        return self.stages * self.stage_size

    @property
    def size(self) -> int:
        """All ranks."""
        return self.llm_size + self.beside

    def boundaries(self) -> tuple[int, ...]:
        """The first domain ranks of all stages and of those beside the LLM, and the number of ranks."""
        return (*range(0, self.llm_size + 1, self.stage_size), self.size)


@dataclass(frozen=True)
class PlacementPolicy(Policy):
    """Where the encoders are.

    `decide(sizes)` gives their first domain rank in a domain of these `DomainSizes`, and the one after their
    last. It is asked for every size that a domain may have, and for the one that was chosen. `beside` says
    that it takes ranks of their own beside the LLM, `placement.ranks` of them; others take none.
    """

    group: ClassVar[str] = "omni.placement"
    decide: Callable[[DomainSizes], tuple[int, int]]
    beside: bool = False

    def __call__(self, sizes: DomainSizes) -> tuple[int, int]:
        """Return the first domain rank of encoders, and the one after the last."""
        with self.asked():
            first, stop = self.decide(sizes)
        self.require(
            0 <= first < stop <= sizes.size,
            f"encoders have positions among {sizes.size}, not {first} to {stop}",
        )
        return first, stop


COLOCATED = PlacementPolicy("colocated", lambda sizes: (0, sizes.llm_size))
STAGE0 = PlacementPolicy("stage0", lambda sizes: (0, sizes.stage_size))
DISAGGREGATED = PlacementPolicy("disaggregated", lambda sizes: (sizes.llm_size, sizes.size), beside=True)
