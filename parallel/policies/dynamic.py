"""The dynamic policy: each sequence over as many ranks as it needs, any number of them.

Three searches, each bounded by a count, of which the smallest predicted makespan wins:

1. DHP (Niu et al., 2026, arXiv 2602.21788, its two stages): sequences are packed into atomic groups for a
   target time, and a dynamic program over groups × ranks gives the groups their degrees. Its groups stand
   side by side; here ranks may belong to several, so its degrees are one candidate among others.
2. Targets: for each of a row of target times, the least degrees that keep to it. As in 1, shared sequences
   are cut evenly over the least loaded ranks, and whole ones fill what is idle.
3. Pouring: whole sequences first, then the costliest fill the ranks up to one level, cut where a rank is
   full, so that no rank idles because a sequence needs a fraction of one.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest

import numpy as np
import numpy.typing as npt

from parallel.policies.pool import NEVER, Build, Pool, Times, costliest_first, degree_times, no_room
from parallel.schemes import rank_times
from parallel.sequence import SequenceLayout

_HALVINGS = 4  # of the range in which DHP's target time is searched
_STEPS = 12  # target times tried from the least possible up, 1 / 32 of it apart
_MORE_POURED = 1  # sequences beyond the longest that are tried as poured ones

Degrees = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Case:
    """Sequences to place: `rows[s][k - 1]` times sequence s over k ranks, and `times` is the same with NEVER
    where k ranks do not hold its tokens; `order` has the costliest first.
    """

    lengths: Sequence[int]
    pool: Pool
    rows: Sequence[Sequence[int]]
    times: Times
    order: Sequence[int]


def shard_dynamic(lengths: Sequence[int], pool: Pool, powers_of_two: bool = False) -> SequenceLayout:
    """Each sequence over as many ranks as it needs; `powers_of_two` allows only such numbers, cut evenly."""
    if not lengths:
        return SequenceLayout(pool.num_ranks, ())
    times = degree_times(lengths, pool)
    if powers_of_two:
        degrees = np.arange(1, pool.num_ranks + 1)
        times[:, degrees & (degrees - 1) > 0] = NEVER
    rows = times.tolist()
    times = within_memory(lengths, times, pool.tokens_per_rank)
    case = _Case(lengths, pool, rows, times, costliest_first(rows))
    found = [_best_even(case)]
    if not powers_of_two:
        found.append(_best_poured(case, found[0].makespan if found[0] else NEVER))
    builds = [build for build in found if build is not None]
    best = min(builds, key=lambda build: build.makespan) if builds else _filled(case)
    return best.layout()


def within_memory(lengths: Sequence[int], times: Times, tokens_per_rank: int | None) -> Times:
    """Times with NEVER where so few ranks do not hold a sequence's tokens."""
    if tokens_per_rank is None:
        return times
    room = np.arange(1, times.shape[1] + 1) * tokens_per_rank
    return np.where(np.array(lengths, np.int64)[:, None] > room, NEVER, times)


@dataclass(frozen=True)
class Group:
    """Sequences that share `degree` ranks."""

    members: tuple[int, ...]
    degree: int


def pack_groups(
    lengths: Sequence[int], times: Times, target_ns: int, tokens_per_rank: int | None
) -> list[Group] | None:
    """Best-fit-decreasing packing into atomic groups.

    A sequence gets the least degree that keeps to the target and to the ranks' memory, and joins the group of
    that degree that it leaves the least idle. None if a sequence has no such degree, or if the groups could
    not stand side by side on the ranks even if none idled.
    """
    degrees = least_degrees(within_memory(lengths, times, tokens_per_rank), target_ns)
    if degrees is None:
        return None
    own = times[np.arange(len(lengths)), degrees - 1]
    if int((own * degrees).sum()) > target_ns * times.shape[1]:
        return None
    spent = own.tolist()
    groups: list[tuple[int, list[int]]] = []
    free: list[int] = []  # tokens that each group has room for
    idle: dict[int, list[tuple[int, int]]] = {}  # by degree: (nanoseconds left, group), ascending
    degree_of = degrees.tolist()
    for number in sorted(range(len(lengths)), key=lambda s: -lengths[s]):
        degree, ns = degree_of[number], spent[number]
        rooms = idle.setdefault(degree, [])
        at = bisect_left(rooms, (ns, -1))
        while at < len(rooms) and free[rooms[at][1]] < lengths[number]:
            at += 1
        if at < len(rooms):
            left, group = rooms.pop(at)
        else:
            left, group = target_ns, len(groups)
            groups.append((degree, []))
            free.append(NEVER if tokens_per_rank is None else degree * tokens_per_rank)
        groups[group][1].append(number)
        free[group] -= lengths[number]
        insort(rooms, (left - ns, group))
    return [Group(tuple(members), degree) for degree, members in groups]


