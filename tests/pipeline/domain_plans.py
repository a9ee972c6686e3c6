"""Small plans of domains for tests: work drawn at random, ordered by any builder."""

from collections import defaultdict
from dataclasses import dataclass, replace
from random import Random

from own_policies import own

from parallel.layout import split_evenly
from parallel.sequence import SequenceLayout, Shard
from pipeline.builders import Builder, Facts, SchedulePolicy, as_ordered, build_forward_only, without_frozen
from pipeline.costs import Costs
from pipeline.domain_plan import (
    EMBEDDING,
    DomainPlan,
    EncoderBatch,
    Microbatch,
    PlannedItem,
    PlannedSample,
    Point,
)
from pipeline.expand import expand
from pipeline.ops import Op
from pipeline.plan import GroupPlan, StepPlan, Taken
from pipeline.reductions import with_reductions
from pipeline.routes import outputs_of, plan_routes

COMPONENTS = ("audio", "image", "llm")
LLM = COMPONENTS.index("llm")
BUILDERS = {name: policy for name, policy in own(SchedulePolicy).items() if not policy.candidates}
SCHEDULES = (*BUILDERS, "forward_only")
UNIT = 4  # tokens of an item for each of its rows


@dataclass(frozen=True)
class Shape:
    """The ranks of a domain. `homes` are those of audio and of image, by default all ranks of the LLM; images
    have rows for the embedding, and for each of `taps`. A rank has `vpp` virtual stages, dealt to the stages
    in turn, or with `fold` two, forth and back: the last stage has both in the middle. `team` ranks share an
    op list.
    """

    stages: int = 1
    pool: int = 1
    tp: int = 1
    collective_group: int = 1
    beside: int = 0
    homes: tuple[tuple[int, int], ...] = ()
    taps: tuple[Point, ...] = ()
    vpp: int = 1
    team: int = 1
    fold: bool = False

    @property
    def holds(self) -> tuple[tuple[int, ...], ...]:
        """Virtual stages by team."""
        of_stage = [tuple(range(s, self.num_virtual_stages, self.stages)) for s in range(self.stages)]
        if self.fold:
            of_stage = [(s, 2 * self.stages - 1 - s) for s in range(self.stages)]
        llm = [held for held in of_stage for _ in range(self.stage_size // self.team)]
        return (*llm, *((),) * (self.beside // self.team))

    @property
    def stage_size(self) -> int:
        return self.pool * self.tp

    @property
    def llm(self) -> int:
        return self.stages * self.stage_size

    @property
    def num_virtual_stages(self) -> int:
        return self.stages * self.vpp

    @property
    def feeds(self) -> tuple[tuple[str, tuple[Point, ...]], ...]:
        return (("image", (EMBEDDING, *self.taps)),) if self.taps else ()

    def home(self, component: str) -> tuple[int, int]:
        encoders = self.homes or ((0, self.llm),) * 2
        return dict(zip(COMPONENTS, (*encoders, (0, self.llm)), strict=True))[component]


@dataclass(frozen=True)
class Work:
    """One encoder batch: its neighbouring ranks, for which microbatch, and the rows of its items;
    for several microbatches, the items go to them in turn.

    The ranks are `num_tp_groups` tp groups of equal size. Every other item is cut over all tp groups, the
    rest lie whole on one of them.
    """

    component: str
    microbatch: int | tuple[int, ...]
    ranks: tuple[int, ...]
    rows: tuple[int, ...]
    num_tp_groups: int = 1

    def microbatch_of(self, item: int) -> int:
        many = self.microbatch if isinstance(self.microbatch, tuple) else (self.microbatch,)
        return many[item % len(many)]


def random_shape(random: Random, max_stages: int, max_wide: int = 3) -> Shape:
    """Up to `max_stages` stages, of one rank or, if they are at most `max_wide`, of up to four, and up to
    three ranks beside them.
    """
    pool, tp = random.choice(((1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (3, 1)))
    stages = random.randint(1, max_stages if pool * tp == 1 else min(max_wide, max_stages))
    collective_group = tp * random.choice([k for k in range(1, pool + 1) if pool % k == 0])
    beside = random.choice((0, 0, 1, 2, 3))
    llm = stages * pool * tp
    spans = [(0, llm), (0, llm), (0, pool * tp), (0, llm + beside), (llm - 1, llm)]
    spans += [(llm, llm + beside)] * 2 if beside else []
    homes = (random.choice(spans), random.choice(spans))
    taps = [Point("llm.layers.1", 0, 1), Point(f"llm.layers.{stages}", stages - 1, 2 if stages == 1 else 0)]
    return Shape(
        stages, pool, tp, collective_group, beside, homes, tuple(taps[: random.choice((0, 0, 1, 2))])
    )


def random_work(random: Random, shape: Shape, microbatches: int) -> list[Work]:
    """Up to eight encoder batches in any order; some microbatches and some ranks have none."""
    if microbatches == 0:
        return []
    with_items = random.sample(range(microbatches), random.randint(1, microbatches))
    work = []
    for _ in range(random.randint(0, 8)):
        component = random.choice(("audio", "image"))
        first, stop = shape.home(component)
        start = random.randrange(first, stop)
        stop = min(stop, shape.llm) if start < shape.llm else stop  # ranks beside the LLM share with no other
        num_tp_groups, size = random.choice(((1, 1), (1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (4, 1)))
        if start + num_tp_groups * size > stop:
            num_tp_groups = size = 1
        rows = tuple(random.randint(0, 4) for _ in range(random.randint(1, 3)))
        ranks = tuple(range(start, start + num_tp_groups * size))
        of = random.choice(with_items)
        if random.random() < 0.2:  # an encoder batch of several microbatches
            of = tuple(random.sample(with_items, random.randint(1, min(3, len(with_items)))))
        work.append(Work(component, of, ranks, rows, num_tp_groups))
    return work


def make_plan(
    shape: Shape | int,
    microbatches: int,
    work: list[Work],
    schedule: str | Builder,
    frozen: tuple[str, ...] = (),
    cuts: Random | None = None,
    costs: Costs | None = None,
) -> StepPlan:
    """A step of one domain, made of the parts that the planner is made of, but for its policies.

    The schedule is one of ours by name, or any builder; it is told that ops take `costs`. A microbatch has a
    sequence for each cp rank of the pool: on this cp rank, or cut over any of them at random. A number in
    place of a shape is that of stages with one rank each.
    """
    shape = Shape(shape) if isinstance(shape, int) else shape
    train = schedule != "forward_only"
    texts = [[2] * shape.pool for _ in range(microbatches)]
    items, encoder_batches, lengths = _pack(shape, work, texts)
    batches = tuple(_microbatch(shape, m, lengths[m], cuts) for m in range(microbatches))
    every = [n for of in lengths for n in of]
    samples = tuple(PlannedSample("text", i, n, ((0, n),)) for i, n in enumerate(every))
    trained = [number for number, name in enumerate(COMPONENTS) if train and name not in frozen]
    domain = DomainPlan(
        team=shape.team,
        holds=shape.holds,
        pool=shape.pool,
        tp=shape.tp,
        collective_group=shape.collective_group,
        llm=LLM,
        homes=tuple(map(shape.home, COMPONENTS)),
        samples=samples,
        microbatches=batches,
        items=tuple(items),
        encoder_batches=tuple(encoder_batches),
        routes=(),
        ops=(),
        reductions=tuple((n, p) for n in trained for p in range(shape.num_virtual_stages if n == LLM else 1)),
        feeds=shape.feeds,
    )
    domain = replace(domain, routes=plan_routes(domain), bounds=_bounds(domain, schedule))
    order = build_forward_only(domain)
    if train:
        builder = BUILDERS[schedule] if isinstance(schedule, str) else schedule
        places = isinstance(builder, SchedulePolicy) and builder.encoder_batches
        facts = Facts(costs or FREE, one, _tp_groups(domain) if places else {}, frozenset(frozen))
        order = builder(domain, facts)
        if places:
            domain = as_ordered(domain, order)
            domain = replace(domain, routes=plan_routes(domain))
    order = with_reductions(without_frozen(order, domain, frozenset(frozen)), domain, COMPONENTS)
    lists = expand(order, domain)
    domain = replace(domain, ops=tuple(map(tuple, lists)))
    taken = Taken(
        0,
        len(samples),
        ("text",),
        (0,) * len(samples),
        tuple(s.id for s in samples),
        tuple(s.length for s in samples),
    )
    group = GroupPlan(0, 0, ((tuple(range(len(samples))),),))
    return StepPlan(1, train, 0, COMPONENTS, frozen, taken, group, 0, domain)


def _bounds(domain: DomainPlan, schedule: str | Builder) -> tuple[tuple[str, int], ...]:
    """Passes in flight of each virtual stage: in our schedules, as many as they say."""
    policy = BUILDERS.get(schedule) if isinstance(schedule, str) else schedule
    ours = isinstance(policy, SchedulePolicy)
    most = policy.in_flight if ours else lambda domain, virtual_stage: len(domain.microbatches)
    numbers = range(domain.num_virtual_stages)
    return tuple((f"llm/{number}", most(domain, number)) for number in numbers)


def _tp_groups(domain: DomainPlan) -> dict[str, list[tuple[int, ...]]]:
    """Where encoder batches of one tp group may go: to any of their encoder's home, if all have the same
    size.
    """
    tp_groups = {}
    for name, (first, stop) in zip(COMPONENTS, domain.homes, strict=True):
        sizes = {c.tp for c in domain.encoder_batches if c.component == name and c.layout.num_cp_ranks == 1}
        if len(sizes) == 1 and (stop - first) % (size := sizes.pop()) == 0:
            tp_groups[name] = [tuple(range(start, start + size)) for start in range(first, stop, size)]
    return tp_groups


def one(rank: int, op: Op) -> int:
    """What each forward keeps: microbatches in flight are counted, not their bytes."""
    return 1


def _unit(rank: int, op: Op) -> int:
    return 1


def _nothing(op: Op) -> int:
    return 0


FREE = _unit, _nothing


def _pack(
    shape: Shape, work: list[Work], lengths: list[list[int]]
) -> tuple[list[PlannedItem], list[EncoderBatch], list[list[int]]]:
    """Put the items of each microbatch into its sequences in turn, with text between them."""
    planned: list[PlannedItem] = []
    for piece in work:
        for place, rows in enumerate(piece.rows):
            m, number = piece.microbatch_of(place), len(planned)
            q = number % shape.pool
            item = PlannedItem(
                piece.component, m * shape.pool + q, number, m, UNIT * rows, rows, lengths[m][q]
            )
            planned.append(item)
            lengths[m][q] += rows + 1
    # Starts are those of the pack, not of the sequence.
    items = [replace(i, start=i.start + sum(lengths[i.microbatch][: i.sample % shape.pool])) for i in planned]
    encoder_batches, filled = [], 0
    for piece in work:
        numbers = tuple(range(filled, filled + len(piece.rows)))
        filled += len(piece.rows)
        layout = SequenceLayout(
            piece.num_tp_groups, tuple(_shards(i, items[i].rows, piece.num_tp_groups) for i in numbers)
        )
        points = 1 + len(shape.taps) if piece.component == "image" else 1
        outputs = outputs_of(numbers, items, layout, len(piece.ranks) // piece.num_tp_groups, points)
        tiles = ((),) * len(numbers)
        batches = tuple(sorted({items[i].microbatch for i in numbers}))
        encoder_batches.append(
            EncoderBatch(piece.component, batches, piece.ranks, numbers, layout, tiles, outputs)
        )
    return items, encoder_batches, lengths


def _shards(item: int, rows: int, num_tp_groups: int) -> tuple[Shard, ...]:
    if item % 2 or num_tp_groups == 1:
        return (Shard(item % num_tp_groups, 0, UNIT * rows),)
    shards, start = [], 0
    for tp_group, share in enumerate(split_evenly(rows, num_tp_groups)):
        shards.append(Shard(tp_group, start, UNIT * share))
        start += UNIT * share
    return tuple(shards)


def _microbatch(shape: Shape, m: int, lengths: list[int], cuts: Random | None) -> Microbatch:
    shards = []
    for q, length in enumerate(lengths):
        pieces: dict[int, list[int]] = defaultdict(list)
        if cuts is None or cuts.random() < 0.5:
            pieces[q] = [0, length]
        else:
            cp_ranks = cuts.sample(range(shape.pool), cuts.randint(1, shape.pool))
            places = sorted(cuts.randint(0, length) for _ in cp_ranks[1:])
            for cp_rank, start, stop in zip(cp_ranks, [0, *places], [*places, length], strict=True):
                pieces[cp_rank] = [start, stop]
        shards.append(tuple(Shard(cp_rank, start, stop - start) for cp_rank, (start, stop) in pieces.items()))
    samples = tuple(range(m * shape.pool, (m + 1) * shape.pool))
    return Microbatch(samples, SequenceLayout(shape.pool, tuple(shards)), ((),) * shape.pool)
