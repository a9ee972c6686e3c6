"""How gradients and weights of a component are laid out and reduced, once a step.

megatron-core's distributed optimizer keeps gradients in buckets, divided over the replicas: each bucket is
reduce-scattered, each rank updates its share, and weights are gathered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import lcm

from parallel.work import FP32, Collective, Weight, all_gather, all_reduce, merged, reduce_scatter

REPLICAS, EXPERT_REPLICAS, PARTITION_REPLICAS, ENDS = "dp_cp", "expt_dp", "domains", "embd"


@dataclass(frozen=True)
class Buckets:
    """How megatron-core lays parameters into buffers and divides these over data-parallel ranks.

    `sizes` are the buckets with their padding, `runs` where each parameter lies: (bucket, start, stop).
    """

    sizes: tuple[int, ...]
    runs: tuple[tuple[int, int, int], ...]

    @property
    def total(self) -> int:
        """Elements of all buckets."""
        return sum(self.sizes)

    def owned(self, rank: int, ranks: int) -> int:
        """Elements of parameters that rank number `rank` of `ranks` updates."""
        owned = 0
        for bucket, start, stop in self.runs:
            share = self.sizes[bucket] // ranks
            owned += max(0, min(stop, (rank + 1) * share) - max(start, rank * share))
        return owned


def buckets(weights: Sequence[Weight], ranks: int) -> Buckets:
    """Lay parameters, last first, so that each begins at a multiple of 64 and buckets divide over `ranks`.

    A tied parameter has a bucket of its own.
    """
    sizes: list[int] = []
    runs = []
    filled = 0

    def close() -> None:
        nonlocal filled
        unit = lcm(ranks, 128)
        sizes.append(-(-filled // unit) * unit)
        filled = 0

    for weight in reversed(weights):
        filled = -(-filled // 64) * 64
        if weight.tied and filled:
            close()
        runs.append((len(sizes), filled, filled + weight.elements))
        filled += weight.elements
        if weight.tied:
            close()
    if filled:
        close()
    return Buckets(tuple(sizes), tuple(runs))


def by_replicas(weights: Sequence[Weight]) -> dict[str, list[Weight]]:
    """Divide the parameters that learn by the axis that their gradients are reduced over."""
    by_axis: dict[str, list[Weight]] = {REPLICAS: [], EXPERT_REPLICAS: [], PARTITION_REPLICAS: []}
    for weight in weights:
        if not weight.frozen:
            axis = PARTITION_REPLICAS if weight.partition else EXPERT_REPLICAS if weight.expert else REPLICAS
            by_axis[axis].append(weight)
    return {axis: own for axis, own in by_axis.items() if own}


def reduction(weights: Sequence[Weight], ranks: Mapping[str, int], element: int) -> tuple[Collective, ...]:
    """Return the collectives that reduce a part's gradients and gather its weights of `element` bytes each.

    `ranks` are the sizes of the axes, 1 where one is left out.
    """
    weights = [weight for weight in weights if not weight.frozen]
    partial = sum(weight.elements for weight in weights if weight.partial)
    sums = all_reduce("tp", partial * FP32, ranks.get("tp", 1)) if partial else ()
    ends = (all_reduce(ENDS, w.elements * FP32, ranks.get(ENDS, 1)) for w in weights if w.tied)
    divided = by_replicas(weights)
    shares = ((axis, ranks.get(axis, 1), own) for axis, own in divided.items())
    laid = [(axis, n, size // n) for axis, n, own in shares for size in buckets(own, n).sizes]
    reduced = (reduce_scatter(axis, share * FP32, n) for axis, n, share in laid)
    # Experts have an optimizer of their own, and each of the two has all weights gathered when it is done.
    times = len(divided.keys() - {PARTITION_REPLICAS})
    gathered = (
        all_gather(axis, share * element, n, 1 if axis == PARTITION_REPLICAS else times)
        for axis, n, share in laid
    )
    return merged(chain(sums, *ends, *reduced, *gathered))