def least_degrees(times: Times, target_ns: int | Times) -> Degrees | None:
    """The least degree of each sequence within a target, or its own target [S, 1]; None if one has none."""
    fits = (times <= target_ns) & (times < NEVER)
    found: Degrees = fits.argmax(1) + 1
    return found if fits.any(1).all() else None


def allocate_ranks(times: Times) -> tuple[int, ...] | None:
    """Degrees with the least makespan: the two-dimensional dynamic program over groups and ranks.

    `times[g, d - 1]` is the time of group g over d ranks, NEVER where it may not have d. The groups are
    disjoint and have at most `times.shape[1]` ranks together. Of equally good degrees a group takes the
    smallest, the last group first. None if the groups need more ranks. O(groups · ranks²).
    """
    num_ranks = times.shape[1]
    before = np.arange(num_ranks + 1)[:, None] - np.arange(1, num_ranks + 1)  # ranks left to earlier groups
    least = np.zeros(num_ranks + 1, np.int64)  # makespan of the groups so far on j ranks
    chosen = []
    for row in times:
        outcomes = np.where(before >= 0, np.maximum(least[before], row), NEVER)
        chosen.append(outcomes.argmin(1))
        least = outcomes.min(1)
    if least[-1] >= NEVER:
        return None
    left, degrees = num_ranks, []
    for choice in reversed(chosen):
        degrees.append(int(choice[left]) + 1)
        left -= degrees[-1]
    return tuple(reversed(degrees))


def dhp_degrees(lengths: Sequence[int], times: Times, pool: Pool) -> Degrees | None:
    """Degrees of DHP: groups packed for the least target time that lets them stand side by side on the ranks,
    found by halving, then spread by the dynamic program. None if the search finds no such time.
    """
    low, groups = _floor(times) - 1, None
    high = 2 * low + 2
    for _ in range(_HALVINGS):
        target = (low + high) // 2 if groups else high
        packed = pack_groups(lengths, times, target, pool.tokens_per_rank)
        if packed is not None and sum(group.degree for group in packed) <= pool.num_ranks:
            groups, high = packed, target
        elif groups:
            low = target
        else:
            low, high = high, 2 * high
    if groups is None:
        return None
    of_group = np.stack([times[list(group.members)].sum(0) for group in groups])
    of_group[:, 1:] += pool.cost.sharing_ns
    # On fewer ranks than it was packed for, a group misses its target or a member its memory (NEVER).
    chosen = allocate_ranks(np.minimum(of_group, NEVER))
    assert chosen is not None, "the degrees of the groups fit side by side"
    degrees = np.ones(len(lengths), np.int64)
    for group, degree in zip(groups, chosen, strict=True):
        degrees[list(group.members)] = degree
    return degrees


