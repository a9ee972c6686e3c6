"""Which ranks of a domain encode which item: pure functions from integer costs to slots."""

from collections import defaultdict
from collections.abc import Sequence

Slot = tuple[int, ...]


def spread(costs: Sequence[int], slots: Sequence[Sequence[Slot]]) -> tuple[Slot, ...]:
    """Choose for each item one of its `slots`: longest items first, onto the least loaded ranks.

    A slot is as loaded as the busiest of its ranks; ties go by item, then by slot. Longest processing time
    first (Graham, 1969): where slots are single ranks, at most 4/3 - 1/(3n) of the best makespan on n ranks.
    """
    load: dict[int, int] = defaultdict(int)
    chosen: list[Slot] = [()] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        chosen[item] = min(slots[item], key=lambda slot: (max(load[rank] for rank in slot), slot))
        for rank in chosen[item]:
            load[rank] += costs[item]
    return tuple(chosen)
