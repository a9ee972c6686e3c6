from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.cluster import Link
from parallel.policies import make_pool
from parallel.policies.degrees import makespan_floor
from parallel.policies.dhp import allocate_ranks, dhp_degrees, pack_groups, shard_dhp, side_by_side
from parallel.policies.pool import NEVER, Pool, degree_times, within_memory
from parallel.schemes import SequenceCost, rank_times
from parallel.sequence import SequenceLayout
from parallel.tiles import AttentionShape

# so400m by `cluster=h100`, in bf16.
VIT = SequenceCost(AttentionShape(16, 16), 27, 1_874_199_555, 279_555, 144, Link(15_000, 50 * 10**9))


def best_degrees(times: np.ndarray) -> int:
    """Makespan of the best of all degrees whose sum is within the ranks."""
    num_groups, num_ranks = times.shape
    outcomes = [
        max((int(times[g, d - 1]) for g, d in enumerate(degrees)), default=0)
        for degrees in product(range(1, num_ranks + 1), repeat=num_groups)
        if sum(degrees) <= num_ranks
    ]
    return min(outcomes, default=NEVER)


def times_of_any_kind(random: Random) -> np.ndarray:
    """Up to 5 groups on up to 8 ranks: arbitrary, falling with the degree, or of predicted sequences; some
    degrees may not be allowed, and there may be more groups than ranks.
    """
    num_groups, num_ranks = random.randint(1, 5), random.randint(2, 8)
    kind = random.randrange(4)
    if kind == 0:
        return np.array([[random.randint(0, 30) for _ in range(num_ranks)] for _ in range(num_groups)])
    if kind == 1:
        rows = [[random.choice([random.randint(0, 30)] * 5 + [NEVER]) for _ in range(num_ranks)]] * 1
        rows += [[random.randint(0, 30) for _ in range(num_ranks)] for _ in range(num_groups - 1)]
        return np.array(rows)
    if kind == 2:
        works, sent = [random.randint(50, 900) for _ in range(num_groups)], random.randint(0, 40)
        return np.array([[work // d + sent * (d > 1) for d in range(1, num_ranks + 1)] for work in works])
    lengths = [random.randint(20_000, 200_000) for _ in range(num_groups)]
    times = degree_times(lengths, make_pool(VIT, num_ranks))
    if random.random() < 0.5:
        times[:, [d for d in range(num_ranks) if (d + 1) & d]] = NEVER
    return times


def test_the_dynamic_program_equals_brute_force():
    for seed in range(250):
        times = times_of_any_kind(Random(seed))
        least, degrees = best_degrees(times), allocate_ranks(times)
        assert (degrees is None) == (least >= NEVER), times
        if degrees is not None:
            assert sum(degrees) <= times.shape[1]
            assert max(int(times[g, d - 1]) for g, d in enumerate(degrees)) == least, times


def test_of_equally_good_degrees_the_smallest_are_taken():
    assert allocate_ranks(np.array([[5, 3, 3, 3], [3, 3, 3, 3]])) == (2, 1)
    assert allocate_ranks(np.zeros((0, 4), np.int64)) == ()
    assert allocate_ranks(np.ones((5, 4), np.int64)) is None


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 100_000), min_size=1, max_size=20),
    st.integers(2, 8),
    st.integers(2_000, 60_000),
    st.integers(1, 40),
)
def test_packed_groups_keep_to_time_and_memory_at_the_least_degrees(lengths, num_ranks, tokens, tenths):
    pool = make_pool(VIT, num_ranks, tokens_per_rank=tokens)
    times = within_memory(lengths, degree_times(lengths, pool), pool)
    target = int(np.where(times < NEVER, times, 0).max()) * tenths // 10
    groups = pack_groups(lengths, times, target, tokens)
    if groups is None:
        return
    assert sum(group.degree for group in groups) <= num_ranks
    assert sorted(s for group in groups for s in group.members) == list(range(len(lengths)))
    for group in groups:
        assert sum(times[s, group.degree - 1] for s in group.members) <= target
        assert sum(lengths[s] for s in group.members) <= group.degree * tokens
        for s in group.members:
            for less in range(1, group.degree):
                assert times[s, less - 1] > target or lengths[s] > less * tokens
    # Best fit: two groups of one degree that would fit into one are never both left.
    for a, b in product(groups, groups):
        if a is not b and a.degree == b.degree:
            both = a.members + b.members
            fits = sum(times[s, a.degree - 1] for s in both) <= target
            assert not fits or sum(lengths[s] for s in both) > a.degree * tokens


@pytest.mark.parametrize("seed", range(8))
def test_degrees_of_dhp_stand_side_by_side_and_beat_whole_sequences(seed):
    random = Random(seed)
    lengths = [min(131_072, round(3000 * random.lognormvariate(0, 1.4))) for _ in range(40)]
    pool = make_pool(VIT, 8)
    times = degree_times(lengths, pool)
    degrees = dhp_degrees(lengths, times, pool)
    assert degrees is not None
    shared = [s for s in range(40) if degrees[s] > 1]
    assert sum(int(degrees[s]) for s in shared) <= 8
    assert max(int(times[s, degrees[s] - 1]) for s in range(40)) < int(times[:, 0].max())


