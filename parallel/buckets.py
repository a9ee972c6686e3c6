"""How gradients and weights of a component are laid out and reduced, once a step.

megatron-core's distributed optimizer keeps gradients in buckets, divided over the replicas: each bucket is
reduce-scattered, or exchanged and summed where it arrives (`rounded.py`), each rank updates its share, and
weights are gathered, bucket by bucket.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import lcm

from parallel.work import FP32, Collective, Weight, all_gather, all_reduce, exchange, merged, reduce_scatter

LEAST = 40_000_000  # elements
REPLICAS, EXPERT_REPLICAS, PARTITION_REPLICAS, ENDS = "dp_cp", "expt_dp", "domains", "embd"


@dataclass(frozen=True)
class Buckets:
    """How megatron-core lays parameters into buffers and divides these over data-parallel ranks, which have
    equal shares of each.

    `sizes` are the buckets with their padding, `runs` where each parameter lies: (bucket, start, stop).
    """

    sizes: tuple[int, ...]
    runs: tuple[tuple[int, int, int], ...]

    @property
    def total(self) -> int:
        """Elements of all buckets."""
        return sum(self.sizes)

    def updated(self, rank: int, ranks: int) -> int:
        """How many parameters rank number `rank` of `ranks` has elements of in its shares."""
        updated = 0
        for bucket, start, stop in self.runs:
            share = self.sizes[bucket] // ranks
            updated += start < (rank + 1) * share and stop > rank * share
        return updated


def least_bucket(replicas: int) -> int:
    """Elements that a bucket of what so many replicas hold has at least, unless parameters run out: enough
    for each to send a share worth a message. megatron-core's own default.
    """
    return max(LEAST, LEAST // 40 * replicas)


def buckets(weights: Sequence[Weight], ranks: int, least: int) -> Buckets:
    """Lay parameters, last first, so that each begins at a multiple of 64 and buckets divide over `ranks`.

    A bucket is full with `least` elements. A tied parameter has a bucket of its own.
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
        if weight.tied or filled >= least:
            close()
    if filled:
        close()
    return Buckets(tuple(sizes), tuple(runs))


def laid_out(weights: Sequence[Weight], ranks: Mapping[str, int]) -> dict[str, Buckets]:
    """Lay the parameters that learn, by the axis that their gradients are reduced over; `ranks` are the sizes
    of axes, 1 where one is left out.
    """
    # Experts are laid in buckets of the size of the others.
    least = {axis: least_bucket(ranks.get(axis, 1)) for axis in (REPLICAS, PARTITION_REPLICAS)}
    return {
        axis: buckets(own, ranks.get(axis, 1), least.get(axis, least[REPLICAS]))
        for axis, own in by_replicas(weights).items()
    }


def by_replicas(weights: Sequence[Weight]) -> dict[str, list[Weight]]:
    """Divide the parameters that learn by the axis that their gradients are reduced over."""
    by_axis: dict[str, list[Weight]] = {REPLICAS: [], EXPERT_REPLICAS: [], PARTITION_REPLICAS: []}
    for weight in weights:
        if not weight.frozen:
            axis = PARTITION_REPLICAS if weight.partition else EXPERT_REPLICAS if weight.experts else REPLICAS
            by_axis[axis].append(weight)
    return {axis: own for axis, own in by_axis.items() if own}


def reduction(
    weights: Sequence[Weight], ranks: Mapping[str, int], element: int, sent: int = FP32
) -> tuple[Collective, ...]:
    """Return the collectives that reduce a part's gradients and gather its weights of `element` bytes each.

    `ranks` are the sizes of the axes, 1 where one is left out. Of a gradient a number takes `sent` bytes on
    its way to another replica: what is less than fp32 is exchanged and summed where it arrives.
    """
    weights = [weight for weight in weights if not weight.frozen]
    partial = sum(weight.elements for weight in weights if weight.partial)
    sums = all_reduce("tp", partial * FP32, ranks.get("tp", 1)) if partial else ()
    ends = (all_reduce(ENDS, w.elements * FP32, ranks.get(ENDS, 1)) for w in weights if w.tied)
    axes = ((axis, ranks.get(axis, 1), own) for axis, own in laid_out(weights, ranks).items())
    laid = [(axis, n, size // n) for axis, n, own in axes for size in own.sizes]
    scatter = reduce_scatter if sent == FP32 else exchange
    reduced = (scatter(axis, share * sent, n) for axis, n, share in laid)
    gathered = (all_gather(axis, share * element, n) for axis, n, share in laid)
    return merged(chain(sums, *ends, *reduced, *gathered))
