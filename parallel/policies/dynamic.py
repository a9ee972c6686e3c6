"""The dynamic policy: each sequence over as many ranks as it needs, any number of them.

Searches bounded by counts, of which the smallest predicted makespan wins:

1. Candidate degrees for all sequences: for each of a row of target times the least that keep to it, powers
   of two, and those of DHP (`parallel.policies.dhp`) for a target below the best found so far. DHP's groups
   stand side by side; here ranks may belong to several.
2. Even cuts of each candidate: shared sequences over the least loaded ranks, the slowest first, and of one
   node unless several let the makespan be less; then whole ones fill what is idle.
3. Pouring: whole sequences first, then the costliest fill the ranks up to one level, cut where a rank is
   full, so that no rank idles because a sequence needs a fraction of one. Each stays on a node that has room
   for it, if one has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from parallel.policies.degrees import best_build, makespan_floor, power_degrees
from parallel.policies.dhp import dhp_degrees
from parallel.policies.filled import fill, filled
from parallel.policies.pool import (
    NEVER,
    Build,
    Degrees,
    Parts,
    Pool,
    Times,
    costliest_first,
    degree_times,
    mirrored,
    within_memory,
)
from parallel.schemes import rank_times
from parallel.sequence import SequenceLayout

_STEPS = 12  # target times tried from the least possible up, 1 / 32 of it apart
_MORE_POURED = 1  # sequences beyond the longest that are tried as poured ones


@dataclass(frozen=True)
class Case:
    """Sequences to place: `rows[s][k - 1]` times sequence s over k ranks, and `times` is the same with NEVER
    where k ranks do not hold its tokens; `order` has the costliest first. `apart` is as `rows`, of ranks on
    several nodes, None where there is one link.
    """

    lengths: Sequence[int]
    pool: Pool
    rows: Sequence[Sequence[int]]
    times: Times
    order: Sequence[int]
    apart: Sequence[Sequence[int]] | None = None


def shard_dynamic(lengths: Sequence[int], pool: Pool) -> SequenceLayout:
    """Each sequence over as many ranks as it needs."""
    if not lengths:
        return SequenceLayout(pool.num_cp_ranks, ())
    case = case_of(lengths, pool, degree_times(lengths, pool))
    even = best_even(case)
    return layout_of(case, [even, _best_poured(case, even.makespan if even else NEVER)])


def case_of(lengths: Sequence[int], pool: Pool, times: Times) -> Case:
    """Return the sequences to place, of which number s takes `times[s, k - 1]` over k ranks."""
    rows = times.tolist()
    apart = degree_times(lengths, pool, apart=True).tolist() if len(pool.nodes) > 1 else None
    return Case(lengths, pool, rows, within_memory(lengths, times, pool), costliest_first(rows), apart)


def layout_of(case: Case, found: Sequence[Build | None]) -> SequenceLayout:
    """Return the best layout that was found; if none was, one in which all tokens find room."""
    builds = [build for build in found if build is not None]
    if not builds:
        return filled(case.lengths, case.rows, case.pool).layout()
    return min(builds, key=lambda build: build.makespan).layout()


def best_even(case: Case) -> Build | None:
    """The best of the candidate degrees with even cuts; None if tokens find no room with any of them."""
    times, pool = case.times, case.pool
    if int(times.min(1).max()) >= NEVER:
        return None
    lay = partial(evenly, case)
    best = best_build(
        np.concatenate([target_degrees(times), power_degrees(case.lengths, pool)]), times, pool, lay
    )
    found = dhp_degrees(case.lengths, times, pool, best.makespan if best else NEVER)
    return best if found is None else best_build(found[None], times, pool, lay, best)


def target_degrees(times: Times) -> Degrees:
    """For each of a row of target times, the least degrees [C, S] that keep to it, or the fastest."""
    fastest, floor = times.min(1), makespan_floor(times)
    targets = [floor + floor * step // 32 for step in range(_STEPS)]
    # Shares of half, a quarter, … of a rank's time balance where whole ranks' worth do not.
    targets += [floor >> power for power in range(1, times.shape[1].bit_length())]
    limits = np.maximum(np.array(targets)[:, None], fastest)
    return np.stack([(times <= limit[:, None]).argmax(1) + 1 for limit in limits])


def evenly(case: Case, degrees: Degrees, limit: int) -> Build | None:
    """Shared sequences, the slowest first, over the least loaded ranks; then the whole ones. None if tokens
    find no room, or if the makespan reaches `limit` before the whole ones are placed.
    """
    build = Build(case.lengths, case.rows, case.pool, case.apart)
    degree_of = {int(s): int(degrees[s]) for s in np.flatnonzero(degrees > 1)}
    work = sum(row[degree - 1] * degree for row, degree in zip(case.rows, degrees.tolist(), strict=True))
    for number in sorted(degree_of, key=lambda s: -case.rows[s][degree_of[s] - 1]):
        ranks = _ranks_for(build, number, degree_of[number], work // case.pool.num_cp_ranks)
        build.share(number, sorted(ranks))
        if build.makespan >= limit:
            return None
    if build.makespan >= limit or not build.fits:
        return None
    return build if build.place(s for s in case.order if s not in degree_of) else None


def _ranks_for(build: Build, number: int, degree: int, mean: int) -> list[int]:
    """The ranks that share a sequence: the least loaded of a node if that leaves the makespan as it is, or
    below the mean that ranks reach anyhow, or no later than the least loaded of all; else these.
    """
    emptiest = sorted(range(build.pool.num_cp_ranks), key=build.ns.__getitem__)
    anywhere = emptiest[:degree]
    if degree > build.pool.node_size or build.pool.on_one_node(anywhere):
        return anywhere

    def reached(ranks: Sequence[int]) -> int:
        return build.ns[ranks[-1]] + build.shared_ns(number, ranks)

    of_nodes = ([rank for rank in emptiest if rank in node] for node in map(set, build.pool.nodes))
    inside = min((ranks[:degree] for ranks in of_nodes if len(ranks) >= degree), key=reached, default=None)
    if inside is None or reached(inside) > max(reached(anywhere), build.makespan, mean):
        return anywhere
    return inside


def _best_poured(case: Case, limit: int) -> Build | None:
    """The best layout whose costliest sequences level the ranks, timed with its tiles; None if tokens find no
    room or if no level is below `limit`.
    """
    rows, order, pool = case.rows, case.order, case.pool
    whole = sum(row[0] for row in rows)
    mean = whole // pool.num_cp_ranks
    longest = sum(row[0] > mean * 17 // 16 for row in rows)
    best: Build | None = None
    least, amounts = limit, {}
    for count in range(max(1, longest), min(len(order), longest + _MORE_POURED) + 1):
        poured = {s: _amount(rows[s], mean) for s in order[:count]}
        amount = sum(poured.values())
        rest = whole - sum(rows[s][0] for s in poured)
        if (amount + rest) // pool.num_cp_ranks >= least:
            break
        build = Build(case.lengths, rows, pool)
        if build.place(order[count:]):
            reached = max(level(build.ns, amount, pool.cost.sharing_ns), build.makespan)
            if reached < least:
                best, least, amounts = build, reached, poured
    if best is None:
        return None
    rooms = [least - pool.cost.sharing_ns - ns for ns in best.ns]
    parts = fill(amounts, rooms, pool.nodes)
    builds = (_timed(best, of) for of in (_both_ways(parts, pool), parts))
    return next((build for build in builds if build.fits), None)


def _both_ways(parts: Mapping[int, Parts], pool: Pool) -> dict[int, Parts]:
    """Parts of poured sequences in an order that suits several nodes (`mirrored`)."""
    return {
        number: mirrored(of, pool.cost.nodes)
        if pool.cost.shape.causal and not pool.on_one_node([rank for rank, _ in of])
        else of
        for number, of in parts.items()
    }


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


def _timed(whole: Build, parts: Mapping[int, Parts]) -> Build:
    """Add poured sequences to whole ones, and the times of the tiles that they get."""
    build = Build(whole.lengths, whole.rows, whole.pool)
    build.placed, build.tokens = whole.placed, [*whole.tokens]
    for number, of_ranks in parts.items():
        build.pour(number, of_ranks)
    shared = SequenceLayout(whole.pool.num_cp_ranks, tuple(build.shards(number) for number in parts))
    added = rank_times(shared, whole.pool.cost)
    build.ns = [ns + time.total_ns for ns, time in zip(whole.ns, added, strict=True)]
    return build
