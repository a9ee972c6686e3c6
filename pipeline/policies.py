"""Which ranks of a domain encode which item: pure functions from integer costs to tp groups."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace

TpGroup = tuple[int, ...]
"""Neighbouring ranks of a domain on which an encoder's tensor parallelism runs: they encode as one."""


def spread(costs: Sequence[int], tp_groups: Sequence[Sequence[TpGroup]]) -> tuple[TpGroup, ...]:
    """Choose for each item one of its `tp_groups`: longest items first, onto the least loaded ranks.

    A tp group is as loaded as the busiest of its ranks; ties go by item, then by tp group. Where tp groups
    are single ranks, this is `parallel.least_loaded.longest_first`; tp groups of several components may
    overlap, so that one item loads many of them.
    """
    load: dict[int, int] = defaultdict(int)
    # (load, tp group) by tp groups: items of a component share theirs.
    queues: dict[int, list[tuple[int, TpGroup]]] = {}
    chosen: list[TpGroup] = [()] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        queue = queues.get(id(tp_groups[item]))
        if queue is None:
            queue = queues[id(tp_groups[item])] = [
                (_busiest(tp_group, load), tp_group) for tp_group in tp_groups[item]
            ]
            heapify(queue)
        # Loads only grow: the first tp group whose load is what the queue says is the least loaded one.
        while queue[0][0] != (now := _busiest(queue[0][1], load)):
            heapreplace(queue, (now, queue[0][1]))
        chosen[item] = queue[0][1]
        for rank in chosen[item]:
            load[rank] += costs[item]
    return tuple(chosen)


def _busiest(tp_group: TpGroup, load: Mapping[int, int]) -> int:
    return max(load[rank] for rank in tp_group)
