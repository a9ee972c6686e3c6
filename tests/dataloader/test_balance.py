"""Policies of balance: what each promises, against brute force on small cases."""

from itertools import cycle, product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from own_policies import own
from samples import bins_of, largest_of, largest_sum, samples_of, samples_of_trace, step_ns

from dataloader.balance import BalancePolicy, Bins, SampleCosts
from dataloader.balance.costs import bin_ns
from dataloader.balance.easing import ease, steady
from dataloader.balance.simple import LPT, NONE

POLICIES = own(BalancePolicy)
one_cost = st.integers(0, 10**12)
costs = st.lists(st.tuples(one_cost, one_cost, one_cost), max_size=40)


@settings(deadline=None)
@given(costs, st.integers(1, 8), st.integers(1, 8), st.booleans(), st.sampled_from(sorted(POLICIES)))
def test_policies_assign_each_sample_to_a_bin(costs, count, width, alone, name):
    samples, bins = samples_of(costs), Bins(count, width, (alone,) * 3)
    chosen = POLICIES[name](samples, bins)
    assert len(chosen) == len(costs)
    assert all(type(number) is int and 0 <= number < count for number in chosen)
    assert chosen == POLICIES[name](samples, bins)


def test_no_sample_is_lost_or_repeated_in_a_thousand_random_divisions():
    rng = np.random.default_rng(0)
    for number, name in zip(range(1_000), cycle(sorted(POLICIES))):
        samples, count = random_samples(rng, int(rng.integers(0, 60))), int(rng.integers(1, 12))
        chosen = POLICIES[name].decide(samples, bins_of(count, 1 + number % 3, 2))
        hands = [[i for i, to in enumerate(chosen) if to == number] for number in range(count)]
        assert sorted(i for hand in hands for i in hand) == list(range(len(samples)))


def random_samples(rng: np.random.Generator, n: int) -> SampleCosts:
    """Texts and texts with images, both with long tails; nothing of them may be split."""
    encoder = rng.lognormal(13, 1.2, n) * (rng.random(n) < 0.6)
    llm = rng.lognormal(14, 1.0, n) + encoder / 2
    rows = list(zip(llm.astype(int).tolist(), encoder.astype(int).tolist(), strict=True))
    return samples_of(rows, unsplit=rows)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=7),
    st.integers(1, 3),
)
def test_the_largest_sum_is_within_four_thirds_of_the_optimum(rows, n):
    samples, bins = samples_of(rows), bins_of(n, 1, 2)
    costs = samples.total_ns
    optimum = min(largest_of(costs, n, chosen) for chosen in product(range(n), repeat=len(rows)))
    assert 3 * n * largest_of(costs, n, LPT(samples, bins)) <= (4 * n - 1) * optimum


two_phases = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=25)
@given(two_phases, st.integers(2, 3))
@example([(12, 0), (11, 0), (0, 0), (9, 4), (21, 9), (22, 0)], 3)
def test_two_constraint_is_never_behind_the_plain_ones_and_near_the_optimum(rows, n):
    samples, bins = samples_of(rows), bins_of(n, 1, 2)
    found = step_ns(samples, bins, POLICIES["two_constraint"](samples, bins))
    assert found <= min(step_ns(samples, bins, plain(samples, bins)) for plain in (LPT, NONE))
    optimum = min(step_ns(samples, bins, chosen) for chosen in product(range(n), repeat=len(rows)))
    assert 4 * found <= 5 * optimum + 4


def test_two_constraint_evens_out_both_phases():
    # By their sums, texts and images of equal cost look alike.
    samples, bins = samples_of([(10, 0), (9, 1), (1, 9), (0, 10)]), bins_of(2, 1, 2)
    assert step_ns(samples, bins, POLICIES["two_constraint"](samples, bins)) == 20
    assert step_ns(samples, bins, (0, 0, 1, 1)) == 38


def test_two_constraint_cares_for_no_phase_below_what_cannot_be_split():
    # Whoever takes the first sample waits 40 for its encoder; only the LLM is left to even out.
    rows = [(10, 40), (10, 10), (10, 10), (10, 0)]
    samples = samples_of(rows, unsplit=[(0, 40), (0, 10), (0, 10), (0, 0)])
    chosen = POLICIES["two_constraint"](samples, bins_of(2, 2, 2))
    assert sorted(chosen) == [0, 0, 1, 1]


