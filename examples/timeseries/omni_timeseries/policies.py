"""A policy in a package of its own: how the samples of a step are divided over replicas."""

from collections.abc import Sequence

from omni.policies import BalancePolicy


def deal_back_and_forth(costs: Sequence[int], n: int) -> tuple[int, ...]:
    """Deal samples like cards, the costliest first: to bins 0 … n-1, then n-1 … 0, and so on.

    Every bin gets as many samples as any other, up to one. Ties go to the smaller sample.
    """
    there_and_back = [*range(n), *reversed(range(n))]
    bins = [0] * len(costs)
    for turn, sample in enumerate(sorted(range(len(costs)), key=lambda i: (-costs[i], i))):
        bins[sample] = there_and_back[turn % len(there_and_back)]
    return tuple(bins)


SNAKE = BalancePolicy("snake", deal_back_and_forth)
