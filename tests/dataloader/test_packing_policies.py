"""What policies of packing promise, and what each is for."""

from itertools import accumulate
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_policies import own
from samples import chart_samples, sized, variation

from dataloader.packing import PackingPolicy
from dataloader.packing.entrain import ENTRAIN
from dataloader.packing.first_fit import FIRST_FIT_DECREASING
from dataloader.packing.graded import GRADED, SHARES
from dataloader.packing.policy import pack_of

POLICIES = own(PackingPolicy)


rows = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 10**9), st.integers(0, 10**9)), max_size=60)


@settings(deadline=None, max_examples=300)
@given(rows, st.integers(30, 100), st.sampled_from(sorted(POLICIES)))
def test_every_sample_is_packed_once_and_encoded_with_its_pack_or_an_earlier_one(samples, budget, name):
    policy, costs = POLICIES[name], sized(samples)
    packs = policy(costs, budget)  # the kind checks its promise
    assert packs == policy(costs, budget)
    encoded = policy.encoded_with(costs, packs, budget)
    assert all(with_ <= at for with_, at in zip(encoded, pack_of(packs), strict=True))
    assert name == "entrain" or encoded == pack_of(packs)


@settings(deadline=None, max_examples=100)
@given(rows, st.integers(30, 100))
def test_rows_that_wait_for_a_later_pack_are_of_no_more_tokens_than_a_pack(samples, budget):
    costs = sized(samples)
    packs = ENTRAIN(costs, budget)
    encoded = ENTRAIN.encoded_with(costs, packs, budget)
    change = [0] * (len(packs) + 1)
    for (tokens, _, items), first, at in zip(samples, encoded, pack_of(packs), strict=True):
        if items:
            change[first] += tokens
            change[at] -= tokens
    assert max(accumulate(change)) <= budget


def next_fit(samples, budget):
    """Packs of a plain loader: filled in the order in which samples come."""
    packs, held = [], budget
    for sample, (tokens, *_) in enumerate(samples):
        if held + tokens > budget:
            packs.append([])
            held = 0
        packs[-1].append(sample)
        held += tokens
    return tuple(map(tuple, packs))


def test_entrain_levels_encoders_and_the_llm_at_once():
    plain, level = [], []
    for seed in range(5):
        samples = chart_samples(seed, 256)
        costs = sized(samples)
        in_order = next_fit(samples, 16_384)
        packs = ENTRAIN(costs, 16_384)
        assert len(packs) <= len(in_order) + 1
        encoded = ENTRAIN.encoded_with(costs, packs, 16_384)
        plain.append([variation(samples, pack_of(in_order), column) for column in (1, 2)])
        level.append(
            [variation(samples, bins, column) for bins, column in ((pack_of(packs), 1), (encoded, 2))]
        )
    gains = [
        mean(of) / mean(to) for of, to in zip(zip(*plain, strict=True), zip(*level, strict=True), strict=True)
    ]
    assert min(gains) > 5, gains


def test_the_first_graded_packs_grow_and_the_others_are_full():
    costs = sized([(10 + i % 37, 1, 0) for i in range(600)])
    packs, plain = GRADED(costs, 1000), FIRST_FIT_DECREASING(costs, 1000)
    held = [int(costs.tokens[list(members)].sum()) for members in packs]
    for share, tokens in zip(SHARES, held, strict=False):
        assert 0.9 * share * 1000 < tokens <= share * 1000
    assert sum(tokens < 900 for tokens in held) <= len(SHARES) + 1
    assert len(packs) <= len(plain) + len(SHARES)


def test_few_samples_are_packed_as_without_grades():
    costs = sized([(10 + i % 37, 1, 0) for i in range(100)])
    assert GRADED(costs, 1000) == FIRST_FIT_DECREASING(costs, 1000)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_what_is_longer_than_the_budget_has_a_pack_of_its_own(name):
    packs = POLICIES[name](sized([(3, 1, 1), (30, 9, 9), (4, 1, 0), (20, 5, 5)]), 10)
    assert {(1,), (3,)} < set(packs)
    assert (0, 2) in packs
