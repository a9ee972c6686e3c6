"""Small plans of domains for tests: work drawn at random, ordered by any builder."""

from collections import defaultdict
from dataclasses import dataclass, replace
from random import Random

from own_policies import own

from parallel.layout import split_evenly
from parallel.sequence import SequenceLayout, Shard
from pipeline.builders import SchedulePolicy, build_forward_only, expand, without_encoder_backward
from pipeline.plan import (
    EMBEDDING,
    Chunk,
    DomainPlan,
    Kind,
    Microbatch,
    Op,
    PlannedItem,
    PlannedSample,
    Point,
    StepPlan,
)
from pipeline.routes import plan_route, row_counts

COMPONENTS = ("audio", "image", "llm")
BUILDERS = own(SchedulePolicy)
SCHEDULES = (*BUILDERS, "forward_only")
UNIT = 4  # tokens of an item for each of its rows


@dataclass(frozen=True)
class Shape:
    """The ranks of a domain. `homes` are those of audio and of image, by default all ranks of the LLM; images
    have rows for the embedding of the first stage and for each of `taps`.
    """

    stages: int = 1
    pool: int = 1
    tp: int = 1
    party: int = 1
    beside: int = 0
    homes: tuple[tuple[int, int], ...] = ()
    taps: tuple[Point, ...] = ()

    @property
    def stage_size(self) -> int:
        return self.pool * self.tp

    @property
    def llm(self) -> int:
        return self.stages * self.stage_size

    @property
    def feeds(self) -> tuple[tuple[str, tuple[Point, ...]], ...]:
        return (("image", (EMBEDDING, *self.taps)),) if self.taps else ()

    def home(self, component: str) -> tuple[int, int]:
        encoders = self.homes or ((0, self.llm),) * 2
        return dict(zip(COMPONENTS, (*encoders, (0, self.llm)), strict=True))[component]


@dataclass(frozen=True)
class Work:
    """One chunk of encoder work: its neighbouring ranks, for which microbatch, and the rows of its items.

    The ranks are `slots` slots of equal size. Every other item is cut over all slots, the rest lie whole on
    one of them.
    """

    component: str
    microbatch: int
    ranks: tuple[int, ...]
    rows: tuple[int, ...]
    slots: int = 1


