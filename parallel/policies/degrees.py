"""Candidate degrees of all sequences of a microbatch, and the search for the best of them."""

from collections.abc import Callable, Sequence

import numpy as np

from parallel.policies.pool import NEVER, Build, Degrees, Pool, Times


def power_degrees(lengths: Sequence[int], pool: Pool, tokens_a_rank: int | None = None) -> Degrees:
    """The least powers of two of ranks [C, S] that leave each rank at most `tokens_a_rank` of a sequence; if
    that is not given, a candidate for each power of two of tokens up to the longest sequence.
    """
    of_sequences = np.array(lengths, np.int64)
    longest = max(lengths, default=1)
    powers = 1 << np.arange(max(longest, pool.num_cp_ranks).bit_length() + 1)
    most = np.clip(-(-of_sequences // pool.unit), 1, pool.num_cp_ranks)
    limit = powers[np.searchsorted(powers, most, side="right") - 1]
    tokens = powers[: longest.bit_length() + 1] if tokens_a_rank is None else np.array([tokens_a_rank])
    return np.minimum(powers[np.searchsorted(powers, -(-of_sequences // tokens[:, None]))], limit)


def best_build(
    candidates: Degrees,
    times: Times,
    pool: Pool,
    lay: Callable[[Degrees, int], Build | None],
    best: Build | None = None,
) -> Build | None:
    """The layout with the least makespan of `best` and the candidates [C, S], of which the most promising are
    laid out first: `lay` makes a layout of degrees, or None if it finds no room or none below a makespan.

    `times[s, k - 1]` is the time of sequence s over k ranks.
    """
    bounds = makespan_bounds(candidates, times, pool)
    seen: set[bytes] = set()
    for number in bounds.argsort(kind="stable"):
        limit = best.makespan if best else NEVER
        if bounds[number] >= limit:
            break
        degrees = candidates[number]
        if degrees.tobytes() in seen:
            continue
        seen.add(degrees.tobytes())
        build = lay(degrees, limit)
        if build is not None and build.makespan < limit:
            best = build
    return best


def makespan_bounds(candidates: Degrees, times: Times, pool: Pool) -> Times:
    """What the makespan of each candidate [C, S] cannot be below; NEVER if it cannot be."""
    own = times[np.arange(len(times)), candidates - 1]
    # Less than that nobody pays: what is on several nodes, pays more.
    shared, sharing_ns = candidates > 1, (pool.cost.near if pool.node_size > 1 else pool.cost).sharing_ns
    slowest = (own + sharing_ns * shared).max(1)
    work = (own * candidates).sum(1) + sharing_ns * (candidates * shared).max(1)
    bounds: Times = np.where(slowest < NEVER, np.maximum(slowest, work // pool.num_cp_ranks), NEVER)
    return bounds


def makespan_floor(times: Times) -> int:
    """A makespan that even cuts cannot be below: all ranks busy, and the slowest sequence at its fastest."""
    work = (times * np.arange(1, times.shape[1] + 1)).min(1).sum()
    return max(int(work) // times.shape[1], int(times.min(1).max()))
