"""Balance by lengths alone: a quadratic fitted to costs, longest first, and a few swaps."""

from bisect import bisect
from collections.abc import Sequence

from omni.policies import BalancePolicy, Bins, SampleCosts, ease, longest_first, steady

_SWAPS = 20


def assign_fitted_lpt(samples: SampleCosts, bins: Bins) -> list[int]:
    """Longest processing time first over a t² + b t + c, fitted to the samples' costs by their tokens t, then
    at most 20 moves or swaps between the fullest bin and the emptiest: as LoongForge balances encoders.

    It knows lengths only; what of a sample is image and what is text is lost on it. Only a few changes at the
    end, which LoongForge has not, look at both, where a phase is worse than in turn (`ease`). Of what it
    predicts, the largest sum is at most 4/3 - 1/(3 count) of the best possible. O(n log n).
    """
    predicted = fitted(samples.tokens.tolist(), samples.total_ns)
    chosen, loads = longest_first(predicted, bins.count)
    for _ in range(_SWAPS):
        if not _level(predicted, chosen, loads):
            break
    return ease(samples, bins, chosen, steady(predicted, chosen, bins))


def fitted(tokens: Sequence[int], costs: Sequence[int]) -> list[int]:
    """Predict costs by the quadratic in tokens with the least squared error, in integers, rounded down; by
    no less than a quarter of the mean cost of so many tokens, and with fewer than three lengths by that mean.
    """
    power = [sum(t**k for t in tokens) for k in range(5)]
    right = [sum(c * t**k for t, c in zip(tokens, costs, strict=True)) for k in range(3)]
    rows = [[power[i + j] for j in range(3)] for i in range(3)]
    mean = [right[0] * t // max(1, power[1]) for t in tokens]
    whole = _determinant(rows)
    if whole == 0:
        return mean
    c, b, a = (
        _determinant([[right[i] if j == column else rows[i][j] for j in range(3)] for i in range(3)])
        for column in range(3)
    )
    return [max(low // 4, (a * t * t + b * t + c) // whole) for t, low in zip(tokens, mean, strict=True)]


def _determinant(m: Sequence[Sequence[int]]) -> int:
    return (
        m[0][0] * (m[1][1] * m[2][2] - m[1][2] * m[2][1])
        - m[0][1] * (m[1][0] * m[2][2] - m[1][2] * m[2][0])
        + m[0][2] * (m[1][0] * m[2][1] - m[1][1] * m[2][0])
    )


def _level(costs: Sequence[int], chosen: list[int], loads: list[int]) -> bool:
    """Move a sample from the fullest bin to the emptiest, or swap it for one of these, so that the fuller of
    both holds about as little as can be; tell if that gained anything.
    """
    full, empty = loads.index(max(loads)), loads.index(min(loads))
    gap = loads[full] - loads[empty]
    others = sorted([(0, -1), *((costs[j], j) for j, number in enumerate(chosen) if number == empty)])
    best = (gap, -1, -1)
    for i in (i for i, number in enumerate(chosen) if number == full):
        # To hand over half of the gap, what comes back costs as much less than what goes.
        at = bisect(others, (costs[i] - gap // 2, -1))
        for cost, j in others[max(0, at - 1) : at + 1]:
            best = min(best, (abs(gap - 2 * (costs[i] - cost)), i, j))
    left, i, j = best
    if left >= gap:
        return False
    change = costs[i] - (costs[j] if j >= 0 else 0)
    chosen[i] = empty
    if j >= 0:
        chosen[j] = full
    loads[full] -= change
    loads[empty] += change
    return True


FITTED_LPT = BalancePolicy("fitted_lpt", assign_fitted_lpt)
