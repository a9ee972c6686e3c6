import math
import random
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import parallel.exchange as exchange_module
import parallel.sharded_attention as sharded_module
from omni.rehearsal.meter import Meter
from ops.attention import make_packing, make_tile_packing, packed_attention
from ops.span import Span
from parallel.attended import attended
from parallel.exchange import finish, prepare, start
from parallel.exchange_lists import Sums
from parallel.exchange_plan import Block, Exchange, are_disjoint, make_side
from parallel.held_pieces import EARLY, LATE, SHARED
from parallel.sequence import SequenceLayout, Shard
from parallel.sharded_attention import plan_attention, sharded_attention
from parallel.tile_plan import KEY, Moved, moved_elements, plan_tiles
from parallel.tiles import (
    AttentionShape,
    Tile,
    balanced_tiles,
    exchange_volume,
    gather_tiles,
    hybrid_tiles,
    node_tiles,
    rows_tiles,
    ulysses_tiles,
)

CPU = torch.device("cpu")
SIZE = 4  # of a head
NODES = (0, 0, 1, 1, 2, 2)
HEADS = [(4, 4), (5, 5), (5, 1), (8, 2), (6, 3), (8, 1), (3, 3), (2, 1), (12, 4), (1, 1)]


@dataclass(frozen=True)
class Case:
    """A microbatch with shared sequences, and what its attention looks like."""

    layout: SequenceLayout
    tiles: tuple[tuple[Tile, ...], ...]
    shape: AttentionShape
    tails: tuple[int, ...]

    def plan(self, rank, dtype=torch.float64):
        return plan_attention(
            self.layout,
            self.tiles,
            rank,
            heads=self.shape.heads,
            kv_heads=self.shape.kv_heads,
            head_dim=SIZE,
            causal=self.shape.causal,
            window=self.shape.window,
            tail=self.tails[rank],
            device=CPU,
            dtype=dtype,
        )

    def tile_plans(self):
        ranks = range(self.layout.num_cp_ranks)
        return [plan_tiles(self.layout, self.tiles, rank, self.shape, SIZE) for rank in ranks]


def cut(rng, total, parts):
    edges = [0, *sorted(rng.randint(0, total) for _ in range(parts - 1)), total]
    return [(a, b - a) for a, b in pairwise(edges)]


def spread_out(rng, length, parts):
    """Edges of parts none of which is empty."""
    return [0, *sorted(rng.sample(range(1, length), parts - 1)), length]


def random_tiles(rng, heads, length, ranks):
    """Tiles that partition heads × rows, some empty, in any order on any of `ranks`."""
    tiles = [(0, heads, 0, length)]
    for _ in range(rng.randint(0, 2 * len(ranks))):
        head, num_heads, row, rows = tiles.pop(rng.randrange(len(tiles)))
        if rng.random() < 0.5:
            tiles += [(head + at, n, row, rows) for at, n in cut(rng, num_heads, 2)]
        else:
            tiles += [(head, num_heads, row + at, n) for at, n in cut(rng, rows, 2)]
    return tuple(Tile(rng.choice(ranks), *tile) for tile in tiles)


SCHEMES = {
    "ulysses": ulysses_tiles,
    "gather": gather_tiles,
    "hybrid2": lambda shards, shape: hybrid_tiles(shards, shape, 2),
    "hybrid3": lambda shards, shape: hybrid_tiles(shards, shape, 3),
    "balanced": balanced_tiles,
    "rows": rows_tiles,
    "nodes": lambda shards, shape: node_tiles(shards, shape, NODES, whole=True),
    "balanced nodes": lambda shards, shape: node_tiles(shards, shape, NODES, whole=False),
}
# Degrees at which heads do not divide: 5 over 3 ranks, and 2 key/value heads of 8 over 4.
UNEVEN = {(5, 5): 3, (8, 2): 4}


def random_case(seed, world):
    rng = random.Random(seed)
    heads, kv_heads = HEADS[seed % len(HEADS)]
    causal, window = rng.random() < 0.5, rng.choice([None, None, 0, 2, 7])
    shape = AttentionShape(heads, kv_heads, causal, window)
    live = list(range(world)) if rng.random() < 0.5 else rng.sample(range(world), rng.randint(1, world))
    shards, tiles = [], []
    uneven = UNEVEN.get((heads, kv_heads), world)
    if len(live) >= uneven and rng.random() < 0.8:
        length = rng.randint(uneven, 24)
        pieces = zip(rng.sample(live, uneven), pairwise(spread_out(rng, length, uneven)), strict=True)
        shards.append(tuple(Shard(rank, a, b - a) for rank, (a, b) in pieces))
        tiles.append(rng.choice([ulysses_tiles, balanced_tiles])(shards[0], shape))
    for _ in range(rng.randint(1, 6)):
        length = rng.choice([0, 1, 1, 2, 5, rng.randint(1, 24), rng.randint(1, 24)])
        if rng.random() < 0.4:
            shards.append((Shard(rng.choice(live), 0, length),))
            tiles.append(())
            continue
        degree = rng.randint(1, world)
        holders = [rng.choice(live) for _ in range(degree)]
        if rng.random() < 0.8:
            holders = rng.sample(live, min(degree, len(live)))
        pieces = tuple(Shard(r, *p) for r, p in zip(holders, cut(rng, length, len(holders)), strict=True))
        shards.append(pieces)
        scheme = SCHEMES.get(rng.choice([*SCHEMES, *["random"] * 4]))
        if scheme is not None:
            tiles.append(scheme(pieces, shape))
        else:
            tiles.append(random_tiles(rng, heads, length, rng.sample(range(world), rng.randint(1, world))))
    tails = tuple(rng.choice([0, 0, 1, 3]) for _ in range(world))
    return Case(SequenceLayout(world, tuple(shards)), tuple(tiles), shape, tails)


