"""Which packs of a domain's replicas pass together."""

from itertools import permutations, product, zip_longest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_policies import own
from samples import sized

from dataloader.pairing import PairingPolicy
from dataloader.pairing.disttrain import DISTTRAIN
from dataloader.pairing.simple import ALIKE, IN_ORDER

POLICIES = own(PairingPolicy)
packs = st.lists(
    st.lists(st.tuples(st.integers(0, 10**12), st.integers(1, 40)), max_size=12), min_size=1, max_size=5
)


def costs_of(replicas):
    """Costs of each pack, (nanoseconds, tokens), of each replica."""
    return [sized([(tokens, ns // 2, ns - ns // 2) for ns, tokens in own]) for own in replicas]


@settings(deadline=None)
@given(packs, st.integers(40, 200), st.integers(1, 4), st.sampled_from(sorted(POLICIES)))
def test_every_pack_passes_once_and_packs_together_find_room(replicas, room, stages, name):
    costs = costs_of(replicas)
    together = POLICIES[name](costs, room, stages)  # the kind checks its promise
    assert together == POLICIES[name](costs, room, stages)
    assert sum(pack is not None for chosen in together for pack in chosen) == sum(map(len, replicas))


@settings(deadline=None)
@given(packs)
def test_where_all_find_room_as_many_microbatches_as_a_replica_has_packs(replicas):
    costs = costs_of(replicas)
    for policy in POLICIES.values():
        assert len(policy(costs, 40 * len(replicas), 2)) == max(map(len, replicas))
    in_turn = zip_longest(*(range(len(own)) for own in replicas))
    assert IN_ORDER(costs, 40 * len(replicas), 2) == tuple(in_turn)


def waited_for(costs, together):
    """Nanoseconds of all microbatches, if each takes as long as its costliest pack."""
    return sum(
        max(own[p] for own, p in zip(costs, chosen, strict=True) if p is not None) for chosen in together
    )


small = st.lists(st.integers(0, 9), min_size=3, max_size=3)


@settings(deadline=None, max_examples=50)
@given(st.lists(small, min_size=1, max_size=3))
def test_no_pairing_waits_less_than_alike(costs):
    packs = costs_of([[(ns, 1) for ns in own] for own in costs])
    best = min(
        waited_for(costs, list(zip(*orders, strict=True)))
        for orders in product(permutations(range(3)), repeat=len(costs))
    )
    assert waited_for(costs, ALIKE(packs, 100, 2)) == best


@pytest.mark.parametrize("policy", [IN_ORDER, ALIKE])
def test_a_pack_without_room_waits_and_a_longer_one_passes_alone(policy):
    packs = costs_of([[(9, 30), (1, 10)], [(5, 10), (4, 10)]])  # a pack of 30 among those of at most 10
    assert sorted(policy(packs, 20, 2), key=str) == [(0, None), (1, 0), (None, 1)]
    assert sorted(policy(packs, 40, 2)) == [(0, 0), (1, 1)]
    assert IN_ORDER(packs, 20, 2) == ((0, None), (1, 0), (None, 1))


def test_work_of_the_llm_rises_and_falls_whatever_encoders_take():
    llm = (5, 3, 1, 7, 2, 4, 6)
    packs = [sized([(1, ns, 10 * (at % 3)) for at, ns in enumerate(llm)])]
    assert [llm[at] for (at,) in ALIKE(packs, 10, 2)] == [1, 3, 5, 7, 6, 4, 2]
    assert ALIKE.orders(packs, 10, 2) == (ALIKE(packs, 10, 2),), "encoders have much to do"
    packs = [sized([(1, 10 * ns, at % 3) for at, ns in enumerate(llm)])]
    (order,) = ALIKE.orders(packs, 10, 2)
    assert [llm[at] for (at,) in order] == [1, 3, 4, 6, 7, 5, 2]


def test_where_gaps_are_filled_the_last_microbatches_have_little_for_encoders():
    # Work of the LLM and of encoders, by pack: of two neighbours in the LLM's work, the second has more.
    packs = [sized([(1, 1000 + 10 * at, at % 2) for at in range(10)])]
    usual, few = ([at for (at,) in order] for order in ALIKE.orders(packs, 10, 2))
    assert usual == [0, 2, 3, 4, 5, 7, 9, 8, 6, 1]
    assert few == [1, 2, 3, 4, 5, 7, 9, 8, 6, 0]


@pytest.mark.parametrize("count", range(1, 12))
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_where_gaps_are_filled_work_rises_slowly_and_falls_at_the_end(count, stages):
    packs = [sized([(1, ns, 0) for ns in reversed(range(count))])]
    (pairs,) = ALIKE.orders(packs, 10, stages)
    order = [int(packs[0].ns[at, 0]) for (at,) in pairs]
    assert sorted(order) == list(range(count))
    peak = order.index(count - 1)
    assert order[: peak + 1] == sorted(order[: peak + 1])
    assert order[peak:] == sorted(order[peak:], reverse=True)
    assert len(order) - 1 - peak <= 2 * (stages - 1) + 1


def test_disttrain_by_hand():
    # The LLM takes 2 forward and 4 back: encoders have 6 until the first microbatch goes back, then 6 less
    # what going back through it takes, twice its forward.
    encoders = (5, 3, 1, 7, 2, 4, 9)
    packs = [sized([(1, 2, encoder) for encoder in encoders])]
    order = [encoders[at] for (at,) in DISTTRAIN(packs, 10, 2)]
    assert order == [1, 5, 7, 4, 9, 3, 2]  # the least of all first, the next least at the end
