"""Sequences are shared inside a node first, and cross nodes only where that pays."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sequence_policies import INSIDE, LINK, VIT, heavy_tailed, makespan

from parallel.cluster import Link
from parallel.policies import make_pool
from parallel.policies.dynamic import shard_dynamic
from parallel.policies.filled import fill
from parallel.policies.pool import Pool, degree_times
from parallel.policies.simple import shard_hybrid_pow2
from parallel.schemes import SequenceCost, layer_exchange_ns, rank_times
from parallel.sequence import SequenceLayout, Shard


def on_nodes(num_cp_ranks: int, size: int = 8) -> SequenceCost:
    """The ViT on nodes of so many cp ranks."""
    return replace(VIT, inside=INSIDE, nodes=tuple(cp_rank // size for cp_rank in range(num_cp_ranks)))


def crossing(layout: SequenceLayout, cost: SequenceCost) -> int:
    """Sequences that cp ranks of several nodes share."""
    return sum(len({cost.nodes[shard.cp_rank] for shard in shards}) > 1 for shards in layout.shards)


@pytest.mark.parametrize("num_cp_ranks", [16, 32])
def test_what_a_node_can_share_stays_on_it_and_no_step_is_longer(num_cp_ranks):
    cost, crossed, blindly = on_nodes(num_cp_ranks), 0, 0
    for seed in range(8):
        lengths = heavy_tailed(8 * num_cp_ranks, 100 + seed)
        found = shard_dynamic(lengths, make_pool(cost, num_cp_ranks, 4))
        blind = shard_dynamic(lengths, make_pool(VIT, num_cp_ranks, 4))
        crossed, blindly = crossed + crossing(found, cost), blindly + crossing(blind, cost)
        assert makespan(found, cost) <= 1.004 * makespan(blind, cost)
    assert crossed * 4 <= blindly, (crossed, blindly)


def test_a_sequence_crosses_nodes_where_that_pays():
    cost = on_nodes(16)
    (shards,) = shard_dynamic([400_000], make_pool(cost, 16, 4)).shards
    assert {cost.nodes[shard.cp_rank] for shard in shards} == {0, 1}
    # Two of half the work each have a node each.
    layout = shard_dynamic([200_000] * 2, make_pool(cost, 16, 4))
    assert crossing(layout, cost) == 0
    assert {len(shards) for shards in layout.shards} == {8}


def test_nodes_of_one_cp_rank_or_one_node_change_nothing():
    lengths = heavy_tailed(64, 3)
    for nodes in (tuple(range(8)), (0,) * 8):
        link = LINK if len(set(nodes)) > 1 else INSIDE
        cost = replace(VIT, inside=INSIDE, nodes=nodes)
        plain = make_pool(replace(VIT, link=link), 8, 4)
        assert shard_dynamic(lengths, make_pool(cost, 8, 4)) == shard_dynamic(lengths, plain)
        assert shard_hybrid_pow2(lengths, make_pool(cost, 8, 4)) == shard_hybrid_pow2(lengths, plain)


def test_an_exchange_takes_the_link_that_its_cp_ranks_have_and_both_work_at_once():
    cost, lengths = on_nodes(4, 2), [40_000, 30_000]
    inside = (Shard(0, 0, 20_000), Shard(1, 20_000, 20_000))
    across = (Shard(1, 0, 15_000), Shard(2, 15_000, 15_000))
    near, far, both = (SequenceLayout(4, of) for of in ((inside,), (across,), (inside, across)))
    assert both.lengths == tuple(lengths)
    for times in (
        lambda layout, own: [time.exchange_ns for time in rank_times(layout, own)],
        lambda layout, own: list(layer_exchange_ns(layout, own)),
    ):
        assert times(near, cost) == times(near, replace(VIT, link=INSIDE))
        assert times(far, cost) == times(far, VIT)
        assert times(near, cost)[0] < times(far, cost)[1]
        assert times(both, cost) == list(map(max, times(near, cost), times(far, cost)))


def test_only_what_crosses_nodes_takes_the_link_between_them():
    """Whole heads of 40,000 tokens over four ranks, two a node. Each sends to each of the others the queries,
    keys, values and outputs of 10,000 tokens and 4 heads; two of the three are on the other node.
    """
    cost, shares = on_nodes(4, 2), tuple(Shard(rank, 10_000 * rank, 10_000) for rank in range(4))
    layout = SequenceLayout(4, (shares,))
    each = 4 * 10_000 * 4 * VIT.head_bytes * VIT.layers  # bytes
    across = LINK.bytes_ns(2 * each) + 2 * VIT.layers * LINK.latency_ns
    assert across > INSIDE.bytes_ns(each) + 2 * VIT.layers * INSIDE.latency_ns
    assert [time.exchange_ns for time in rank_times(layout, cost)] == [across] * 4
    slow = replace(cost, inside=Link(0, LINK.bytes_per_s // 4))
    assert [time.exchange_ns for time in rank_times(layout, slow)] == [slow.inside.bytes_ns(each)] * 4


def test_times_of_so_many_ranks_are_of_one_node_as_far_as_one_has_them():
    pool, far = make_pool(on_nodes(6, 4), 6), make_pool(VIT, 6)
    near = make_pool(replace(VIT, link=INSIDE), 6)
    times, apart = degree_times([50_000], pool)[0], degree_times([50_000], pool, apart=True)[0]
    assert times[:4].tolist() == degree_times([50_000], near)[0, :4].tolist()
    assert times[4:].tolist() == apart[4:].tolist()
    assert (times[1:4] < apart[1:4]).all()
    # Two on two nodes send each other everything; of more, some are on one node.
    all_far = degree_times([50_000], far)[0]
    assert apart[:2].tolist() == all_far[:2].tolist()
    assert (apart[2:] < all_far[2:]).all()


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=8),
    st.lists(st.integers(-50, 400), min_size=4, max_size=4),
)
def test_pouring_keeps_to_a_node_that_has_room_and_fills_ranks_as_full(amounts, rooms):
    nodes = ((0, 1), (2, 3))
    parts = fill(dict(enumerate(amounts)), rooms, nodes)
    assert [sum(take for _, take in parts[i]) for i in range(len(amounts))] == amounts
    free = list(rooms)
    for number, amount in enumerate(amounts):
        used = {node for node in (0, 1) for rank, _ in parts[number] if rank in nodes[node]}
        if any(sum(max(0, free[rank]) for rank in node) >= amount for node in nodes):
            assert len(used) == 1
        for rank, take in parts[number]:
            free[rank] -= take
    surplus = max(0, sum(amounts) - sum(max(0, room) for room in rooms))
    over = [max(0, min(room, 0) - left) for room, left in zip(rooms, free, strict=True)]
    assert sum(over) == surplus
    assert surplus == 0 or sum(max(0, left) for left in free) == 0


def test_a_pool_holds_more_of_one_long_sequence_with_the_same_times():
    pool: Pool = make_pool(on_nodes(16), 16, 4, 1_000)
    wider = pool.holding(160_000)
    assert wider.tokens_per_rank == 10_000
    assert wider.shares is pool.shares
    assert wider.shares_apart is pool.shares_apart
