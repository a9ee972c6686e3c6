from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.policies import PLACEMENTS, place_colocated, place_stage0

costs_of_items = st.lists(st.integers(0, 30), max_size=7)


def makespan(costs, ranks, num_ranks) -> int:
    load = [0] * num_ranks
    for cost, rank in zip(costs, ranks, strict=True):
        load[rank] += cost
    return max(load)


@settings(deadline=None)
@given(costs_of_items, st.integers(1, 3))
def test_colocated_stays_within_the_bound_of_the_best_placement(costs, num_ranks):
    best = min(makespan(costs, ranks, num_ranks) for ranks in product(range(num_ranks), repeat=len(costs)))
    placed = makespan(costs, place_colocated(costs, num_ranks), num_ranks)
    assert best <= placed
    assert 3 * num_ranks * placed <= (4 * num_ranks - 1) * best


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 8))
def test_colocated_never_leaves_a_gap_larger_than_one_item(costs, num_ranks):
    load = [0] * num_ranks
    for cost, rank in zip(costs, place_colocated(costs, num_ranks), strict=True):
        load[rank] += cost
    assert max(load) - min(load) <= max(costs, default=0)


def test_the_longest_go_first_and_ties_go_to_the_first_item_and_rank():
    assert place_colocated([1, 5, 5, 1, 1], 2) == (0, 0, 1, 1, 0)
    assert place_colocated([3, 3, 3], 3) == (0, 1, 2)
    assert place_colocated([0, 0], 2) == (0, 0)


def test_the_worst_case_of_longest_first_is_reached():
    costs = [5, 5, 4, 4, 3, 3, 3]
    assert makespan(costs, place_colocated(costs, 3), 3) == 11
    assert min(makespan(costs, ranks, 3) for ranks in product(range(3), repeat=7)) == 9


@given(costs_of_items, st.integers(1, 5))
def test_stage0_places_everything_on_the_first_stage(costs, num_ranks):
    assert place_stage0(costs, num_ranks) == (0,) * len(costs)


@pytest.mark.parametrize("name", sorted(PLACEMENTS))
def test_every_placement_answers_for_every_item_and_no_items(name):
    assert PLACEMENTS[name]([], 3) == ()
    ranks = PLACEMENTS[name]([4, 1, 9], 2)
    assert len(ranks) == 3
    assert all(type(rank) is int and 0 <= rank < 2 for rank in ranks)
