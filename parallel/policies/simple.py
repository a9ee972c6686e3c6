"""Sharing policies that decide at most one thing for all sequences: those of other systems, and baselines."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from parallel.layout import split_evenly
from parallel.policies.degrees import best_build, power_degrees
from parallel.policies.pool import Build, Degrees, Pool, costliest_first, degree_times, most_ranks, no_room
from parallel.sequence import SequenceLayout, Shard


def shard_none(lengths: Sequence[int], pool: Pool) -> SequenceLayout:
    """Whole sequences, the costliest first, each to the least loaded rank with room."""
    rows = degree_times(lengths, pool).tolist()
    build = Build(lengths, rows, pool)
    if not build.place(costliest_first(rows)):
        raise no_room(lengths, pool)
    return build.layout()


def shard_uniform(lengths: Sequence[int], pool: Pool) -> SequenceLayout:
    """Every sequence over all ranks in parts that differ by at most one unit, larger parts first: what
    context parallelism is elsewhere.
    """
    layout = SequenceLayout(pool.num_cp_ranks, tuple(_equal_parts(length, pool) for length in lengths))
    limit = pool.tokens_per_rank
    if limit is not None and max(map(layout.local_tokens, range(pool.num_cp_ranks))) > limit:
        raise no_room(lengths, pool)
    return layout


def _equal_parts(length: int, pool: Pool) -> tuple[Shard, ...]:
    units = split_evenly(-(-length // pool.unit), pool.num_cp_ranks)
    stops = [min(length, stop * pool.unit) for stop in accumulate(units)]
    starts = [0, *stops]
    cuts = zip(range(pool.num_cp_ranks), starts, stops, strict=False)
    return tuple(Shard(rank, start, stop - start) for rank, start, stop in cuts if stop > start) or (
        Shard(0, 0, 0),
    )


def shard_all(lengths: Sequence[int], pool: Pool) -> SequenceLayout:
    """Every sequence evenly over all ranks, or over as many as it has units."""
    build = Build(lengths, [], pool)
    for number in range(len(lengths)):
        build.pour(number, _everywhere(pool))
    if not build.fits:
        raise no_room(lengths, pool)
    return build.layout()


def _everywhere(pool: Pool) -> list[tuple[int, int]]:
    return [(rank, 1) for rank in range(pool.num_cp_ranks)]


def shard_long_short(lengths: Sequence[int], pool: Pool) -> SequenceLayout:
    """Long sequences over all ranks, which loads them equally, then the others whole on top: long-short
    sequence parallelism, as MegaScale-Omni has it in encoders.

    Every length is tried as the threshold of what is long, from the longest down. The search ends where the
    mean load of the ranks alone takes as long as the best layout found.
    """
    rows = degree_times(lengths, pool, apart=True).tolist()  # over all nodes that there are
    order = costliest_first(rows)
    best: Build | None = None
    base, rest = 0, sum(row[0] for row in rows)
    for count in range(len(order) + 1):
        if count:
            last = order[count - 1]
            base += rows[last][most_ranks(lengths[last], pool) - 1] + pool.cost.sharing_ns * (count == 1)
            rest -= rows[last][0]
        if best is not None and base + rest // pool.num_cp_ranks >= best.makespan:
            break
        build = Build(lengths, rows, pool)
        for number in order[:count]:
            build.pour(number, _everywhere(pool))
        build.ns = [base] * pool.num_cp_ranks
        better = build.place(order[count:]) and build.fits
        if better and (best is None or build.makespan < best.makespan):
            best = build
    if best is None:
        raise no_room(lengths, pool)
    return best.layout()


def shard_hybrid_pow2(lengths: Sequence[int], pool: Pool, tokens_a_rank: int | None = None) -> SequenceLayout:
    """Each sequence over the least power of two of ranks that leaves each at most `tokens_a_rank` of it, in
    aligned blocks: the costliest first, each to the block whose busiest rank is least loaded.

    BalancedCPScheduler of megatron-core 0.16 aims at the same. This policy is given three advantages over it:
    its groups of ranks need not wait for one another, it balances predicted times instead of squared lengths,
    and a whole sequence may pass over ranks that are full. Users of that scheduler set `tokens_a_rank`; if it
    is not given here, the power of two with the least predicted makespan is taken.
    """
    if not lengths:
        return SequenceLayout(pool.num_cp_ranks, ())
    times = degree_times(lengths, pool)
    rows, apart = times.tolist(), degree_times(lengths, pool, apart=True).tolist()
    candidates = power_degrees(lengths, pool, tokens_a_rank)
    best = best_build(candidates, times, pool, partial(_aligned_blocks, lengths, rows, apart, pool))
    if best is None:
        raise no_room(lengths, pool)
    return best.layout()


def _aligned_blocks(
    lengths: Sequence[int],
    rows: Sequence[Sequence[int]],
    apart: Sequence[Sequence[int]],
    pool: Pool,
    degrees: Degrees,
    limit: int,
) -> Build | None:
    """Shared sequences, then the whole ones, of which none costs more. None if tokens find no room, or if the
    makespan reaches `limit` before the whole ones are placed.
    """
    build = Build(lengths, rows, pool, apart)
    order, degree_of = costliest_first(rows), degrees.tolist()
    for number in order:
        degree = degree_of[number]
        if degree > 1:
            blocks = [
                range(first, first + degree) for first in range(0, pool.num_cp_ranks - degree + 1, degree)
            ]
            build.share(number, min(blocks, key=lambda block: max(build.ns[rank] for rank in block)))
    if build.makespan >= limit or not build.fits:
        return None
    return build if build.place(number for number in order if degree_of[number] == 1) else None
