"""Which replica takes which sample: policies over the samples' costs. None changes what is trained on."""

import heapq
from collections.abc import Callable, Mapping, Sequence

AssignPolicy = Callable[[Sequence[int], int], tuple[int, ...]]
"""From the samples' costs in nanoseconds and the number of replicas to the replica of each sample."""


def assign_none(costs: Sequence[int], n: int) -> tuple[int, ...]:
    """Round robin: sample i goes to replica i % n, whatever it costs."""
    _check(costs, n)
    return tuple(i % n for i in range(len(costs)))


def assign_lpt(costs: Sequence[int], n: int) -> tuple[int, ...]:
    """Longest processing time first: each sample, from the costliest, to the replica with the least so far.

    Ties go to the smaller sample and replica number. The largest load is at most 4/3 of the best possible.
    """
    _check(costs, n)
    loads = [(0, replica) for replica in range(n)]
    assigned = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, replica = loads[0]
        assigned[i] = replica
        heapq.heapreplace(loads, (load + costs[i], replica))
    return tuple(assigned)


def _check(costs: Sequence[int], n: int) -> None:
    if n < 1:
        raise ValueError(f"the number of replicas is {n}: it must be at least 1")
    assert all(cost >= 0 for cost in costs), "costs are nanoseconds"


POLICIES: Mapping[str, AssignPolicy] = {"none": assign_none, "lpt": assign_lpt}