# Exchanges without ranks: all of them in one process, over mailboxes.


class Mailboxes:
    """Stands for torch.distributed among ranks that one thread runs: each has started before any finishes."""

    def __init__(self):
        self.posted = {}

    def all_to_all_single(self, landing, outgoing, receive, send, group, async_op):
        assert async_op
        rank = group.rank()
        parts = outgoing.split(send)
        assert (send[rank], receive[rank]) == (0, 0)
        self.posted[rank] = parts

        def wait():
            for peer, place in enumerate(landing.split(receive)):
                place.copy_(self.posted[peer][rank])

        return SimpleNamespace(wait=wait)


@pytest.fixture
def mailboxes(monkeypatch):
    monkeypatch.setattr(exchange_module, "dist", Mailboxes())


def mailbox(rank, size):
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def exchange_all(exchanges, tensors):
    groups = [mailbox(rank, len(exchanges)) for rank in range(len(exchanges))]
    flights = [start(*one) for one in zip(prepare(exchanges), tensors, groups, strict=True)]
    return [finish(flight) for flight in flights]


def random_tensors(sides, generator, grad=False):
    return [
        [
            torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=grad)
            for shape in side.shapes
        ]
        for side in sides
    ]


def dot(a, b):
    return sum(float((x * y).sum()) for xs, ys in zip(a, b, strict=True) for x, y in zip(xs, ys, strict=True))


def labelled_sequences(case):
    """Queries, keys and values of every shared sequence; every number occurs once."""
    counter, out = 0, []
    for length in case.layout.lengths:
        three = []
        for heads in (case.shape.heads, case.shape.kv_heads, case.shape.kv_heads):
            n = length * heads * SIZE
            three.append(torch.arange(counter, counter + n, dtype=torch.float64).view(length, heads, SIZE))
            counter += n
        out.append(three)
    return out


def held_rows(case, rank, of_sequences, shared):
    """This rank's tokens of sequences that are shared, or not, in packed order."""
    rows = [of_sequences[0][:0]]
    for number, shards in enumerate(case.layout.shards):
        if bool(case.tiles[number]) == shared:
            rows += [of_sequences[number][s.start : s.start + s.length] for s in shards if s.cp_rank == rank]
    return torch.cat(rows)


def what_tiles_read(case, rank, sequences):
    """(queries, keys, values) of every tile of a rank, from the definition, head by head."""
    shape, out = case.shape, []
    for number, tiles in enumerate(case.tiles):
        length = case.layout.lengths[number]
        for tile in tiles:
            if tile.cp_rank == rank:
                for head in range(tile.head_start, tile.head_start + tile.head_count):
                    for row in range(tile.row_start, tile.row_start + tile.row_count):
                        seen = [
                            j
                            for j in range(length)
                            if (not shape.causal or j <= row)
                            and (shape.window is None or abs(row - j) <= shape.window)
                        ]
                        q, k, v = sequences[number]
                        kv_head = head // (shape.heads // shape.kv_heads)
                        out.append((q[row, head], k[seen, kv_head], v[seen, kv_head]))
    return out


def what_groups_hold(plan, tensors, shape):
    """The same from the tensors that an exchange delivered."""
    out, num = [], len(plan.groups)
    for g, group in enumerate(plan.groups):
        q, k, v = tensors[g], tensors[num + g], tensors[2 * num + g]
        row = key = 0
        for span in group.spans:
            for head in range(group.heads):
                for i in range(span.rows):
                    place = span.offset + i
                    seen = [
                        key + j
                        for j in range(span.context)
                        if (not shape.causal or j <= place)
                        and (shape.window is None or abs(place - j) <= shape.window)
                    ]
                    kv_head = head // (group.heads // group.kv_heads)
                    out.append((q[row + i, head], k[seen, kv_head], v[seen, kv_head]))
            row, key = row + span.rows, key + span.context
    return out


