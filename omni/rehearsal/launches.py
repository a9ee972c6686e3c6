"""What a phase of a step launches on a GPU, and what it is bound by.

A launch takes the host LAUNCH_S, however much it does. On the device, products run at the speed that the
cluster says products have, everything else at the speed of its memory, one after the other. Attention and
collectives count as launches alone: how long they take depends on lengths and on peers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

from parallel.cluster import Cluster

LAUNCH_S = 6e-6
BEHIND = "totals of the step before"  # read when the device has been given the next one
BESIDE = ("build", "assemble", "checkpoint", "restore")  # not what the engine's thread does each step
# Kinds of launches whose bytes are not counted: what they take is not the time of reading their operands.
NOT_MEMORY = frozenset({"product", "attention", "collective"})


@dataclass(frozen=True)
class Launches:
    """All ops of one kind of a rank in a step: how many there are, their launches by kind, the bytes that
    those bound by memory read and write, the FLOPs of products, and copies from the host to the device.
    """

    ops: int
    launches: Mapping[str, int]
    bytes: int
    flops: int
    copies: int = 0

    @property
    def total(self) -> int:
        """Launches of all kinds."""
        return sum(self.launches.values())

    @property
    def host_s(self) -> float:
        """Seconds that the host takes to launch."""
        return self.total * LAUNCH_S

    def memory_s(self, cluster: Cluster) -> float:
        """Seconds that operators bound by memory take."""
        return self.bytes / cluster.moved_per_s

    def products_s(self, cluster: Cluster) -> float:
        """Seconds that products take."""
        return self.flops / cluster.products

    def bound(self, cluster: Cluster) -> str:
        """Return what takes longest: "launches" where the host is slower than the device, else "memory" or
        "products".
        """
        memory, products = self.memory_s(cluster), self.products_s(cluster)
        if self.host_s > memory + products:
            return "launches"
        return "memory" if memory > products else "products"

    def __add__(self, other: "Launches") -> "Launches":
        kinds = {*self.launches, *other.launches}
        return Launches(
            self.ops + other.ops,
            {kind: self.launches.get(kind, 0) + other.launches.get(kind, 0) for kind in sorted(kinds)},
            self.bytes + other.bytes,
            self.flops + other.flops,
            self.copies + other.copies,
        )


def of_step(by_phase: Mapping[str, Launches]) -> Launches:
    """Return what the engine's thread launches in a step, of all its phases together."""
    nothing = Launches(0, {}, 0, 0)
    return reduce(Launches.__add__, (of for phase, of in by_phase.items() if phase not in BESIDE), nothing)
