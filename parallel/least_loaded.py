"""Each cost into the least loaded of several bins: how samples, whole items and whole sequences are balanced.

From the costliest on, this is longest processing time first (Graham, 1969): the largest load is at most
4/3 - 1/(3n) of the best possible on n bins. All ties go to the smaller number.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate


def longest_first(costs: Sequence[int], n: int) -> tuple[list[int], list[int]]:
    """Divide costs over `n` bins, the largest first; return the bin of each cost and the load of each bin."""
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    loads = [0] * n
    chosen = [0] * len(costs)
    for i, number in zip(order, place([costs[i] for i in order], loads) or (), strict=True):
        chosen[i] = number
    return chosen, loads


def longest_first_within(costs: Sequence[int], n: int, sizes: Sequence[int], room: int) -> list[int] | None:
    """As `longest_first`, into bins that have `room` for the sizes of what they get; return the bin of each
    cost, None if one finds no room.
    """
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    bins = place([costs[i] for i in order], [0] * n, [sizes[i] for i in order], [room] * n)
    if bins is None:
        return None
    chosen = [0] * len(costs)
    for i, number in zip(order, bins, strict=True):
        chosen[i] = number
    return chosen


def place(
    costs: Sequence[int], loads: list[int], sizes: Sequence[int] = (), rooms: list[int] | None = None
) -> list[int] | None:
    """Put each cost, in their order, into the least loaded bin with room; return the bin of each.

    The `loads` of the bins grow by the costs. If the bins have `rooms`, these shrink by the `sizes`; None as
    soon as there is no room for one.
    """
    heap = [(load, number) for number, load in enumerate(loads)]
    heapify(heap)
    full: list[tuple[int, int]] = []
    chosen = []
    # The least size from each cost on: a bin without room for that is full for good.
    least = list(accumulate(reversed(sizes), min))[::-1] if rooms is not None else []
    for at, cost in enumerate(costs):
        if rooms is not None:
            while heap and rooms[heap[0][1]] < sizes[at]:
                load, number = heappop(heap)
                loads[number] = load
                if rooms[number] >= least[at]:
                    full.append((load, number))
            if not heap:
                return None
            rooms[heap[0][1]] -= sizes[at]
        load, number = heap[0]
        heapreplace(heap, (load + cost, number))
        chosen.append(number)
        while full:
            heappush(heap, full.pop())
    for load, number in heap:
        loads[number] = load
    return chosen