def _floor(times: Times) -> int:
    """A makespan that even cuts cannot be below: all ranks busy, and the slowest sequence at its fastest."""
    work = (times * np.arange(1, times.shape[1] + 1)).min(1).sum()
    return max(int(work) // times.shape[1], int(times.min(1).max()))


def _best_even(case: _Case) -> Build | None:
    """The best of the candidate degrees with even cuts; None if tokens find no room with any of them."""
    pool, times = case.pool, case.times
    fastest, floor = times.min(1, keepdims=True), _floor(times)
    targets = [floor + floor * step // 32 for step in range(_STEPS)]
    candidates = [least_degrees(times, target) for target in targets]
    candidates.append(dhp_degrees(case.lengths, times, pool))
    # Shares of half, a quarter, … of a rank's time balance where whole ranks' worth do not.
    finer = [floor >> power for power in range(1, pool.num_ranks.bit_length())]
    candidates += [least_degrees(times, np.maximum(target, fastest)) for target in finer]
    candidates += _power_degrees(case)
    best: Build | None = None
    seen: set[bytes] = set()
    for degrees in candidates:
        if degrees is None or degrees.tobytes() in seen:
            continue
        seen.add(degrees.tobytes())
        own = times[np.arange(len(times)), degrees - 1]
        bound = max(int(own.max()), int((own * degrees).sum()) // pool.num_ranks)
        if best is not None and bound >= best.makespan:
            continue
        build = _evenly(case, degrees, best.makespan if best else NEVER)
        if build is not None and (best is None or build.makespan < best.makespan):
            best = build
    return best


def _power_degrees(case: _Case) -> list[Degrees]:
    """For each power of two of tokens that a rank may hold of a sequence, the least power of two of ranks."""
    lengths = np.array(case.lengths, np.int64)
    powers = 1 << np.arange(max(int(lengths.max()), case.pool.num_ranks).bit_length() + 1)
    most = np.clip(-(-lengths // case.pool.unit), 1, case.pool.num_ranks)
    limit = powers[np.searchsorted(powers, most, side="right") - 1]
    return [
        np.minimum(powers[np.searchsorted(powers, -(-lengths // tokens))], limit)
        for tokens in powers[: int(lengths.max()).bit_length()].tolist()
    ]


def _evenly(case: _Case, degrees: Degrees, limit: int) -> Build | None:
    """Shared sequences, the slowest first, over the least loaded ranks; then the whole ones. None if tokens
    find no room, or if the makespan reaches `limit` before the whole ones are placed.
    """
    build = Build(case.lengths, case.rows, case.pool)
    degree_of = {int(s): int(degrees[s]) for s in np.flatnonzero(degrees > 1)}
    for number in sorted(degree_of, key=lambda s: -case.rows[s][degree_of[s] - 1]):
        ranks = nsmallest(degree_of[number], range(case.pool.num_ranks), key=build.ns.__getitem__)
        build.share(number, sorted(ranks))
    if build.makespan >= limit or not build.fits:
        return None
    return build if build.place(s for s in case.order if s not in degree_of) else None


def _best_poured(case: _Case, limit: int) -> Build | None:
    """The best layout whose costliest sequences level the ranks, timed with its tiles; None if tokens find no
    room or if no level is below `limit`.
    """
    rows, order, pool = case.rows, case.order, case.pool
    whole = sum(row[0] for row in rows)
    mean = whole // pool.num_ranks
    longest = sum(row[0] > mean * 17 // 16 for row in rows)
    best: Build | None = None
    least, amounts = limit, {}
    for count in range(max(1, longest), min(len(order), longest + _MORE_POURED) + 1):
        poured = {s: _amount(rows[s], mean) for s in order[:count]}
        amount = sum(poured.values())
        rest = whole - sum(rows[s][0] for s in poured)
        if (amount + rest) // pool.num_ranks >= least:
            break
        build = Build(case.lengths, rows, pool)
        if build.place(order[count:]):
            reached = max(level(build.ns, amount, pool.cost.sharing_ns), build.makespan)
            if reached < least:
                best, least, amounts = build, reached, poured
    if best is None:
        return None
    rooms = [least - pool.cost.sharing_ns - ns for ns in best.ns]
    build = _timed(best, fill(amounts, rooms))
    return build if build.fits else None


def _filled(case: _Case) -> Build:
    """Ranks filled with tokens one after the other: where memory leaves no choice, it is this or nothing."""
    pool = case.pool
    assert pool.tokens_per_rank is not None, "without a limit, all sequences find room"
    units = {number: -(-length // pool.unit) for number, length in enumerate(case.lengths)}
    build = Build(case.lengths, case.rows, pool)
    for number, parts in fill(units, [pool.tokens_per_rank // pool.unit] * pool.num_ranks).items():
        build.pour(number, parts)
    if not build.fits:
        raise no_room(case.lengths, pool)
    return build


def _amount(row: Sequence[int], mean: int) -> int:
    """Nanoseconds over all ranks of a sequence that is cut over about as many as its time needs."""
    degree = max(1, min(len(row), max(2, -(-row[0] // max(1, mean)))))
    while row[degree - 1] >= NEVER:
        degree -= 1
    return row[degree - 1] * degree


def level(loads: Sequence[int], amount: int, sharing_ns: int) -> int:
    """The level to which `amount` fills the ranks, the emptiest first; each of them pays `sharing_ns`."""
    below = reached = 0
    ordered = sorted(loads)
    for count, load in enumerate(ordered, 1):
        below += load + sharing_ns
        reached = -(-(amount + below) // count)
        if count < len(ordered) and reached <= ordered[count] + sharing_ns:
            break
    return reached


def fill(amounts: Mapping[int, int], rooms: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """Pour amounts into the ranks' rooms, the largest room first, going on in the next where one is full: the
    wrap-around rule (McNaughton, 1959). Returns (rank, amount) of each; a surplus goes to the last rank.
    """
    ranks = sorted(range(len(rooms)), key=lambda rank: -rooms[rank])
    at, room = 0, rooms[ranks[0]]
    parts: dict[int, list[tuple[int, int]]] = {}
    for number, left in amounts.items():
        parts[number] = [] if left else [(ranks[at], 1)]
        while left:
            while room <= 0 and at + 1 < len(ranks):
                at += 1
                room = rooms[ranks[at]]
            take = min(left, room) if at + 1 < len(ranks) else left
            parts[number].append((ranks[at], take))
            left, room = left - take, room - take
    return parts


def _timed(whole: Build, parts: Mapping[int, Sequence[tuple[int, int]]]) -> Build:
    """Add poured sequences to whole ones, and the times of the tiles that they get."""
    build = Build(whole.lengths, whole.rows, whole.pool)
    build.homes, build.tokens = whole.homes, [*whole.tokens]
    for number, of_ranks in parts.items():
        build.pour(number, of_ranks)
    shared = SequenceLayout(whole.pool.num_ranks, tuple(build.shards(number) for number in parts))
    added = rank_times(shared, whole.pool.cost)
    build.ns = [ns + time.total_ns for ns, time in zip(whole.ns, added, strict=True)]
    return build
