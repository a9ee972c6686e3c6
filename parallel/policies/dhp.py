"""DHP (Niu et al., 2026, arXiv 2602.21788), its two stages: sequences are packed into atomic groups that keep
to the memory and to a target time, and a dynamic program over groups × ranks gives the groups their degrees,
any integers. As a policy, groups stand side by side on ranks of their own; `dynamic` takes the degrees alone.

A departure: ranks here may have no bound on tokens, and all sequences would then be one group, so the packing
keeps to a target time as well, which is searched for.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parallel.policies.degrees import makespan_floor
from parallel.policies.filled import filled
from parallel.policies.pool import (
    NEVER,
    Build,
    Degrees,
    Pool,
    Times,
    costliest_first,
    degree_times,
    within_memory,
)
from parallel.sequence import SequenceLayout

_TARGETS, _TARGETS_OF_CANDIDATE = 8, 4  # tried: by the policy, and for the degrees that `dynamic` takes


@dataclass(frozen=True)
class Group:
    """Sequences that share `degree` ranks."""

    members: tuple[int, ...]
    degree: int


def shard_dhp(lengths: Sequence[int], pool: Pool) -> SequenceLayout:
    """DHP's groups side by side: each has ranks of its own, and all its sequences evenly over these.

    A group is on one node if one has ranks left for it. Where the search finds no target time, or where cuts
    at units leave a rank more tokens than it may hold, sequences stay whole, the costliest first on the least
    loaded rank with room; where they find none, ranks are filled with tokens one after the other. No
    guarantee on the time: ranks idle where groups are uneven, as in the original. O(S log S + G · P²) of S
    sequences in G groups over P ranks, the former up to eight times.
    """
    if not lengths:
        return SequenceLayout(pool.num_cp_ranks, ())
    times = degree_times(lengths, pool)
    rows = times.tolist()
    groups = dhp_groups(lengths, within_memory(lengths, times, pool), pool, NEVER, _TARGETS)
    if groups is not None:
        build = Build(lengths, rows, pool)
        for group, ranks in zip(groups, side_by_side([of.degree for of in groups], pool.nodes), strict=True):
            for number in group.members:
                build.pour(number, [(rank, 1) for rank in ranks])
        if build.fits:
            return build.layout()
    whole = Build(lengths, rows, pool)
    return (whole if whole.place(costliest_first(rows)) else filled(lengths, rows, pool)).layout()


def side_by_side(degrees: Sequence[int], nodes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Ranks of their own for groups of so many, ascending; there are enough of them on the `nodes`.

    The largest groups choose first: the node with the fewest ranks left that are enough, else all of the node
    with the most, and so on with the rest.
    """
    left = [list(node) for node in nodes]
    chosen: list[list[int]] = [[] for _ in degrees]
    for number in sorted(range(len(degrees)), key=lambda g: -degrees[g]):
        own = chosen[number]
        while missing := degrees[number] - len(own):
            roomy = [node for node in left if len(node) >= missing]
            node = min(roomy, key=len) if roomy else max(left, key=len)
            own += node[:missing]
            del node[:missing]
        own.sort()
    return chosen


def dhp_degrees(lengths: Sequence[int], times: Times, pool: Pool, limit: int = NEVER) -> Degrees | None:
    """The degree of each sequence's group, or None: `dhp_groups`."""
    groups = dhp_groups(lengths, times, pool, limit, _TARGETS_OF_CANDIDATE)
    if groups is None:
        return None
    degrees = np.ones(len(lengths), np.int64)
    for group in groups:
        degrees[list(group.members)] = group.degree
    return degrees


