"""Policies of balance: what each promises, against brute force on small cases."""

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_policies import own
from samples import bins_of, samples_of

from dataloader.balance import BalancePolicy, Bins, SampleCosts
from dataloader.balance.costs import bin_ns
from dataloader.balance.simple import LPT, NONE

POLICIES = own(BalancePolicy)
one_cost = st.integers(0, 10**12)
costs = st.lists(st.tuples(one_cost, one_cost, one_cost), max_size=40)


@settings(deadline=None)
@given(costs, st.integers(1, 8), st.integers(1, 8), st.sampled_from(sorted(POLICIES)))
def test_policies_assign_each_sample_to_a_bin(costs, count, width, name):
    samples, bins = samples_of(costs), bins_of(count, width, 3)
    chosen = POLICIES[name](samples, bins)
    assert len(chosen) == len(costs)
    assert all(type(number) is int and 0 <= number < count for number in chosen)
    assert chosen == POLICIES[name](samples, bins)


def largest_sum(samples: SampleCosts, bins: Bins, chosen: Sequence[int]) -> int:
    """What the busiest bin takes of all components together."""
    totals = samples.total_ns
    return max(sum(t for t, b in zip(totals, chosen, strict=True) if b == k) for k in range(bins.count))


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_lpt_is_within_four_thirds_of_the_optimum(costs, n):
    samples, bins = samples_of(costs), bins_of(n)
    optimum = min(largest_sum(samples, bins, chosen) for chosen in product(range(n), repeat=len(costs)))
    assert 3 * n * largest_sum(samples, bins, LPT(samples, bins)) <= (4 * n - 1) * optimum


def test_none_and_lpt_by_hand():
    assert NONE(samples_of([9, 1, 1, 1]), bins_of(2)) == (0, 1, 0, 1)
    assert LPT(samples_of([3, 9, 3, 3]), bins_of(2)) == (1, 0, 1, 1)
    assert LPT(samples_of([(1, 2), (9, 0), (0, 3), (3, 0)]), bins_of(2, 1, 2)) == (1, 0, 1, 1)
    assert LPT(samples_of([5, 5, 5, 5]), bins_of(2)) == (0, 1, 0, 1)  # ties by id
    assert LPT(samples_of([]), bins_of(2)) == ()
    with pytest.raises(ValueError, match="bins is 0"):
        bins_of(0)


def test_a_bin_takes_its_share_of_the_sum_and_no_less_than_what_cannot_be_split():
    samples = samples_of([(10, 1), (5, 8), (3, 3)], unsplit=[(4, 1), (4, 2), (3, 3)])
    assert bin_ns([0, 0, 1], samples, bins_of(3, 2, 2)).tolist() == [[8, 5], [3, 3], [0, 0]]
    assert bin_ns([0, 0, 1], samples, bins_of(2, 5, 2)).tolist() == [[4, 2], [3, 3]]