def as_sorted_lists(reads):
    return sorted([q.tolist(), k.tolist(), v.tolist()] for q, k, v in reads)


WORLDS = st.integers(1, 6)
SEEDS = st.integers(0, 1 << 30)


@settings(deadline=None, max_examples=120)
@given(SEEDS, WORLDS)
def test_tiles_receive_what_they_read(seed, world):
    case = random_case(seed, world)
    plans = case.tile_plans()
    if plans[0] is None:
        assert not any(case.tiles)
        return
    sequences = labelled_sequences(case)
    held = [
        [held_rows(case, rank, [s[kind] for s in sequences], True) for kind in range(3)]
        for rank in range(world)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_module, "dist", Mailboxes())
        arrived = exchange_all([plan.incoming for plan in plans], held)
    for rank, plan in enumerate(plans):
        wanted = what_tiles_read(case, rank, sequences)
        assert as_sorted_lists(what_groups_hold(plan, arrived[rank], case.shape)) == as_sorted_lists(wanted)


@settings(deadline=None, max_examples=50)
@given(SEEDS, WORLDS)
def test_counts_say_where_shared_tokens_are_copied_and_which_local_ones_wait(seed, world):
    case = random_case(seed, world)
    for rank in range(world):
        seen = attended(case.layout, case.tiles, rank, case.tails[rank], case.shape, SIZE)
        runs = case.plan(rank).runs
        assert seen.apart == ([kind for kind, _ in runs].count(SHARED) > 1)
        assert seen.late == sum(length for kind, length in runs if kind == LATE)
        assert seen.local == sum(length for kind, length in runs if kind != SHARED)


@settings(deadline=None, max_examples=50)
@given(SEEDS, WORLDS)
def test_counts_say_how_many_numbers_lists_have_and_sums_make_beside(seed, world):
    case = random_case(seed, world)
    for rank in range(world):
        seen = attended(case.layout, case.tiles, rank, case.tails[rank], case.shape, SIZE)
        plan = case.plan(rank)
        lists = []
        for side in (side for one in plan.exchanges for side in (one.source, one.target)):
            side.each(lists.append)
        assert seen.lists == sum(map(len, lists))
        if not plan.exchanges:
            assert seen.adding == (0, 0, 0)
            continue
        into = plan.exchanges[0]
        key = into.source.tensors[KEY]
        for sums, numbers in zip((into.target.others, into.target.own, key), seen.adding, strict=True):
            with FakeTensorMode() as fake, Meter([0]) as meter:
                index, starts = (
                    None if x is None else fake.from_tensor(x) for x in (sums.index, sums.starts)
                )
                cells = torch.empty(1 << 10, 8, dtype=torch.bfloat16)
                before = meter.total
                made = exchange_module._sum(Sums(index, starts), cells)
            assert meter.most - before - made.nbytes == numbers * torch.int32.itemsize


@settings(deadline=None, max_examples=120)
@given(SEEDS, WORLDS)
def test_what_moves_is_what_a_rank_reads_and_does_not_hold_once(seed, world):
    case = random_case(seed, world)
    plans = case.tile_plans()
    if plans[0] is None:
        return
    sequences = labelled_sequences(case)
    missing = [set() for _ in range(3)]
    for rank in range(world):
        for kind in range(3):
            held = set(held_rows(case, rank, [s[kind] for s in sequences], True).flatten().tolist())
            read = [reads[kind].flatten().tolist() for reads in what_tiles_read(case, rank, sequences)]
            missing[kind] |= {(rank, x) for some in read for x in some if x not in held}
    moved = [moved_elements(plan) for plan in plans]
    assert sum(m.query for m in moved) == sum(m.output for m in moved) == len(missing[0])
    assert sum(m.key for m in moved) == len(missing[1])
    assert sum(m.value for m in moved) == len(missing[2])
    for plan in plans:
        for x in (plan.incoming, plan.outgoing):
            for peer, other in enumerate(plans):
                y = other.incoming if x is plan.incoming else other.outgoing
                assert x.source.counts[peer] == y.target.counts[x.rank]


@settings(deadline=None, max_examples=80)
@given(SEEDS, WORLDS)
def test_the_way_back_is_the_adjoint(seed, world):
    case = random_case(seed, world)
    plans = case.tile_plans()
    if plans[0] is None:
        return
    generator = torch.Generator().manual_seed(seed)
    for exchanges in ([p.incoming for p in plans], [p.outgoing for p in plans]):
        x = random_tensors([e.source for e in exchanges], generator, grad=True)
        y = random_tensors([e.target for e in exchanges], generator)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchange_module, "dist", Mailboxes())
            ax = exchange_all(exchanges, x)
            aty = exchange_all([e.transpose() for e in exchanges], y)
            roots = [t for tensors in ax for t in tensors]
            grads = torch.autograd.grad(
                roots, [t for tensors in x for t in tensors], [t for tensors in y for t in tensors]
            )
        with torch.no_grad():
            left, right = dot(ax, y), dot(x, aty)
        assert left == pytest.approx(right, rel=1e-12, abs=1e-12)
        assert all(
            torch.equal(a, b) for a, b in zip(grads, (t for tensors in aty for t in tensors), strict=True)
        )
        assert all(e.transpose().transpose() == e for e in exchanges)