def dhp_groups(
    lengths: Sequence[int], times: Times, pool: Pool, limit: int, num_targets: int
) -> list[Group] | None:
    """Groups packed for the least target time below `limit` that lets them stand side by side on the ranks,
    then spread by the dynamic program: so many targets are tried, by halving. None if none of them lets them.

    `times[s, k - 1]` is the time of sequence s over k ranks, NEVER where they do not hold its tokens.
    """
    low, groups = makespan_floor(times) - 1, None
    high = min(2 * low + 2, limit - 1)
    for _ in range(num_targets):
        target = (low + high) // 2 if groups else high
        packed = pack_groups(lengths, times, target, pool.tokens_per_rank)
        if packed is not None:
            groups, high = packed, target
        elif groups:
            low = target
        else:
            low, high = high, min(2 * high, limit - 1)
            if low == high:
                return None
    if groups is None:
        return None
    of_group = np.stack([times[list(group.members)].sum(0) for group in groups])
    of_group[:, 1:] += pool.cost.sharing_ns
    tokens = [sum(lengths[number] for number in group.members) for group in groups]
    # Of fewer ranks than a group was packed for, one alone may be quicker, since nobody is waited for there.
    chosen = allocate_ranks(within_memory(tokens, np.minimum(of_group, NEVER), pool))
    assert chosen is not None, "the degrees of the groups fit side by side"
    return [Group(group.members, degree) for group, degree in zip(groups, chosen, strict=True)]


def pack_groups(
    lengths: Sequence[int], times: Times, target_ns: int, tokens_per_rank: int | None
) -> list[Group] | None:
    """Best-fit-decreasing packing into atomic groups that stand side by side on the ranks.

    A sequence gets the least degree that keeps to the target and to the ranks' memory (where `times` is not
    NEVER), and joins the group of that degree that it leaves the least idle. None if a sequence has no such
    degree, or if the groups need more ranks than there are.
    """
    fits = (times <= target_ns) & (times < NEVER)
    if not fits.any(1).all():
        return None
    degrees = fits.argmax(1) + 1
    own = times[np.arange(len(lengths)), degrees - 1]
    if int((own * degrees).sum()) > target_ns * times.shape[1]:
        return None
    spent, degree_of = own.tolist(), degrees.tolist()
    ranks_left = times.shape[1]
    groups: list[tuple[int, list[int]]] = []
    free: list[int] = []  # tokens that each group has room for
    idle: dict[int, list[tuple[int, int]]] = {}  # by degree: (nanoseconds left, group), ascending
    for number in sorted(range(len(lengths)), key=lambda s: -lengths[s]):
        degree, ns = degree_of[number], spent[number]
        rooms = idle.setdefault(degree, [])
        at = bisect_left(rooms, (ns, -1))
        while at < len(rooms) and free[rooms[at][1]] < lengths[number]:
            at += 1
        if at < len(rooms):
            left, group = rooms.pop(at)
        elif degree > ranks_left:
            return None
        else:
            ranks_left -= degree
            left, group = target_ns, len(groups)
            groups.append((degree, []))
            free.append(NEVER if tokens_per_rank is None else degree * tokens_per_rank)
        groups[group][1].append(number)
        free[group] -= lengths[number]
        insort(rooms, (left - ns, group))
    return [Group(tuple(members), degree) for degree, members in groups]


def allocate_ranks(times: Times) -> tuple[int, ...] | None:
    """Degrees with the least makespan: the two-dimensional dynamic program over groups and ranks.

    `times[g, d - 1]` is the time of group g over d ranks, NEVER where it may not have d. The groups are
    disjoint and have at most `times.shape[1]` ranks together. Of equally good degrees a group takes the
    smallest, the last group first. None if the groups need more ranks. O(groups · ranks²).
    """
    num_cp_ranks = times.shape[1]
    before = np.arange(num_cp_ranks + 1)[:, None] - np.arange(
        1, num_cp_ranks + 1
    )  # ranks left to earlier groups
    least = np.zeros(num_cp_ranks + 1, np.int64)  # makespan of the groups so far on j ranks
    chosen = []
    for row in times:
        outcomes = np.where(before >= 0, np.maximum(least[before], row), NEVER)
        chosen.append(outcomes.argmin(1))
        least = outcomes.min(1)
    if least[-1] >= NEVER:
        return None
    left, degrees = num_cp_ranks, []
    for choice in reversed(chosen):
        degrees.append(int(choice[left]) + 1)
        left -= degrees[-1]
    return tuple(reversed(degrees))
