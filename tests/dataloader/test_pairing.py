"""Which packs of a domain's replicas pass together."""

from itertools import permutations, product, zip_longest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_policies import own

from dataloader.policies import ALIKE, IN_ORDER, PairingPolicy

POLICIES = own(PairingPolicy)
packs = st.lists(
    st.lists(st.tuples(st.integers(0, 10**12), st.integers(1, 40)), max_size=12), min_size=1, max_size=5
)


def columns(replicas):
    """Nanoseconds and tokens of each pack of each replica."""
    return [[ns for ns, _ in own] for own in replicas], [[tokens for _, tokens in own] for own in replicas]


@settings(deadline=None)
@given(packs, st.integers(40, 200), st.sampled_from(sorted(POLICIES)))
def test_every_pack_passes_once_and_packs_together_find_room(replicas, room, name):
    costs, tokens = columns(replicas)
    together = POLICIES[name](costs, tokens, room)  # the kind checks its promise
    assert together == POLICIES[name](costs, tokens, room)
    assert sum(pack is not None for chosen in together for pack in chosen) == sum(map(len, replicas))


@settings(deadline=None)
@given(packs)
def test_where_all_find_room_as_many_microbatches_as_a_replica_has_packs(replicas):
    costs, tokens = columns(replicas)
    for policy in POLICIES.values():
        assert len(policy(costs, tokens, 40 * len(replicas))) == max(map(len, replicas))
    in_turn = zip_longest(*(range(len(own)) for own in replicas))
    assert IN_ORDER(costs, tokens, 40 * len(replicas)) == tuple(in_turn)


def waited_for(costs, together):
    """Nanoseconds of all microbatches, if each takes as long as its costliest pack."""
    return sum(
        max(own[p] for own, p in zip(costs, chosen, strict=True) if p is not None) for chosen in together
    )


small = st.lists(st.integers(0, 9), min_size=3, max_size=3)


@settings(deadline=None, max_examples=50)
@given(st.lists(small, min_size=1, max_size=3))
def test_no_pairing_waits_less_than_alike(costs):
    tokens = [[1] * len(own) for own in costs]
    best = min(
        waited_for(costs, list(zip(*orders, strict=True)))
        for orders in product(permutations(range(3)), repeat=len(costs))
    )
    assert waited_for(costs, ALIKE(costs, tokens, 100)) == best


@pytest.mark.parametrize("policy", [IN_ORDER, ALIKE])
def test_a_pack_without_room_waits_and_a_longer_one_passes_alone(policy):
    costs, tokens = [[9, 1], [5, 4]], [[30, 10], [10, 10]]  # a pack of 30 among those of at most 10
    assert policy(costs, tokens, 20) == ((0, None), (1, 0), (None, 1))
    assert policy(costs, tokens, 40) == ((0, 0), (1, 1))