def test_only_targets_below_the_limit_are_tried():
    lengths, pool = [1000 * number for number in range(1, 41)], make_pool(VIT, 8)
    times = degree_times(lengths, pool)
    free = dhp_degrees(lengths, times, pool)
    assert free is not None
    assert dhp_degrees(lengths, times, pool, makespan_floor(times)) is None
    loose = dhp_degrees(lengths, times, pool, 2 * makespan_floor(times) + 1)
    assert loose is not None
    assert loose.tolist() == free.tolist()


# As a policy.


def cases() -> Iterator[tuple[list[int], Pool]]:
    """1,000 of them: short and long sequences, empty ones too, with and without room to spare, on nodes."""
    for seed in range(1000):
        random = Random(seed)
        num_cp_ranks, unit = random.randint(1, 12), random.choice([1, 1, 4, 64])
        median = random.choice([40, 3000])
        lengths = [
            min(131_072, int(median * random.lognormvariate(0, 1.4))) for _ in range(random.randint(1, 40))
        ]
        units = sum(-(-length // unit) for length in lengths)
        room = random.choice([None, None, units * 2, units * 5 // 4, units])
        tokens = None if room is None else max(1, -(-room // num_cp_ranks)) * unit + random.randrange(unit)
        cost = VIT
        if size := random.choice([0, 2, 3]):
            nodes = tuple(cp_rank // size for cp_rank in range(num_cp_ranks))
            cost = replace(VIT, inside=Link(8_000, 450 * 10**9), nodes=nodes)
        yield lengths, make_pool(cost, num_cp_ranks, unit, tokens)


def groups_in(layout: SequenceLayout) -> set[tuple[int, ...]]:
    """The ranks that each sequence is on."""
    return {tuple(sorted(shard.cp_rank for shard in shards)) for shards in layout.shards}


def test_every_layout_of_dhp_keeps_what_a_sharing_policy_promises():
    apart = 0
    for lengths, pool in cases():
        layout = shard_dhp(lengths, pool)
        assert layout.num_cp_ranks == pool.num_cp_ranks
        assert layout.lengths == tuple(lengths)
        assert all(shard.start % pool.unit == 0 for shards in layout.shards for shard in shards)
        if pool.tokens_per_rank is not None:
            assert max(map(layout.local_tokens, range(pool.num_cp_ranks))) <= pool.tokens_per_rank
        shared = [set(ranks) for ranks in groups_in(layout)]
        side_by_side = all(one == other or not one & other for one, other in product(shared, shared))
        assert side_by_side or pool.tokens_per_rank is not None, (lengths, pool)
        apart += side_by_side
        # What is shared at the least cost, all ranks busy: nothing can be below that, but for cuts at units.
        if pool.unit == 1 and side_by_side:
            floor = makespan_floor(degree_times(lengths, pool))
            assert max(time.total_ns for time in rank_times(layout, pool.cost)) >= 0.98 * floor
    assert apart > 700


def test_groups_of_dhp_share_evenly_and_leave_no_sequence_the_whole_time():
    """Two long sequences and many short ones: the long ones on ranks of their own, cut alike."""
    lengths = [100_000, 100_000, *[1000] * 40]
    pool = make_pool(VIT, 8)
    layout = shard_dhp(lengths, pool)
    long, other = (sorted(shard.cp_rank for shard in layout.shards[s]) for s in (0, 1))
    assert not set(long) & set(other)
    assert len(long) > 1 < len(other)
    for shards in layout.shards:
        assert max(s.length for s in shards) - min(s.length for s in shards) <= 1
    assert all(len(shards) == 1 for shards in layout.shards[2:])
    slowest = max(time.total_ns for time in rank_times(layout, VIT))
    assert slowest < 0.4 * int(degree_times([100_000], pool)[0, 0])


def test_groups_stand_on_one_node_where_one_has_room():
    nodes = [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert side_by_side([1, 3, 4], nodes) == [[7], [4, 5, 6], [0, 1, 2, 3]]
    assert side_by_side([6, 2], nodes) == [[0, 1, 2, 3, 4, 5], [6, 7]]
    assert side_by_side([3, 3, 2], nodes) == [[0, 1, 2], [4, 5, 6], [3, 7]]
    assert side_by_side([], nodes) == []


def test_ranks_that_hold_no_whole_number_of_units_are_not_overfilled():
    """Two ranks hold 200 tokens, but two units of 64 each are more than 100."""
    layout = shard_dhp([200], make_pool(VIT, 4, 64, 100))
    assert [layout.local_tokens(rank) for rank in range(4)] == [64, 64, 64, 8]


def test_full_ranks_are_filled_where_groups_find_no_room():
    """Nine sequences of which no rank holds two fit on eight ranks only if one is cut."""
    layout = shard_dhp([800] * 9, make_pool(VIT, 8, 1, 900))
    assert layout.lengths == (800,) * 9
    assert max(map(layout.local_tokens, range(8))) <= 900
    with pytest.raises(ValueError, match="tokens_per_rank=799"):
        shard_dhp([800] * 9, make_pool(VIT, 8, 1, 799))