def test_gradients_of_what_was_sent_twice_are_added_in_fp32(mailboxes):
    # Row 0 of rank 0 goes to ranks 0, 1 and 2, and there to two places of one tensor.
    copies = (Block(0, 0, 1, 0, 1), Block(0, 1, 1, 0, 1))
    one = (Block(0, 0, 1, 0, 1),)
    sides = [
        (make_side([(1, 1, 1)], [[one], [one], [one]]), make_side([(2, 1, 1)], [[copies], [], []])),
        (make_side([(0, 1, 1)], [[], [], []]), make_side([(2, 1, 1)], [[copies], [], []])),
        (make_side([(0, 1, 1)], [[], [], []]), make_side([(2, 1, 1)], [[copies], [], []])),
    ]
    exchanges = [Exchange(rank, *both) for rank, both in enumerate(sides)]
    x = [[torch.ones(e.source.shapes[0], dtype=torch.bfloat16, requires_grad=True)] for e in exchanges]
    out = exchange_all(exchanges, x)
    assert [t.flatten().tolist() for (t,) in out] == [[1, 1]] * 3
    small = 2.0**-8  # half a unit in the last place of 1: bf16 additions one by one lose it
    grads = [[0.5, 0.5], [small / 2, small / 2], [small / 2, small / 2]]
    torch.autograd.backward(
        [t for (t,) in out],
        [torch.tensor(g, dtype=torch.bfloat16).view(2, 1, 1) for g in grads],
    )
    assert x[0][0].grad.item() == 1 + 2 * small


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(*[st.integers(0, 4), st.integers(1, 3)] * 2), max_size=5))
def test_overlap_is_found_as_by_counting_cells(rectangles):
    blocks = [Block(0, *rectangle) for rectangle in rectangles]
    cells = [
        (row, head)
        for b in blocks
        for row in range(b.row, b.row + b.rows)
        for head in range(b.head, b.head + b.heads)
    ]
    assert are_disjoint(blocks) == (len(cells) == len(set(cells)))


# Closed formulas of one layer's forward, in elements for each token of a sequence and each number of a head.


def even_volume(heads, kv_heads, degree, scheme, causal=False):
    length = 12 * degree
    shards = tuple(Shard(rank, 12 * rank, 12) for rank in range(degree))
    layout = SequenceLayout(degree, (shards,))
    shape = AttentionShape(heads, kv_heads, causal)
    plans = [plan_tiles(layout, (scheme(shards, shape),), rank, shape, SIZE) for rank in range(degree)]
    total = sum(moved_elements(plan).total for plan in plans)
    assert total % SIZE == 0
    return total // SIZE, length


ULYSSES = [(16, 16, 2), (16, 16, 4), (28, 4, 4), (28, 4, 7), (28, 4, 14), (8, 2, 4), (8, 1, 4), (64, 8, 16)]


