import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloader.packing.first_fit import pack


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=200), st.integers(50, 120))
def test_bins_hold_every_sample_once_within_the_budget(lengths, budget):
    bins = pack(lengths, budget)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= budget for members in bins)
    assert all(list(members) == sorted(members) for members in bins)
    assert [members[0] for members in bins] == sorted(members[0] for members in bins)
    assert len(bins) <= max(1, 2 * sum(lengths) // budget + 1)


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), max_size=60), st.integers(50, 120))
def test_it_is_first_fit_decreasing(lengths, budget):
    loads, naive = [], []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for place in range(len(loads) + 1):
            if place == len(loads):
                loads.append(0)
                naive.append([])
            if loads[place] + lengths[i] <= budget or not loads[place]:
                loads[place] += lengths[i]
                naive[place].append(i)
                break
    assert pack(lengths, budget) == tuple(sorted(tuple(sorted(members)) for members in naive))


def fewest_bins(lengths, budget):
    best = len(lengths)

    def place(i, loads):
        nonlocal best
        if len(loads) >= best:
            return
        if i == len(lengths):
            best = len(loads)
            return
        for k in range(len(loads)):
            if loads[k] + lengths[i] <= budget:
                place(i + 1, [*loads[:k], loads[k] + lengths[i], *loads[k + 1 :]])
        place(i + 1, [*loads, lengths[i]])

    place(0, [])
    return best


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(20, 40))
def test_packing_is_near_the_optimum(lengths, budget):
    assert 9 * len(pack(lengths, budget)) <= 11 * fewest_bins(lengths, budget) + 6


def test_packing_edges():
    assert pack([], 10) == ()
    assert pack([10], 10) == ((0,),)
    assert pack([4, 6, 5, 5], 10) == ((0, 1), (2, 3))
    assert pack([3, 11, 7], 10) == ((0, 2), (1,))  # what is longer has a pack of its own
    with pytest.raises(ValueError, match="sample 0 has 0 tokens"):
        pack([0], 10)
