from collections import defaultdict
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.layout import split_evenly
from parallel.sequence import SequenceLayout, Shard
from pipeline.domain_plan import EMBEDDING, DomainPlan, EncoderBatch, Microbatch, PlannedItem, Point
from pipeline.routes import outputs_of, plan_routes

STAGES = 3


def cut(random, units, num_cp_ranks, unit):
    """A sequence of so many units over any cp ranks, at most once each."""
    holders = random.sample(range(num_cp_ranks), random.randint(1, num_cp_ranks))
    edges = sorted([0, units, *(random.randint(0, units) for _ in holders[1:])])
    return tuple(
        Shard(holder, a * unit, (b - a) * unit)
        for holder, (a, b) in zip(holders, pairwise(edges), strict=True)
    )


def random_work(random):
    """A microbatch over cp ranks of tp ranks a stage, encoder batches of two components, and their attach
    points.
    """
    num_cp_ranks, tp = random.randint(1, 5), random.randint(1, 3)
    size = STAGES * num_cp_ranks * tp + random.randint(0, 3)
    lengths = [random.randint(1, 12) for _ in range(random.randint(1, 4))]
    layout = SequenceLayout(num_cp_ranks, tuple(cut(random, length, num_cp_ranks, 1) for length in lengths))
    points = [Point(f"llm.{number}", stage, place) for number, (stage, place) in enumerate(
        sorted(random.sample([(s, p) for s in range(STAGES) for p in range(1, 3)], 3)))]  # fmt: skip
    feeds = {"eye": (EMBEDDING, *points)[: random.randint(1, 3)], "ear": (EMBEDDING,)}
    items, encoder_batches, start = [], [], 0
    for sample, length in enumerate(lengths):
        first = start + random.randint(0, length)
        rows = random.randint(0, start + length - first)
        component = random.choice(list(feeds))
        items.append(PlannedItem(component, sample, 0, 0, 4 * rows, rows, first))
        start += length
    for component in feeds:
        own = [i for i, item in enumerate(items) if item.component == component]
        for part in (own[:2], own[2:]):
            if part:
                encoder_batches.append(
                    random_encoder_batch(random, component, part, items, size, len(feeds[component]))
                )
    return layout, tp, size, items, encoder_batches, feeds


def random_encoder_batch(random, component, part, items, size, num_points):
    tp = random.choice((1, 2))
    num_tp_groups = random.randint(1, size // tp)
    ranks = tuple(random.sample(range(size), num_tp_groups * tp))
    layout = SequenceLayout(num_tp_groups, tuple(cut(random, items[i].rows, num_tp_groups, 4) for i in part))
    outputs = outputs_of(part, items, layout, tp, num_points)
    return EncoderBatch(component, (0,), ranks, tuple(part), layout, ((),) * len(part), outputs)


def domain_of(layout, tp, size, items, encoder_batches, feeds):
    """A domain of one microbatch over `size` domain ranks: STAGES stages of one virtual stage each."""
    held = [(stage,) for stage in range(STAGES) for _ in range(layout.num_cp_ranks * tp)]
    return DomainPlan(
        team=1,
        holds=(*held, *((),) * (size - len(held))),
        pool=layout.num_cp_ranks,
        tp=tp,
        collective_group=1,
        llm=0,
        homes=(),
        samples=(),
        microbatches=(Microbatch((), layout, ()),),
        items=tuple(items),
        encoder_batches=tuple(encoder_batches),
        routes=(),
        ops=(),
        feeds=tuple(feeds.items()),
    )


def sent_rows(encoder_batches, items, feeds):
    """Where each row is and which place it is meant for, one row at a time: (domain rank, row) by (item, row,
    point).
    """
    found, filled = {}, defaultdict(int)
    for batch in encoder_batches:
        of_tp_group = defaultdict(list)
        for point in feeds[batch.component]:
            for i, shards in zip(batch.items, batch.layout.shards, strict=True):
                for shard in shards:
                    first, stop = shard.start // 4, (shard.start + shard.length) // 4
                    of_tp_group[shard.cp_rank] += [(i, row, point) for row in range(first, stop)]
        for tp_group, rows in of_tp_group.items():
            owners = [
                rank for rank, share in enumerate(split_evenly(len(rows), batch.tp)) for _ in range(share)
            ]
            for row, owner in zip(rows, owners, strict=True):
                domain_rank = batch.ranks[tp_group * batch.tp + owner]
                assert row not in found, "every row is put out once for each attach point"
                found[row] = domain_rank, filled[domain_rank]
                filled[domain_rank] += 1
    return found


def places(layout, tp):
    """Rank of the stage and local token of every packed token."""
    held, order = [0] * layout.num_cp_ranks, []
    for shards in layout.shards:
        for shard in shards:
            for _ in range(shard.length):
                order.append((shard.cp_rank, held[shard.cp_rank]))
                held[shard.cp_rank] += 1
    share = [max(1, -(-tokens // tp)) for tokens in held]
    return [(cp_rank * tp + at // share[cp_rank], at % share[cp_rank]) for cp_rank, at in order]


@settings(deadline=None, max_examples=300)
@given(st.randoms(use_true_random=False))
def test_every_row_arrives_once_at_each_of_its_attach_points(random):
    layout, tp, size, items, encoder_batches, feeds = random_work(random)
    domain = domain_of(layout, tp, size, items, encoder_batches, feeds)
    (route,) = plan_routes(domain)
    place, stage_size = places(layout, tp), layout.num_cp_ranks * tp
    wanted = []
    for (i, row, point), (domain_rank, at) in sent_rows(encoder_batches, items, feeds).items():
        rank, token = place[items[i].start + row]
        destination = point.virtual_stage * stage_size + rank
        wanted.append((domain_rank, at, destination, token, i, domain.all_points.index(point)))
    planned = sum(items[i].rows * len(feeds[c.component]) for c in encoder_batches for i in c.items)
    assert len(wanted) == planned
    carried = [
        (s.source, s.source_start + n, s.destination, s.destination_start + n, s.item, s.point)
        for s in route.segments
        for n in range(s.length)
    ]
    assert sorted(carried) == sorted(wanted)


def test_a_microbatch_without_items_has_no_route():
    layout = SequenceLayout.whole([3], [0], 1)
    assert plan_routes(domain_of(layout, 1, 3, [], [], {})) == (None,)
