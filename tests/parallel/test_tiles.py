from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from work_costs import work_cost

from parallel.cluster import Link, Links
from parallel.costs import CostTable
from parallel.policies.pool import cut, mirrored
from parallel.schemes import SequenceCost, choose_tiles, rank_times, scheme_tiles, sequence_cost
from parallel.sequence import SequenceLayout, Shard
from parallel.tiles import (
    AttentionShape,
    Tile,
    Volume,
    attention_work,
    balanced_tiles,
    check_tiles,
    context,
    exchange_volume,
    gather_tiles,
    hybrid_tiles,
    node_tiles,
    pairs_before,
    rows_tiles,
    ulysses_tiles,
)
from parallel.tilings import busier, compare

SCHEMES = {
    "ulysses": ulysses_tiles,
    "gather": gather_tiles,
    "hybrid": lambda shards, shape: hybrid_tiles(shards, shape, 2),
    "balanced": balanced_tiles,
    "rows": rows_tiles,
}
LENGTH = 5040  # divides by every degree here


def even_shards(length: int, degree: int) -> tuple[Shard, ...]:
    cuts = [length * rank // degree for rank in range(degree + 1)]
    return tuple(Shard(rank, start, stop - start) for rank, (start, stop) in enumerate(pairwise(cuts)))


def cost_of(shape: AttentionShape, pair_fs: int = 0, ns_per_kib: int = 1024) -> SequenceCost:
    """Free attention and a nanosecond for every head row, unless said otherwise."""
    return SequenceCost(shape, 1, 0, pair_fs, 1, Link(0, 1024 * 10**9 // ns_per_kib))


@st.composite
def shapes(draw) -> AttentionShape:
    kv_heads = draw(st.integers(1, 4))
    return AttentionShape(
        kv_heads * draw(st.integers(1, 4)),
        kv_heads,
        draw(st.booleans()),
        draw(st.none() | st.integers(0, 12)),
    )


@st.composite
def cuts(draw) -> tuple[Shard, ...]:
    """Shards of one sequence on ranks in any order; some may be empty, and ranks may be more than heads."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any))
    ranks = draw(st.permutations(range(9)))
    shards, start = [], 0
    for rank, size in zip(ranks, sizes, strict=False):
        shards.append(Shard(rank, start, size))
        start += size
    return tuple(shards)


def length_of(shards: tuple[Shard, ...]) -> int:
    return sum(s.length for s in shards)


def sees(query: int, key: int, shape: AttentionShape) -> bool:
    return (not shape.causal or key <= query) and (shape.window is None or abs(query - key) <= shape.window)


# One pair, one row, one head at a time.


def pairs_one_by_one(rows: range, length: int, shape: AttentionShape) -> int:
    return sum(sees(query, key, shape) for query in rows for key in range(length))


def volume_one_by_one(tiles, shards, shape, nodes=range(99)) -> dict[int, Volume]:
    """What travels to ranks of other `nodes`: of ranks on a node each, to any other rank."""
    holder = {token: s.cp_rank for s in shards for token in range(s.start, s.start + s.length)}
    group = shape.heads // shape.kv_heads
    sent_in, received_in = defaultdict(int), defaultdict(int)
    sent_out, received_out = defaultdict(int), defaultdict(int)
    keys = defaultdict(set)
    for t in tiles:
        for head in range(t.head_start, t.head_start + t.head_count):
            for row in range(t.row_start, t.row_start + t.row_count):
                if nodes[holder[row]] != nodes[t.cp_rank]:
                    sent_in[holder[row]] += 1
                    received_in[t.cp_rank] += 1
                    sent_out[t.cp_rank] += 1
                    received_out[holder[row]] += 1
            start, stop = context(t.row_start, t.row_count, len(holder), shape)
            keys[t.cp_rank] |= {(head // group, token) for token in range(start, stop)}
    for rank, wanted in keys.items():
        for _, token in wanted:
            if nodes[holder[token]] != nodes[rank]:
                sent_in[holder[token]] += 2
                received_in[rank] += 2
    ranks = {s.cp_rank for s in shards} | {t.cp_rank for t in tiles}
    return {r: Volume(sent_in[r], received_in[r], sent_out[r], received_out[r]) for r in sorted(ranks)}


@given(st.integers(0, 14), st.integers(1, 14), shapes())
def test_pairs_are_those_of_counting_one_by_one(row, length, shape):
    row = min(row, length)
    assert pairs_before(row, length, shape) == pairs_one_by_one(range(row), length, shape)


@given(st.integers(1, 14), st.integers(0, 13), st.integers(1, 14), shapes())
def test_the_context_is_what_the_rows_see(length, row, count, shape):
    row = min(row, length - 1)
    count = min(count, length - row)
    seen = [k for k in range(length) if any(sees(q, k, shape) for q in range(row, row + count))]
    assert list(range(*context(row, count, length, shape))) == seen


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(deadline=None)
@given(shards=cuts(), shape=shapes())
def test_tiles_partition_heads_and_rows(scheme, shards, shape):
    tiles = SCHEMES[scheme](shards, shape)
    length = length_of(shards)
    check_tiles(tiles, length, shape)
    cells = [
        (head, row)
        for t in tiles
        for head in range(t.head_start, t.head_start + t.head_count)
        for row in range(t.row_start, t.row_start + t.row_count)
    ]
    assert sorted(cells) == [(head, row) for head in range(shape.heads) for row in range(length)]
    assert {t.cp_rank for t in tiles} <= {s.cp_rank for s in shards if s.length}


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(deadline=None)
@given(shards=cuts(), shape=shapes())
def test_work_and_volume_are_those_of_counting_one_by_one(scheme, shards, shape):
    tiles = SCHEMES[scheme](shards, shape)
    length = length_of(shards)
    work = defaultdict(int)
    for t in tiles:
        rows = range(t.row_start, t.row_start + t.row_count)
        work[t.cp_rank] += t.head_count * pairs_one_by_one(rows, length, shape)
    assert attention_work(tiles, length, shape) == work
    assert exchange_volume(tiles, shards, shape) == volume_one_by_one(tiles, shards, shape)


@settings(deadline=None)
@given(cuts(), shapes(), st.data())
def test_volume_of_tiles_that_no_scheme_makes(shards, shape, data):
    """Any partition, on any ranks, also such that hold no token."""
    length = length_of(shards)
    tiles = []
    for head in range(shape.heads):
        edges = sorted(data.draw(st.sets(st.integers(1, max(1, length - 1)), max_size=3)) - {length})
        for start, stop in pairwise([0, *edges, length]):
            tiles.append(Tile(data.draw(st.integers(0, 9)), head, 1, start, stop - start))
    check_tiles(tiles, length, shape)
    assert exchange_volume(tiles, shards, shape) == volume_one_by_one(tiles, shards, shape)


@settings(deadline=None)
@given(cuts(), shapes())
def test_comparing_tilings_says_what_asking_one_by_one_says(shards, shape):
    numbers = {rank: number for number, rank in enumerate(dict.fromkeys(s.cp_rank for s in shards))}
    held = [Shard(numbers[s.cp_rank], s.start, s.length) for s in shards]
    tilings = [tiles for _, tiles in scheme_tiles(held, shape)]
    works, volumes, leaving = compare(tilings, held, shape)
    assert leaving is volumes
    for tiles, work, volume, rows in zip(
        tilings, works.tolist(), volumes.tolist(), busier(volumes).tolist(), strict=True
    ):
        told = attention_work(tiles, length_of(held), shape)
        assert work == [told.get(rank, 0) for rank in range(len(numbers))]
        moved = exchange_volume(tiles, held, shape)
        assert [Volume(*of_rank) for of_rank in volume] == [moved[rank] for rank in range(len(numbers))]
        assert rows == [moved[rank].busier for rank in range(len(numbers))]


@settings(deadline=None)
@given(cuts(), shapes(), st.lists(st.integers(0, 2), min_size=10, max_size=10))
def test_what_leaves_a_node_is_what_ranks_of_others_want(shards, shape, nodes):
    shape = replace(shape, window=None)
    numbers = {rank: number for number, rank in enumerate(dict.fromkeys(s.cp_rank for s in shards))}
    held = [Shard(numbers[s.cp_rank], s.start, s.length) for s in shards]
    tilings = [tiles for _, tiles in scheme_tiles(held, shape)]
    _, volumes, leaving = compare(tilings, held, shape, nodes[: len(numbers)])
    for tiles, volume, far in zip(tilings, volumes.tolist(), leaving.tolist(), strict=True):
        moved, crossed = (volume_one_by_one(tiles, held, shape, of) for of in (range(10), nodes))
        assert [Volume(*of_rank) for of_rank in volume] == [moved[rank] for rank in range(len(numbers))]
        assert [Volume(*of_rank) for of_rank in far] == [crossed[rank] for rank in range(len(numbers))]


@pytest.mark.parametrize(
    "tiles, what",
    [
        ([Tile(0, 0, 2, 0, 5)], "head 0: 5 rows are covered, not 6"),
        ([Tile(0, 0, 1, 0, 6)], "head 1: 0 rows are covered, not 6"),
        ([Tile(0, 0, 2, 0, 6), Tile(1, 1, 1, 3, 1)], "head 1: row 3 is not covered once"),
        ([Tile(0, 0, 2, 0, 3), Tile(1, 0, 2, 4, 2)], "head 0: row 3 is not covered once"),
        ([Tile(0, 0, 2, 0, 6), Tile(1, 0, 1, 6, 0)], "is empty"),
        ([Tile(0, 0, 2, 0, 6), Tile(1, 2, 1, 0, 6)], "there are 2 heads"),
        ([Tile(0, 0, 2, 0, 7)], "head 0: 7 rows are covered, not 6"),
    ],
)
def test_tiles_that_are_no_partition_are_refused(tiles, what):
    with pytest.raises(AssertionError, match=what):
        check_tiles(tiles, 6, AttentionShape(2, 2))


def test_key_value_heads_divide_the_heads():
    with pytest.raises(AssertionError, match="3 kv heads do not divide 4 heads"):
        AttentionShape(4, 3)
    with pytest.raises(AssertionError, match="window -1"):
        AttentionShape(4, 4, window=-1)


# Volumes by formula, in head rows over all ranks for each token.


def moved(tiles, shards, shape) -> int:
    volumes = exchange_volume(tiles, shards, shape).values()
    assert sum(v.sent_in for v in volumes) == sum(v.received_in for v in volumes)
    assert sum(v.sent_out for v in volumes) == sum(v.received_out for v in volumes)
    return sum(v.sent_in + v.sent_out for v in volumes)


DIVISIBLE = [
    (16, 16, 2),
    (16, 16, 4),
    (16, 16, 8),
    (28, 4, 2),
    (28, 4, 4),
    (64, 8, 8),
    (64, 8, 16),
    (8, 1, 4),
]


@pytest.mark.parametrize("heads, kv_heads, degree", DIVISIBLE)
def test_ulysses_moves_what_the_formula_says(heads, kv_heads, degree):
    shards, shape = even_shards(LENGTH, degree), AttentionShape(heads, kv_heads)
    rows = 2 * heads + 2 * max(kv_heads, degree)
    assert moved(ulysses_tiles(shards, shape), shards, shape) * degree == (degree - 1) * rows * LENGTH
    # Heads are split evenly here, so balanced is the same.
    assert balanced_tiles(shards, shape) == ulysses_tiles(shards, shape)


@pytest.mark.parametrize("heads, kv_heads, degree", [*DIVISIBLE, (5, 5, 3), (12, 2, 16), (16, 16, 10)])
def test_gather_moves_what_the_formula_says(heads, kv_heads, degree):
    shards, shape = even_shards(LENGTH, degree), AttentionShape(heads, kv_heads)
    assert moved(gather_tiles(shards, shape), shards, shape) == 2 * kv_heads * (degree - 1) * LENGTH
    causal = AttentionShape(heads, kv_heads, causal=True)
    assert moved(gather_tiles(shards, causal), shards, causal) == kv_heads * (degree - 1) * LENGTH


@pytest.mark.parametrize(
    "heads, kv_heads, degree, ways",
    [(16, 16, 4, 2), (16, 16, 32, 16), (28, 4, 8, 4), (64, 8, 16, 8), (64, 8, 16, 16), (8, 1, 4, 2)],
)
def test_hybrid_moves_what_the_formula_says(heads, kv_heads, degree, ways):
    length = 4 * LENGTH
    shards, shape = even_shards(length, degree), AttentionShape(heads, kv_heads)
    queries = 2 * heads * (ways - 1) * length // ways
    keys = 2 * (degree - 1) * max(ways, kv_heads) * length // ways
    assert moved(hybrid_tiles(shards, shape, ways), shards, shape) == queries + keys


@pytest.mark.parametrize(
    "heads, kv_heads, degree, ulysses, gather, hybrid",
    [(16, 16, 4, 48, 96, None), (28, 4, 4, 48, 24, None), (64, 8, 16, 150, 240, 142)],
)
def test_volumes_of_the_examples(heads, kv_heads, degree, ulysses, gather, hybrid):
    shards, shape = even_shards(LENGTH, degree), AttentionShape(heads, kv_heads)
    assert moved(ulysses_tiles(shards, shape), shards, shape) == ulysses * LENGTH
    assert moved(gather_tiles(shards, shape), shards, shape) == gather * LENGTH
    if hybrid:
        found = moved(hybrid_tiles(shards, shape, kv_heads), shards, shape)
        assert round(found / LENGTH) == hybrid


@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 4), (8, 2), (8, 1), (16, 2), (12, 4)])
def test_gather_beats_ulysses_where_the_formula_says(heads, kv_heads):
    shape = AttentionShape(heads, kv_heads)
    for degree in range(2, heads + 1):
        if heads % degree or max(degree, kv_heads) % min(degree, kv_heads):
            continue  # the formula is for heads that divide evenly
        shards = even_shards(LENGTH, degree)
        gather, ulysses = (
            moved(make(shards, shape), shards, shape) for make in (gather_tiles, ulysses_tiles)
        )
        if degree <= kv_heads:
            wins = degree < heads / kv_heads + 1
        else:
            wins = kv_heads == 1 or degree < heads / (kv_heads - 1)
        assert (gather < ulysses) == wins, degree


@pytest.mark.parametrize("window", [0, 1, 7])
def test_a_window_moves_only_what_it_reaches_across_cuts(window):
    shards = even_shards(120, 3)
    shape = AttentionShape(4, 2, window=window)
    assert moved(gather_tiles(shards, shape), shards, shape) == 2 * 2 * 2 * 2 * window


# Work.


@settings(deadline=None)
@given(cuts(), shapes())
def test_balanced_work_is_in_proportion_to_tokens_within_half_a_row(shards, shape):
    length = length_of(shards)
    total = shape.heads * pairs_before(length, length, shape)
    longest_row = max(pairs_one_by_one(range(q, q + 1), length, shape) for q in range(length))
    for make, heads in ((balanced_tiles, 1), (rows_tiles, shape.heads)):
        work = attention_work(make(shards, shape), length, shape)
        done = 0
        for s in shards:
            done += work.get(s.cp_rank, 0)
            # A cut is off by at most half a row of the heads that it cuts, and by rounding down.
            assert abs(done - total * (s.start + s.length) / length) <= heads * (longest_row / 2 + 1), make


def test_heads_that_do_not_divide_are_balanced_by_rows():
    shards, shape = even_shards(LENGTH, 3), AttentionShape(5, 5)
    ulysses, balanced = (
        attention_work(make(shards, shape), LENGTH, shape) for make in (ulysses_tiles, balanced_tiles)
    )
    assert sorted(ulysses.values()) == [LENGTH**2, 2 * LENGTH**2, 2 * LENGTH**2]
    assert set(balanced.values()) == {5 * LENGTH**2 // 3}
    assert balanced_tiles(shards, shape) == (
        Tile(0, 0, 1, 0, LENGTH),
        Tile(0, 1, 1, 0, 3360),
        Tile(1, 1, 1, 3360, 1680),
        Tile(1, 2, 1, 0, LENGTH),
        Tile(1, 3, 1, 0, 1680),
        Tile(2, 3, 1, 1680, 3360),
        Tile(2, 4, 1, 0, LENGTH),
    )


def test_causal_rows_are_equal_work_where_gathering_is_not():
    shards, shape = even_shards(LENGTH, 4), AttentionShape(8, 2, causal=True)
    gather, rows = (attention_work(make(shards, shape), LENGTH, shape) for make in (gather_tiles, rows_tiles))
    mean = sum(gather.values()) / 4
    assert max(gather.values()) / mean == pytest.approx(1.75, rel=1e-3)
    assert max(rows.values()) / mean == pytest.approx(1, rel=1e-3)


def test_without_a_mask_rows_are_the_ranks_own():
    shards, shape = even_shards(LENGTH, 7), AttentionShape(8, 2)
    assert rows_tiles(shards, shape) == gather_tiles(shards, shape)


def test_ranks_beyond_the_heads_have_no_ulysses_tile():
    shards, shape = even_shards(LENGTH, 5), AttentionShape(2, 1)
    assert len(attention_work(ulysses_tiles(shards, shape), LENGTH, shape)) == 2
    assert len(attention_work(hybrid_tiles(shards, shape, 2), LENGTH, shape)) == 5
    assert len(attention_work(balanced_tiles(shards, shape), LENGTH, shape)) == 5


def test_on_nodes_only_keys_and_values_of_a_ranks_own_heads_cross():
    """Two nodes of two ranks, each with half of the early rows and of the late ones."""
    parts = mirrored([(rank, 1) for rank in range(4)], (0, 0, 1, 1))
    assert parts == [(0, 1), (1, 1), (2, 2), (3, 2), (1, 1), (0, 1)]
    shards, shape, nodes = cut(LENGTH, parts, 1), AttentionShape(8, 4, causal=True), (0, 0, 1, 1)
    tiles = node_tiles(shards, shape, nodes, whole=True)
    check_tiles(tiles, LENGTH, shape)
    work = attention_work(tiles, LENGTH, shape)
    assert max(work.values()) < 1.001 * sum(work.values()) / 4
    assert {(t.cp_rank, t.head_start, t.head_count) for t in tiles} == {
        (0, 0, 4), (1, 4, 4), (2, 0, 4), (3, 4, 4),
    }  # fmt: skip
    _, _, (leaving,) = compare([tiles], shards, shape, nodes)
    # The first node reads all tokens of the other one, and that all but the last quarter.
    wanted = [2 * 2 * LENGTH // 2] * 2 + [2 * 2 * LENGTH // 4] * 2
    assert leaving[:, 1].tolist() == pytest.approx(wanted, rel=1e-3)
    assert leaving[:, 2:].tolist() == [[0, 0]] * 4, "outputs stay"
    ulysses, whole = ulysses_tiles(shards, shape), dict(scheme_tiles(shards, shape, nodes))
    assert whole["ulysses"] == ulysses == ulysses_tiles(even_shards(LENGTH, 4), shape)
    assert compare([ulysses], shards, shape, nodes)[2][0].sum() == 2 * leaving.sum()


# The choice.


def slowest(tiles, shards, cost: SequenceCost) -> int:
    work = attention_work(tiles, length_of(shards), cost.shape)
    volumes = exchange_volume(tiles, shards, cost.shape)
    return max(
        cost.attention_ns(work.get(rank, 0)) + cost.transfer_ns(volume.busier)
        for rank, volume in volumes.items()
    )


@settings(deadline=None, max_examples=60)
@given(shapes(), st.integers(2, 8), st.integers(0, 10**8), st.integers(1, 4096))
def test_of_even_cuts_the_choice_has_the_fastest_slowest_rank(shape, degree, pair_fs, ns_per_kib):
    shards, cost = even_shards(840, degree), cost_of(shape, pair_fs, ns_per_kib)
    times = {name: slowest(tiles, shards, cost) for name, tiles in scheme_tiles(shards, shape)}
    assert slowest(choose_tiles(shards, cost), shards, cost) == min(times.values())


@pytest.mark.parametrize(
    "heads, kv_heads, degree, causal, pair_fs, scheme",
    [
        (16, 16, 4, False, 10**9, "ulysses"),
        (28, 4, 4, False, 10**9, "gather"),
        (64, 8, 16, False, 10**9, "hybrid8"),
        (16, 16, 10, False, 10**9, "balanced"),  # attention dear: no rank may idle
        (16, 16, 10, False, 0, "ulysses"),  # exchange dear: no key travels twice
        (4, 1, 3, True, 10**5, "rows"),
        (16, 16, 2, False, 10**9, "ulysses"),  # as good as gathering and balanced: the first
    ],
)
def test_choices(heads, kv_heads, degree, causal, pair_fs, scheme):
    shape = AttentionShape(heads, kv_heads, causal)
    shards = even_shards(LENGTH, degree)
    assert choose_tiles(shards, cost_of(shape, pair_fs)) == dict(scheme_tiles(shards, shape))[scheme]


def test_uneven_cuts_keep_their_proportion():
    """A head each would be the least for the slower rank, but the other is to have little work."""
    shards, shape = (Shard(3, 0, 7000), Shard(1, 7000, 3000)), AttentionShape(2, 2)
    assert attention_work(ulysses_tiles(shards, shape), 10_000, shape) == {3: 10**8, 1: 10**8}
    work = attention_work(choose_tiles(shards, cost_of(shape, 10**9)), 10_000, shape)
    assert work == {3: 14 * 10**7, 1: 6 * 10**7}


def test_a_sequence_on_one_rank_has_no_tiles():
    cost = cost_of(AttentionShape(4, 4))
    assert choose_tiles((Shard(2, 0, 9),), cost) == ()
    assert choose_tiles((Shard(2, 0, 9), Shard(1, 9, 0)), cost) == ()
    assert choose_tiles((Shard(2, 0, 4), Shard(2, 4, 5)), cost) == ()
    assert choose_tiles((Shard(0, 0, 0),), cost) == ()


# Costs.


def test_costs_come_from_the_table_and_a_causal_pair_costs_as_much_as_any():
    link = Link(11, 50 * 10**9)
    table = CostTable(0, {"llm": work_cost(500, 300, 7, exchanges=3)}, Links(link, link), row_bytes=1)
    full = sequence_cost(table, "llm", AttentionShape(4, 2), 256, link)
    causal = sequence_cost(table, "llm", AttentionShape(4, 2, causal=True), 256, link)
    assert full == SequenceCost(AttentionShape(4, 2), 3, 500, 300, 256, link)
    for cost in (full, causal):
        work = pairs_before(10**6, 10**6, cost.shape) * 4
        assert cost.attention_ns(work) == pytest.approx(300 * 10**12 / 10**6, rel=1e-5)
    assert full.linear_ns(10**7) == 5000
    assert full.transfer_ns(8) == 3 * 8 * 256 // 50
    assert full.sharing_ns == 2 * 3 * 11


def test_times_of_ranks_by_hand():
    """Two heads, two layers: a sequence of 8 over ranks 0 and 1 by heads, one of 4 whole on rank 1."""
    cost = SequenceCost(AttentionShape(2, 2), 2, 10**7, 4 * 10**6, 1000, Link(5, 10**12 // 3))
    layout = SequenceLayout(3, ((Shard(0, 0, 4), Shard(1, 4, 4)), (Shard(1, 0, 4),)))
    idle, busy = rank_times(layout, cost)[2], rank_times(layout, cost)[:2]
    # Each sends 4 tokens of one head as q, k and v, and 4 rows of outputs.
    exchange = 2 * (4 * 3 + 4) * 3 + 2 * 2 * 5
    assert [(t.linear_ns, t.local_ns, t.tiles_ns, t.exchange_ns) for t in busy] == [
        (40, 0, 4 * 64 // 2, exchange),
        (80, 4 * 16, 4 * 64 // 2, exchange),
    ]
    assert busy[1].total_ns == 80 + 64 + 128 + exchange
    assert busy[1].overlapped_ns == 80 + 128 + max(64, exchange)
    assert idle.total_ns == 0
