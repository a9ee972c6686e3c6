"""Which rank of a replica encodes which item: pure functions from integer costs to ranks."""

from collections.abc import Callable, Mapping, Sequence

Placement = Callable[[Sequence[int], int], tuple[int, ...]]


def place_stage0(costs: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """All items on the first stage: the homogeneous baseline, an encoder in front of the LLM."""
    return (0,) * len(costs)


def place_colocated(costs: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Items over all ranks of the replica, longest first onto the least loaded; ties by item, then by rank.

    Longest processing time first (Graham, 1969): at most 4/3 - 1/(3n) of the best makespan on n ranks.
    """
    load = [0] * num_ranks
    ranks = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(num_ranks), key=lambda r: (load[r], r))
        ranks[item] = rank
        load[rank] += costs[item]
    return tuple(ranks)


PLACEMENTS: Mapping[str, Placement] = {"colocated": place_colocated, "stage0": place_stage0}