def random_shape(random: Random, max_stages: int) -> Shape:
    """Up to `max_stages` stages of up to four ranks, and up to three ranks beside them."""
    pool, tp = random.choice(((1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (3, 1)))
    stages = random.randint(1, max_stages if pool * tp == 1 else min(3, max_stages))
    party = tp * random.choice([k for k in range(1, pool + 1) if pool % k == 0])
    beside = random.choice((0, 0, 1, 2, 3))
    llm = stages * pool * tp
    spans = [(0, llm), (0, llm), (0, pool * tp), (0, llm + beside), (llm - 1, llm)]
    spans += [(llm, llm + beside)] * 2 if beside else []
    homes = (random.choice(spans), random.choice(spans))
    taps = [Point("llm.layers.1", 0, 1), Point(f"llm.layers.{stages}", stages - 1, 2 if stages == 1 else 0)]
    return Shape(stages, pool, tp, party, beside, homes, tuple(taps[: random.choice((0, 0, 1, 2))]))


def random_work(random: Random, shape: Shape, microbatches: int) -> list[Work]:
    """Up to eight chunks in any order; some microbatches and some ranks have none."""
    if microbatches == 0:
        return []
    with_items = random.sample(range(microbatches), random.randint(1, microbatches))
    work = []
    for _ in range(random.randint(0, 8)):
        component = random.choice(("audio", "image"))
        first, stop = shape.home(component)
        start = random.randrange(first, stop)
        stop = min(stop, shape.llm) if start < shape.llm else stop  # ranks beside the LLM share with no other
        slots, size = random.choice(((1, 1), (1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (4, 1)))
        if start + slots * size > stop:
            slots = size = 1
        rows = tuple(random.randint(0, 4) for _ in range(random.randint(1, 3)))
        ranks = tuple(range(start, start + slots * size))
        work.append(Work(component, random.choice(with_items), ranks, rows, slots))
    return work


def make_plan(
    shape: Shape | int,
    microbatches: int,
    work: list[Work],
    schedule: str,
    frozen: tuple[str, ...] = (),
    domains: int = 1,
    cuts: Random | None = None,
) -> StepPlan:
    """A step of equal domains, made of the parts that the planner is made of, but for its policies.

    A microbatch has a sequence for each member of the pool: on this member, or cut over any of them at
    random. A number in place of a shape is that of stages with one rank each.
    """
    shape = Shape(shape) if isinstance(shape, int) else shape
    train = schedule != "forward_only"
    texts = [[2] * shape.pool for _ in range(microbatches)]
    items, chunks, lengths = _pack(shape, work, texts)
    batches = tuple(_microbatch(shape, m, lengths[m], cuts) for m in range(microbatches))
    size = shape.llm + shape.beside
    domain = DomainPlan(
        num_stages=shape.stages,
        pool=shape.pool,
        tp=shape.tp,
        party=shape.party,
        beside=shape.beside,
        homes=tuple(map(shape.home, COMPONENTS)),
        microbatches=batches,
        items=tuple(items),
        chunks=tuple(chunks),
        routes=(),
        ops=(),
        feeds=shape.feeds,
    )
    routes = tuple(
        plan_route(m, batch.layout, shape.tp, size, items, chunks, domain.fed_by)
        for m, batch in enumerate(batches)
    )
    domain = replace(domain, routes=routes)
    order = (BUILDERS[schedule] if train else build_forward_only)(domain)
    lists = expand(without_encoder_backward(order, domain, frozenset(frozen)), domain)
    for number, component in enumerate(COMPONENTS):
        if train and component not in frozen:
            for rank in range(*shape.home(component)):
                lists[rank].append(Op(Kind.REDUCE, number))
    domain = replace(domain, ops=tuple(map(tuple, lists)))
    samples = tuple(PlannedSample("text", i, n) for i, n in enumerate(n for of in lengths for n in of))
    return StepPlan(1, train, 0, len(samples), 0, COMPONENTS, frozen, samples, (), tuple([domain] * domains))


def _pack(
    shape: Shape, work: list[Work], lengths: list[list[int]]
) -> tuple[list[PlannedItem], list[Chunk], list[list[int]]]:
    """Put the items of each microbatch into its sequences in turn, with text between them."""
    planned: list[PlannedItem] = []
    for piece in work:
        for rows in piece.rows:
            m, number = piece.microbatch, len(planned)
            q = number % shape.pool
            item = PlannedItem(
                piece.component, m * shape.pool + q, number, m, UNIT * rows, rows, lengths[m][q]
            )
            planned.append(item)
            lengths[m][q] += rows + 1
    # Starts are those of the pack, not of the sequence.
    items = [replace(i, start=i.start + sum(lengths[i.microbatch][: i.sample % shape.pool])) for i in planned]
    chunks, filled = [], 0
    for piece in work:
        numbers = tuple(range(filled, filled + len(piece.rows)))
        filled += len(piece.rows)
        layout = SequenceLayout(piece.slots, tuple(_shards(i, items[i].rows, piece.slots) for i in numbers))
        points = 1 + len(shape.taps) if piece.component == "image" else 1
        rows_of = row_counts([items[i] for i in numbers], layout, len(piece.ranks) // piece.slots, points)
        tiles = ((),) * len(numbers)
        chunks.append(Chunk(piece.component, piece.microbatch, piece.ranks, numbers, layout, tiles, rows_of))
    return items, chunks, lengths


def _shards(item: int, rows: int, slots: int) -> tuple[Shard, ...]:
    if item % 2 or slots == 1:
        return (Shard(item % slots, 0, UNIT * rows),)
    shards, start = [], 0
    for slot, share in enumerate(split_evenly(rows, slots)):
        shards.append(Shard(slot, start, UNIT * share))
        start += UNIT * share
    return tuple(shards)


def _microbatch(shape: Shape, m: int, lengths: list[int], cuts: Random | None) -> Microbatch:
    shards = []
    for q, length in enumerate(lengths):
        pieces: dict[int, list[int]] = defaultdict(list)
        if cuts is None or cuts.random() < 0.5:
            pieces[q] = [0, length]
        else:
            members = cuts.sample(range(shape.pool), cuts.randint(1, shape.pool))
            places = sorted(cuts.randint(0, length) for _ in members[1:])
            for member, start, stop in zip(members, [0, *places], [*places, length], strict=True):
                pieces[member] = [start, stop]
        shards.append(tuple(Shard(member, start, stop - start) for member, (start, stop) in pieces.items()))
    samples = tuple(range(m * shape.pool, (m + 1) * shape.pool))
    return Microbatch(samples, SequenceLayout(shape.pool, tuple(shards)), ((),) * shape.pool)
