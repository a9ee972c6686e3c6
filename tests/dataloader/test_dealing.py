"""Dealing samples to groups of domains: against its definition, and the bounds that it states."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloader.dealing import BY_COST, BY_LENGTH, deal

lengths = st.lists(st.integers(0, 20) | st.integers(1, 100_000), max_size=80)
num_domains = st.integers(1, 9)
group_sizes = st.integers(1, 10)


def plain_deal(lengths: list[int], num_domains: int, group_size: int) -> list[int]:
    """The definition, sample by sample."""
    there: list[int] = []
    for round_ in range(group_size):
        groups = [n for n, size in enumerate(sizes_of(num_domains, group_size)) if round_ < size]
        there += groups[::-1] if round_ % 2 else groups
    turns = there + there[::-1]
    groups = [-1] * len(lengths)
    for place, sample in enumerate(sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))):
        groups[sample] = turns[place % len(turns)]
    return groups


def members(groups: list[int], number: int) -> list[int]:
    return [i for i, group in enumerate(groups) if group == number]


def sizes_of(num_domains: int, group_size: int) -> list[int]:
    """How many domains each group has."""
    return [len(range(num_domains)[i : i + group_size]) for i in range(0, num_domains, group_size)]


@given(lengths, num_domains, group_sizes)
def test_samples_are_dealt_as_defined_and_plainly(lengths, num_domains, group_size):
    groups = deal(lengths, num_domains, group_size)
    assert groups == plain_deal(lengths, num_domains, group_size)
    assert all(type(group) is int for group in groups)


@given(lengths, num_domains, group_sizes)
def test_groups_of_as_many_domains_differ_by_at_most_the_longest_sample_and_by_one(
    lengths, num_domains, group_size
):
    groups = deal(lengths, num_domains, group_size)
    sizes = sizes_of(num_domains, group_size)
    hands = [members(groups, number) for number in range(len(sizes))]
    assert sorted(i for hand in hands for i in hand) == list(range(len(lengths)))
    for (size, one), (other_size, other) in combinations(zip(sizes, hands, strict=True), 2):
        if size == other_size:
            difference = abs(sum(lengths[i] for i in one) - sum(lengths[i] for i in other))
            assert difference <= max(lengths, default=0)
            assert abs(len(one) - len(other)) <= 1


@given(lengths, num_domains, group_sizes)
def test_a_smaller_group_gets_as_many_fewer_samples_as_it_has_fewer_domains(lengths, num_domains, group_size):
    groups = deal(lengths, num_domains, group_size)
    each = len(lengths) / num_domains
    for number, size in enumerate(sizes_of(num_domains, group_size)):
        assert size * (each - 1) <= len(members(groups, number)) <= size * (each + 1)


def test_there_and_back_by_length():
    #         9  8  7  6  5  4  3: longest first to domains 0 1 2, 2 1 0, 0
    lengths = [3, 9, 5, 8, 4, 7, 6]
    assert deal(lengths, 3, 1) == [0, 0, 1, 1, 0, 2, 2]
    # To the first domains of groups 0 and 1, the second one of 0; back to 0, then 1 and 0; there again to 0.
    assert deal(lengths, 3, 2) == [0, 0, 1, 1, 0, 0, 0]
    assert sizes_of(3, 2) == [2, 1]


def test_equal_samples_are_dealt_in_their_order():
    assert deal([5] * 8, 4, 1) == [0, 1, 2, 3, 3, 2, 1, 0]
    assert deal([5] * 8, 4, 2) == [0, 1, 1, 0, 0, 1, 1, 0]


@pytest.mark.parametrize("group_size", [4, 5, 32])
def test_one_group_gets_everything(group_size):
    assert deal([3, 1, 2, 9, 9], 4, group_size) == [0] * 5


def test_no_samples_are_dealt_to_nobody():
    assert deal([], 4, 2) == []


@pytest.mark.parametrize("group_size", [1, 7, 32])
def test_a_world_of_thousands_is_dealt_evenly(group_size):
    lengths = np.random.default_rng(0).lognormal(7, 1.2, 8_192).astype(int).clip(1, 65_536).tolist()
    groups = deal(lengths, 512, group_size)
    loads = np.bincount(groups, np.array(lengths)) / np.array(sizes_of(512, group_size))
    most = sum(lengths) / 512 + max(lengths) / min(sizes_of(512, group_size))
    assert loads.max() < most
    if group_size == 32:
        assert loads.max() / loads.mean() < 1.05
    assert deal(lengths, 512, group_size) == groups


work = st.lists(st.tuples(st.integers(0, 1_000), st.integers(0, 1_000)), max_size=60)


@given(work, num_domains, group_sizes)
def test_dealing_by_cost_keeps_its_bounds_in_both_phases(rows, num_domains, group_size):
    sizes = sizes_of(num_domains, group_size)
    costs = np.array(rows, np.int64).reshape(-1, 2)
    groups = BY_COST(costs, sizes)
    assert groups == BY_COST(costs, sizes)
    total = costs.sum(0).tolist()
    first = [e * total[0] > llm * total[1] for llm, e in costs.tolist()]

    def dealt(phase: int, of: Sequence[bool]) -> list[int]:
        """The work of a phase that each whole group got of some samples."""
        return [
            sum(costs[i, phase] for i in members(groups, number) if of[i])
            for number, size in enumerate(sizes)
            if size == sizes[0]
        ]

    def apart(loads: list[int]) -> int:
        return max(loads) - min(loads)

    everyone, second = [True] * len(rows), [not of for of in first]
    # A load for each domain is rounded down: that may add one for each of a group's domains.
    most = [
        max((c for c, of in zip(costs[:, p].tolist(), who, strict=True) if of), default=0)
        for p, who in ((0, second), (1, first))
    ]
    assert apart(dealt(1, first)) <= most[1] + sizes[0]
    assert apart(dealt(0, everyone)) <= max(most[0], apart(dealt(0, first))) + sizes[0]


def test_dealing_by_cost_evens_out_what_lengths_do_not_tell():
    # Equal lengths; videos take 8 of the encoder, texts none.
    costs = np.array([[4, 8], [4, 8], [4, 8], [4, 8], [4, 0], [4, 0], [4, 0], [4, 0]])
    groups = BY_COST(costs, [1, 1])
    assert [costs[members(groups, number)].sum(0).tolist() for number in (0, 1)] == [[16, 16]] * 2
    assert BY_LENGTH(costs[:, :1], [1, 1]) == deal([4] * 8, 2, 1)


def test_dealing_by_cost_compares_work_of_hours_as_it_does_nanoseconds():
    """Products of the work of a sample and of all would need 98 bits."""
    costs = np.random.default_rng(0).integers(0, 1000, (200, 2))
    assert BY_COST(costs << 35, [1] * 7) == BY_COST(costs, [1] * 7)


@pytest.mark.parametrize("group_size", [2, 3])
def test_dealing_by_cost_gives_a_smaller_group_its_share(group_size):
    rng = np.random.default_rng(0)
    costs = rng.lognormal(7, 1.0, (4_000, 2)).astype(np.int64)
    sizes = sizes_of(8, group_size)
    groups = BY_COST(costs, sizes)
    each = [costs[members(groups, number)].sum(0) / size for number, size in enumerate(sizes)]
    assert np.ptp(each, 0).max() < 0.04 * np.mean(each)
