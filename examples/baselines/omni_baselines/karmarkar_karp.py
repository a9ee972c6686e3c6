"""The largest differencing method: partial divisions are put together until one is left."""

from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from typing import Any

from omni.policies import BalancePolicy, Bins, SampleCosts, ease, steady

Part = tuple[int, Any]
"""Nanoseconds of some samples, and which: a number, or a pair of such trees."""


def assign_karmarkar_karp(samples: SampleCosts, bins: Bins) -> list[int]:
    """Largest differencing (Karmarkar and Karp, 1982, for `count` bins) over the sum of all components.

    At first each sample is a division by itself, with nothing in the other bins. The two divisions with the
    largest difference between their fullest and emptiest bins become one, the fullest bin of one with the
    emptiest of the other, until one is left. Then, beyond the source, a few changes where a phase is worse
    than in turn (`ease`). The largest sum is at most 4/3 - 1/(3 count) of the best
    possible (Michiels et al., 2003), and mostly nearer to it than LPT's where bins get few samples.
    O(n count log count).
    """
    count = bins.count
    # Parts in descending order, those of nothing left out; ties by the smallest sample.
    heap: list[tuple[int, int, list[Part]]] = [(-ns, i, [(ns, i)]) for i, ns in enumerate(samples.total_ns)]
    heapify(heap)
    while len(heap) > 1:
        _, first, one = heappop(heap)
        _, second, other = heap[0]
        parts = _together(one, other, count)
        least = parts[-1][0] if len(parts) == count else 0
        heapreplace(heap, (least - parts[0][0], min(first, second), parts))
    chosen = [0] * len(samples)
    for number, (_, tree) in enumerate(heap[0][2] if heap else ()):
        for sample in _leaves(tree):
            chosen[sample] = number
    return ease(samples, bins, chosen, steady(samples.total_ns, chosen, bins))


def _together(one: list[Part], other: list[Part], count: int) -> list[Part]:
    """Put two divisions over `count` bins together, the fullest of one with the emptiest of the other."""
    apart = count - len(other)  # so many bins of `other` hold nothing: the fullest of `one` stay as they are
    met = [
        (ns + more, (tree, another))
        for (ns, tree), (more, another) in zip(one[apart:], other[::-1], strict=False)
    ]
    return sorted([*one[:apart], *met, *other[: count - len(one)]], key=lambda part: -part[0])


def _leaves(tree: Any) -> Iterator[int]:
    """The samples of a tree, however deep."""
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack.extend(node)
        else:
            yield node


KARMARKAR_KARP = BalancePolicy("karmarkar_karp", assign_karmarkar_karp)
