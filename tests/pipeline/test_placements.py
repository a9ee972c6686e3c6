from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.least_loaded import longest_first
from pipeline.policies import TpGroup, spread

costs_of_items = st.lists(st.integers(0, 30), max_size=7)


def singles(num_ranks: int) -> list[TpGroup]:
    return [(rank,) for rank in range(num_ranks)]


def on_ranks(costs: list[int], num_ranks: int) -> tuple[TpGroup, ...]:
    return spread(costs, [singles(num_ranks)] * len(costs))


def loads(costs: list[int], tp_groups: tuple[TpGroup, ...], num_ranks: int) -> list[int]:
    load = [0] * num_ranks
    for cost, tp_group in zip(costs, tp_groups, strict=True):
        for rank in tp_group:
            load[rank] += cost
    return load


@settings(deadline=None)
@given(costs_of_items, st.integers(1, 3))
def test_whole_ranks_stay_within_the_bound_of_the_best_placement(costs, num_ranks):
    choices = product(singles(num_ranks), repeat=len(costs))
    best = min(max(loads(costs, tp_groups, num_ranks)) for tp_groups in choices)
    placed = max(loads(costs, on_ranks(costs, num_ranks), num_ranks))
    assert best <= placed
    assert 3 * num_ranks * placed <= (4 * num_ranks - 1) * best


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 8))
def test_no_gap_is_larger_than_one_item(costs, num_ranks):
    load = loads(costs, on_ranks(costs, num_ranks), num_ranks)
    assert max(load) - min(load) <= max(costs, default=0)


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 8))
def test_single_ranks_are_bins(costs, num_ranks):
    bins, sums = longest_first(costs, num_ranks)
    assert on_ranks(costs, num_ranks) == tuple((number,) for number in bins)
    assert loads(costs, on_ranks(costs, num_ranks), num_ranks) == sums


def test_the_longest_go_first_and_ties_go_to_the_first_item_and_tp_group():
    assert on_ranks([1, 5, 5, 1, 1], 2) == ((0,), (0,), (1,), (1,), (0,))
    assert on_ranks([3, 3, 3], 3) == ((0,), (1,), (2,))
    assert on_ranks([0, 0], 2) == ((0,), (0,))


def test_the_worst_case_of_longest_first_is_reached():
    costs = [5, 5, 4, 4, 3, 3, 3]
    assert max(loads(costs, on_ranks(costs, 3), 3)) == 11
    assert min(max(loads(costs, tp_groups, 3)) for tp_groups in product(singles(3), repeat=7)) == 9


def test_a_tp_group_is_as_loaded_as_its_busiest_rank():
    # A small encoder alone on ranks, a large one on pairs of them.
    pairs, alone = [(0, 1), (2, 3)], singles(4)
    assert spread([9, 8, 7], [pairs, pairs, alone]) == ((0, 1), (2, 3), (2,))
    assert spread([9, 1, 5], [alone, alone, pairs]) == ((0,), (1,), (2, 3))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from([1, 2, 3, 6])), max_size=12))
def test_each_item_goes_to_one_of_its_tp_groups_and_no_other_would_have_been_better(items):
    costs = [cost for cost, _ in items]
    of_size = {size: [tuple(range(s, s + size)) for s in range(0, 6, size)] for size in (1, 2, 3, 6)}
    tp_groups = [of_size[size] for _, size in items]
    chosen = spread(costs, tp_groups)
    assert all(tp_group in of for tp_group, of in zip(chosen, tp_groups, strict=True))
    load = [0] * 6
    for item in sorted(range(len(items)), key=lambda i: (-costs[i], i)):
        peak = {tp_group: max(load[rank] for rank in tp_group) for tp_group in tp_groups[item]}
        assert peak[chosen[item]] == min(peak.values())
        assert chosen[item] == min(
            tp_group for tp_group in tp_groups[item] if peak[tp_group] == min(peak.values())
        )
        for rank in chosen[item]:
            load[rank] += costs[item]
    assert load == loads(costs, chosen, 6)


def test_an_encoder_with_one_tp_group_takes_everything():
    assert spread([4, 1, 9], [[(0, 1)]] * 3) == ((0, 1),) * 3
    assert spread([], []) == ()
