"""Which ranks of a domain encode which item: pure functions from integer costs to slots."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace

Slot = tuple[int, ...]


def spread(costs: Sequence[int], slots: Sequence[Sequence[Slot]]) -> tuple[Slot, ...]:
    """Choose for each item one of its `slots`: longest items first, onto the least loaded ranks.

    A slot is as loaded as the busiest of its ranks; ties go by item, then by slot. Where slots are single
    ranks, this is `parallel.least_loaded.longest_first`; slots of several components may overlap, so that
    one item loads many of them.
    """
    load: dict[int, int] = defaultdict(int)
    queues: dict[int, list[tuple[int, Slot]]] = {}  # (load, slot) by slots: items of a component share theirs
    chosen: list[Slot] = [()] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        queue = queues.get(id(slots[item]))
        if queue is None:
            queue = queues[id(slots[item])] = [(_busiest(slot, load), slot) for slot in slots[item]]
            heapify(queue)
        # Loads only grow: the first slot whose load is what the queue says is the least loaded one.
        while queue[0][0] != (now := _busiest(queue[0][1], load)):
            heapreplace(queue, (now, queue[0][1]))
        chosen[item] = queue[0][1]
        for rank in chosen[item]:
            load[rank] += costs[item]
    return tuple(chosen)


def _busiest(slot: Slot, load: Mapping[int, int]) -> int:
    return max(load[rank] for rank in slot)