@pytest.mark.parametrize("heads, kv_heads, degree", ULYSSES)
@pytest.mark.parametrize("causal", [True, False])
def test_volume_of_ulysses(heads, kv_heads, degree, causal):
    moved, length = even_volume(heads, kv_heads, degree, ulysses_tiles, causal)
    group, even = heads // kv_heads, kv_heads % degree == 0 or degree % kv_heads == 0
    edges = [heads * i // degree for i in range(degree + 1)]
    replicas = sum((b - 1) // group + 1 - a // group for a, b in pairwise(edges))
    assert replicas == max(kv_heads, degree) or not even
    assert moved * degree == length * (degree - 1) * (2 * heads + 2 * replicas)


@pytest.mark.parametrize("heads, kv_heads, degree", [*ULYSSES, (5, 5, 3), (8, 2, 3)])
def test_volume_of_gathering(heads, kv_heads, degree):
    moved, length = even_volume(heads, kv_heads, degree, gather_tiles)
    assert moved == length * 2 * kv_heads * (degree - 1)
    moved, length = even_volume(heads, kv_heads, degree, gather_tiles, causal=True)
    assert moved == length * kv_heads * (degree - 1)


@pytest.mark.parametrize(
    "heads, kv_heads, degree, ways",
    [(64, 8, 16, 4), (64, 8, 16, 8), (28, 4, 8, 4), (16, 16, 4, 2), (8, 1, 6, 2)],
)
def test_volume_of_hybrids(heads, kv_heads, degree, ways):
    moved, length = even_volume(heads, kv_heads, degree, lambda s, shape: hybrid_tiles(s, shape, ways))
    kept = 2 * (degree - 1) * max(ways, kv_heads)
    assert moved * ways == length * (2 * heads * (ways - 1) + kept)


@settings(deadline=None, max_examples=80)
@given(SEEDS, WORLDS)
def test_the_cost_model_counts_what_moves(seed, world):
    case = random_case(seed, world)
    for shards, tiles in zip(case.layout.shards, case.tiles, strict=True):
        tiles = tuple(tile for tile in tiles if tile.head_count and tile.row_count)
        if not tiles or len({s.cp_rank for s in shards}) < len(shards):
            continue
        layout = SequenceLayout(world, (shards,))
        counted = exchange_volume(tiles, shards, case.shape)
        for rank in range(world):
            plan = plan_tiles(layout, (tiles,), rank, case.shape, SIZE)
            volume = counted.get(rank)
            told = (
                (volume.sent_in, volume.received_in, volume.sent_out, volume.received_out)
                if volume
                else (0,) * 4
            )
            pair = (plan.incoming, plan.outgoing)
            done = [n for x in pair for n in (x.moved_elements(), x.transpose().moved_elements())]
            assert [n * SIZE for n in told] == done


def test_windows_cut_on_their_reach_move_only_what_is_in_reach():
    shards = (Shard(0, 0, 10), Shard(1, 10, 10))
    layout = SequenceLayout(2, (shards,))
    shape = AttentionShape(4, 2, causal=True, window=3)
    plans = [plan_tiles(layout, (gather_tiles(shards, shape),), rank, shape, SIZE) for rank in range(2)]
    assert moved_elements(plans[0]) == Moved(0, 3 * 2 * SIZE, 3 * 2 * SIZE, 0)
    assert moved_elements(plans[1]) == Moved(0, 0, 0, 0)


# Refusals.


def two_ranks(tiles, second=3):
    shards = (Shard(0, 0, 3), Shard(1, 3, second))
    return Case(SequenceLayout(2, (shards,)), (tiles,), AttentionShape(2, 2), (0, 0)).plan(0)


@pytest.mark.parametrize(
    "tiles",
    [
        (Tile(0, 0, 2, 0, 5),),
        (Tile(0, 0, 2, 0, 7),),
        (Tile(0, 0, 1, 0, 6),),
        (Tile(0, 0, 3, 0, 6),),
        (Tile(0, 0, 2, 0, 4), Tile(1, 0, 2, 3, 3)),
        (Tile(0, 0, 2, 0, 0),),
    ],
)
def test_tiles_that_are_no_partition_are_refused(tiles):
    with pytest.raises(AssertionError):
        two_ranks(tiles)


def test_a_sequence_on_several_ranks_needs_tiles():
    with pytest.raises(AssertionError, match="has no tiles"):
        two_ranks(())
    assert two_ranks((), second=0).tiles is None


def test_tensors_and_blocks_that_do_not_fit_are_refused():
    with pytest.raises(AssertionError, match="beyond 2 rows"):
        make_side([(2, 1, 1)], [[(Block(0, 1, 2, 0, 1),)]])
    with pytest.raises(AssertionError, match="beyond 1 heads"):
        make_side([(2, 1, 1)], [[(Block(0, 0, 2, 1, 1),)]])
    with pytest.raises(AssertionError, match="is empty"):
        make_side([(2, 1, 1)], [[(Block(0, 0, 0, 0, 1),)]])
    with pytest.raises(AssertionError, match="of several sizes"):
        make_side([(2, 1, 1), (2, 1, 2)], [[]])
    with pytest.raises(AssertionError, match="differ in shape"):
        make_side([(2, 2, 1)], [[(Block(0, 0, 1, 0, 2), Block(0, 1, 1, 0, 1))]])
    plan = two_ranks((Tile(0, 0, 2, 0, 6),))
    q = torch.zeros(3, 2, SIZE)
    with pytest.raises(AssertionError, match="tokens for a plan"):
        sharded_attention(q[:2], q[:2], q[:2], plan, None)
    with pytest.raises(AssertionError, match="need a communicator"):
        sharded_attention(q, q, q, plan, None)
    with pytest.raises(AssertionError, match="for an exchange of"):
        sharded_attention(q, q[:, :1], q, plan, mailbox(0, 2))
    with pytest.raises(AssertionError, match="of the group for a plan"):
        sharded_attention(q, q, q, plan, mailbox(1, 2))


# Attention on real ranks against every sequence attended whole.


@dataclass
class Problem:
    """Inputs and output gradient of every sequence, then of every rank's tail; [tokens, heads, size] each."""

    inputs: list[list[torch.Tensor]]
    weights: list[torch.Tensor]

    @classmethod
    def random(cls, case, seed, dtype):
        generator = torch.Generator().manual_seed(seed)
        lengths = [*case.layout.lengths, *case.tails]
        heads = (case.shape.heads, case.shape.kv_heads, case.shape.kv_heads, case.shape.heads)
        drawn = [[torch.randn(n, h, SIZE, generator=generator).to(dtype) for h in heads] for n in lengths]
        return cls([four[:3] for four in drawn], [four[3] for four in drawn])

    def local(self, case, rank, of_sequences):
        """What `rank` holds of one tensor of every sequence: shards in packed order, then its tail."""
        num = len(case.layout.shards)
        rows = [
            of_sequences[number][s.start : s.start + s.length]
            for number, shards in enumerate(case.layout.shards)
            for s in shards
            if s.cp_rank == rank
        ]
        return torch.cat([*rows, of_sequences[num + rank]])

    def reference(self, case):
        """Outputs and the gradients of queries, keys and values, sequence by sequence, in fp64."""
        shape, results = case.shape, []
        for inputs, weight in zip(self.inputs, self.weights, strict=True):
            q, k, v = (x.detach().double().requires_grad_() for x in inputs)
            wide_k, wide_v = (x.repeat_interleave(shape.heads // shape.kv_heads, 1) for x in (k, v))
            scores = torch.einsum("qnh,knh->nqk", q, wide_k) / math.sqrt(SIZE)
            place = torch.arange(len(q))
            ahead = place - place[:, None]
            hidden = torch.zeros_like(ahead, dtype=torch.bool)
            if shape.causal:
                hidden |= ahead > 0
            if shape.window is not None:
                hidden |= ahead.abs() > shape.window
            out = torch.einsum("nqk,knh->qnh", scores.masked_fill(hidden, -math.inf).softmax(-1), wide_v)
            results.append([out.detach(), *torch.autograd.grad(out, (q, k, v), weight.double())])
        return [list(one) for one in zip(*results, strict=True)]


def run_case(case, problem, rank, dtype, attend=sharded_attention, plan=None):
    """Output and gradients of this rank."""
    inputs = [
        problem.local(case, rank, [three[i] for three in problem.inputs]).requires_grad_() for i in range(3)
    ]
    plan = plan or case.plan(rank, dtype)
    out = attend(*inputs, plan, dist.group.WORLD)
    out.backward(problem.local(case, rank, problem.weights))
    return [out.detach(), *(x.grad for x in inputs)]


def errors(case, problem, rank, results):
    """‖a − b‖ of this rank over ‖b‖ of all, for output and gradients; tiny ‖b‖ count by the others' size."""
    reference = problem.reference(case)
    norms = [math.sqrt(sum(float(x.norm()) ** 2 for x in tensors)) for tensors in reference]
    floor = 1e-2 * math.sqrt(sum(n * n for n in norms)) or 1.0
    return [
        float((a.double() - problem.local(case, rank, b)).norm()) / max(n, floor)
        for a, b, n in zip(results, reference, norms, strict=True)
    ]


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}


KINDS_OF_CASES = ("shared", "idle", "untiled", "mute", "replicated", "deep", "windowed", "five over three")
KINDS_OF_CASES += ("grouped over four", "one token", "bf16 replicated")


def attend_cases(rank, world, seeds):
    """Worst errors by dtype, and what the cases held."""
    worst, seen = dict.fromkeys(TOLERANCE, 0.0), dict.fromkeys(KINDS_OF_CASES, 0)
    for seed in seeds:
        case = random_case(seed, world)
        # Any heads in any dtype: heads repeat after len(HEADS).
        dtype = [*TOLERANCE, *TOLERANCE, torch.float64][(seed + seed // len(HEADS)) % 7]
        problem = Problem.random(case, seed, dtype)
        plan = case.plan(rank, dtype)
        found = max(errors(case, problem, rank, run_case(case, problem, rank, dtype, plan=plan)))
        assert found <= TOLERANCE[dtype], f"case {seed} of {world} ranks, {dtype}: {found} in {case}"
        worst[dtype] = max(worst[dtype], found)
        if plan.tiles is not None:
            seen["shared"] += 1
            seen["idle"] += plan.tokens == 0
            seen["untiled"] += not any(group.spans for group in plan.tiles.groups)
            source, target = plan.tiles.incoming.source, plan.tiles.incoming.target
            seen["mute"] += not (sum(source.counts) or sum(target.counts))
            seen["replicated"] += not source.disjoint[1]
            degrees = [len({s.cp_rank for s in shards}) for shards in case.layout.shards]
            five = case.shape.heads == case.shape.kv_heads == 5
            grouped = (case.shape.heads, case.shape.kv_heads) == (8, 2)
            seen["five over three"] += five and 3 in degrees
            seen["grouped over four"] += grouped and 4 in degrees
            seen["one token"] += any(
                n == 1 and t for n, t in zip(case.layout.lengths, case.tiles, strict=True)
            )
            seen["bf16 replicated"] += dtype == torch.bfloat16 and not source.disjoint[1]
            seen["deep"] += max(degrees) > case.shape.heads
            seen["windowed"] += case.shape.window is not None
    return worst, seen


@pytest.mark.parametrize("first", [0, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world", [4, 6])
def test_random_layouts_equal_whole_sequences(ranks, world, first):
    for worst, seen in ranks.run(world, attend_cases, world, range(first, first + 120)):
        assert seen["shared"] >= 100
        assert min(seen.values()) > 0, seen
        assert worst[torch.float64] > 0


def fixed_case(causal=True, window=None):
    """Causal rows of a sequence over three ranks, fractional heads over four, one on a rank, an idle rank."""
    first = (Shard(0, 0, 5), Shard(2, 5, 4), Shard(1, 9, 6))
    second = (Shard(1, 0, 3), Shard(0, 3, 6))
    tiles = (Tile(0, 0, 2, 0, 9), Tile(0, 2, 1, 0, 4), Tile(2, 2, 1, 4, 5), Tile(2, 3, 5, 0, 9))
    layout = SequenceLayout(
        4, (first, (Shard(0, 0, 7),), second, (Shard(0, 0, 4),), (Shard(2, 0, 5),), (Shard(0, 0, 4),))
    )
    shape = AttentionShape(8, 2, causal, window)
    return Case(layout, (gather_tiles(first, shape), (), tiles, (), (), ()), shape, (1, 0, 2, 0))


def without_values(side, rank, of_source):
    """A side from which the values that rank 0 sends to rank 2 are missing."""
    value = 2 if of_source else 2 * len(side.shapes) // 3
    hit = (rank == 0) if of_source else (rank == 2)
    peer = 2 if of_source else 0
    parcels = [
        [p for p in message if not (hit and number == peer and p[0].tensor >= value)]
        for number, message in enumerate(side.parcels)
    ]
    return make_side(side.shapes, parcels)


def mutate(kind, case, plan, rank):
    tiles = plan.tiles
    if kind == "offset":
        groups = [
            [Span(s.rows, s.context, max(0, s.offset - 1)) for s in group.spans] for group in tiles.groups
        ]
        packings = [make_tile_packing(g, True, 1, CPU, torch.float64) for g in groups]
        return replace(plan, packings=tuple(packings))
    if kind == "top-left":
        groups = [[Span(s.rows, s.context, 0) for s in group.spans] for group in tiles.groups]
        packings = [make_tile_packing(g, True, 1, CPU, torch.float64) for g in groups]
        return replace(plan, packings=tuple(packings))
    if kind == "dropped":
        x = tiles.incoming
        x = Exchange(rank, without_values(x.source, rank, True), without_values(x.target, rank, False))
        return replace(plan, exchanges=prepare((x, tiles.outgoing)))
    if kind == "tail":
        lengths = plan.late.lengths
        if len(lengths) > 1:
            lengths = (*lengths[:-2], lengths[-2] + lengths[-1])
        return replace(plan, late=make_packing(lengths, True, 1, CPU, torch.float64))
    return plan


def last_of_each(sums, cells):
    return cells.index_select(
        0, sums.index if sums.starts is None else sums.index[sums.starts[1:].long() - 1]
    )


MUTATIONS = ("none", "offset", "top-left", "dropped", "tail", "overwritten")


def attend_mutants(rank):
    case = fixed_case()
    problem = Problem.random(case, 5, torch.float64)
    found = {}
    for kind in MUTATIONS:
        plan = mutate(kind, case, case.plan(rank), rank)
        with pytest.MonkeyPatch.context() as patch:
            if kind == "overwritten":  # replicated gradients overwrite each other instead of adding up
                patch.setattr(exchange_module, "_sum", last_of_each)
            found[kind] = errors(case, problem, rank, run_case(case, problem, rank, torch.float64, plan=plan))
    return found


def test_planted_errors_are_seen(ranks):
    answers = ranks.run(4, attend_mutants)
    for kind in MUTATIONS:
        output, query, key, value = (max(a[kind][i] for a in answers) for i in range(4))
        if kind == "none":
            assert max(output, query, key, value) < 1e-12
        elif kind == "overwritten":
            assert output < 1e-12
            assert min(key, value) > 1e-2
        else:
            assert min(output, query, key, value) > 1e-2, kind


def attend_one_after_the_other(q, k, v, plan, group):
    """Every exchange finished where it was started, local sequences last."""
    divided = [sharded_module.divide(x, plan.runs) for x in (q, k, v)]
    into, out = plan.exchanges
    tensors = finish(start(into, [x[SHARED] for x in divided], group))
    tiles = sharded_module._attend_tiles(tensors, plan, None, None)
    (shared,) = finish(start(out, tiles, group))
    early = packed_attention(*[x[EARLY] for x in divided], plan.early)
    late = packed_attention(*[x[LATE] for x in divided], plan.late)
    return sharded_module.join([shared, early, late], plan.runs)


def attend_both_ways(rank, dtype):
    for causal, window in ((True, None), (False, None), (False, 2)):
        case = fixed_case(causal, window)
        problem = Problem.random(case, 7, dtype)
        overlapped = run_case(case, problem, rank, dtype)
        again = run_case(case, problem, rank, dtype)
        plain = run_case(case, problem, rank, dtype, attend_one_after_the_other)
        assert all(torch.equal(a, b) for a, b in zip(overlapped, plain, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(overlapped, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overlap_changes_no_bit_and_runs_repeat(ranks, dtype):
    ranks.run(4, attend_both_ways, dtype)


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name, notes):
        ctx.name, ctx.notes = name, notes
        notes.append(name)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.notes.append(f"{ctx.name} back")
        return gradient, None, None


def note_order(rank):
    notes = []

    def all_to_all_single(*args, **kwargs):
        notes.append("launch")
        work = dist.all_to_all_single(*args, **kwargs)

        def wait():
            notes.append("land")
            work.wait()

        return SimpleNamespace(wait=wait)

    case = fixed_case()
    plan = case.plan(rank)
    names = {id(plan.early): "early", id(plan.late): "late"}

    def noted_attention(q, k, v, packing, *more):
        return Noted.apply(packed_attention(q, k, v, packing, *more), names.get(id(packing), "tiles"), notes)

    problem = Problem.random(case, 3, torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_module, "dist", SimpleNamespace(all_to_all_single=all_to_all_single))
        patch.setattr(sharded_module, "packed_attention", noted_attention)
        run_case(case, problem, rank, torch.float64, plan=plan)
    idle = {name for name, packing in (("early", plan.early), ("late", plan.late)) if not packing.tokens}
    return [note for i, note in enumerate(notes) if note not in notes[i - 1 : i]], idle


def test_local_attention_runs_while_exchanges_are_under_way(ranks):
    expected = ["launch", "early", "land", "tiles", "launch", "late", "land"]
    expected += ["launch", "late back", "land", "tiles back", "launch", "early back", "land"]
    answers = ranks.run(4, note_order)
    assert [len(idle) for _, idle in answers] == [0, 2, 0, 2]
    for notes, idle in answers:
        assert notes == [note for note in expected if note.removesuffix(" back") not in idle]


def two_layers(q, k, v, plan, group, recompute):
    """Two layers of attention and of something token by token; the second reads what the first put out."""

    def layer(q, k, v):
        out = sharded_attention(q, k, v, plan, group)
        return out.sin() + q

    def run(*tensors):
        if recompute is None:
            return layer(*tensors)
        return checkpoint(layer, *tensors, use_reentrant=recompute == "reentrant")

    q = run(q, k, v)
    return run(q, k + q[:, : k.shape[1]], v)


def attention_alone(q, k, v, plan, group, recompute):
    return checkpoint(
        sharded_attention,
        q,
        k,
        v,
        plan,
        group,
        use_reentrant=recompute == "reentrant",
        preserve_rng_state=False,
    )


def recompute_all_ways(rank):
    case = fixed_case()
    problem = Problem.random(case, 11, torch.float64)

    def run(layers, recompute):
        return run_case(
            case, problem, rank, torch.float64, lambda q, k, v, p, g: layers(q, k, v, p, g, recompute)
        )

    once, alone = run(two_layers, None), run_case(case, problem, rank, torch.float64)
    for recompute in ("reentrant", "not"):
        again = run(two_layers, recompute)
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
        again = run(attention_alone, recompute)
        assert all(torch.equal(a, b) for a, b in zip(alone, again, strict=True))
    return sum(float(x.abs().sum()) for x in once)


def test_recomputation_runs_the_exchanges_on_every_rank(ranks):
    assert ranks.run(4, recompute_all_ways)[3] == 0.0  # the idle rank has no token, yet takes part


def attend_locally(rank):
    layout = SequenceLayout.whole([5, 3, 4], [0, 1, 0], 2)
    case = Case(layout, ((), (), ()), AttentionShape(4, 2, causal=True), (2, 0))
    plan = case.plan(rank)
    problem = Problem.random(case, 1, torch.float64)

    def fail(*_, **__):
        raise AssertionError("a collective without shared sequences")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_module, "dist", SimpleNamespace(all_to_all_single=fail))
        results = run_case(case, problem, rank, torch.float64)
    packing = make_packing(((5, 4, 2), (3,))[rank], True, 4 * SIZE, CPU, torch.float64)
    plain = run_case(
        case, problem, rank, torch.float64, lambda q, k, v, *_: packed_attention(q, k, v, packing)
    )
    assert plan.tiles is None
    assert moved_elements(plan.tiles) == Moved(0, 0, 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(results, plain, strict=True))


def test_without_shared_sequences_it_is_packed_attention(ranks):
    ranks.run(2, attend_locally)
