from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.costs import Link
from parallel.policies import make_pool
from parallel.policies.degrees import makespan_floor
from parallel.policies.dhp import allocate_ranks, dhp_degrees, pack_groups
from parallel.policies.pool import NEVER, degree_times, within_memory
from parallel.schemes import SequenceCost
from parallel.tiles import AttentionShape

# so400m by `cluster=h100_8x8`, in bf16.
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