def test_two_constraint_leaves_encoders_to_a_domain_whose_replicas_share_them():
    rows = [(10, 90), (10, 80), (1, 0), (1, 0)]
    samples = samples_of(rows)
    alone = POLICIES["two_constraint"](samples, Bins(2, 1, (True, False)))
    assert bin_ns(alone, samples, bins_of(2, 1, 2))[:, 0].tolist() == [11, 11]


@given(costs, st.integers(1, 8))
def test_disttrain_gives_no_bin_more_samples_than_its_share(costs, n):
    chosen = POLICIES["disttrain"](samples_of(costs), bins_of(n, 1, 3))
    assert max(np.bincount(chosen, minlength=n), default=0) <= -(-len(costs) // n)


@given(two_phases, st.integers(1, 4))
def test_entrain_leaves_bins_a_sample_apart_in_encoder_work(rows, n):
    samples = samples_of(rows)
    encoders = bin_ns(POLICIES["entrain"](samples, bins_of(n, 1, 2)), samples, bins_of(n, 1, 2))[:, 1]
    assert encoders.max() - encoders.min() <= samples.ns[:, 1].max()


@settings(deadline=None)
@given(
    st.lists(st.tuples(one_cost, one_cost), min_size=1, max_size=40), st.integers(1, 6), st.integers(0, 99)
)
def test_easing_keeps_what_is_even_and_makes_no_step_longer(rows, n, seed):
    samples, bins = samples_of(rows), bins_of(n, 1, 2)
    before = np.random.default_rng(seed).integers(0, n, len(rows)).tolist()
    after = ease(samples, bins, before, steady(samples.total_ns, before, bins))
    least = max(sum(samples.total_ns) / n, *samples.total_ns)
    assert largest_sum(samples, bins, after) <= max(largest_sum(samples, bins, before), least * 7 / 6)
    assert step_ns(samples, bins, after) <= step_ns(samples, bins, before)


def test_easing_parts_encoder_work_that_met_by_chance():
    # By their sums all are alike.
    samples, bins, met = samples_of([(10, 0), (0, 10), (0, 10), (10, 0)]), bins_of(2, 1, 2), (0, 1, 1, 0)
    assert step_ns(samples, bins, met) == 40
    assert step_ns(samples, bins, ease(samples, bins, met, steady(samples.total_ns, met, bins))) == 20
    # Encoders that replicas share are even whoever takes the sample.
    shared = Bins(2, 1, (True, False))
    parted = ease(samples, shared, met, steady(samples.total_ns, met, shared))
    assert bin_ns(parted, samples, bins)[:, 0].tolist() == [10, 10]


def test_easing_lets_others_join_a_sample_that_nobody_can_part():
    """One text takes longer than all others together: these had their encoder work in one bin."""
    samples, bins = samples_of([(100, 0), *[(1, 10)] * 4]), bins_of(2, 1, 2)
    assert bin_ns(LPT(samples, bins), samples, bins)[:, 1].max() < 40


@pytest.mark.parametrize("trace", ["longtail", "shift"])
@pytest.mark.parametrize("count, width", [(16, 1), (4, 8)])
def test_no_policy_is_worse_than_none_in_the_mean_of_20_seeds_in_any_column(trace, count, width):
    # The first half of `shift`: few of its samples have encoder work.
    steps, bins = [samples_of_trace(trace, seed, width) for seed in range(20)], bins_of(count, width, 2)

    def columns(policy: BalancePolicy, samples: SampleCosts) -> list[int]:
        taken = bin_ns(policy(samples, bins), samples, bins).max(0).tolist()
        return [*taken, sum(taken)]

    means = {
        name: np.mean([columns(policy, samples) for samples in steps], 0) for name, policy in POLICIES.items()
    }
    assert {name for name, mean in means.items() if (mean > means["none"]).any()} == set()
    assert means["two_constraint"][2] <= 1.001 * min(mean[2] for mean in means.values())


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
