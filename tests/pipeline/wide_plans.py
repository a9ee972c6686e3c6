"""Plans of what our schedules do not make yet: virtual stages that interleave or fold back, teams, split
backwards, early reductions. The orders are written by hand here.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from domain_plans import BUILDERS, SCHEDULES, Shape, Work, make_plan, random_shape, random_work

from parallel.work import Grad
from pipeline.builders import Builder, Facts, Order, encoder_batches_by_team
from pipeline.domain_plan import DomainPlan, Point
from pipeline.expand import expand
from pipeline.ops import BACKWARDS, COMPUTE, Kind, Op
from pipeline.plan import StepPlan
from pipeline.simulator import run

Times = dict[tuple[int, Op], int]


def with_encoders_around(domain: DomainPlan, passes: Callable[[int], list[Op]]) -> Order:
    """All encoder forwards, the passes of each team, then all encoder backwards."""
    return [
        [Op(Kind.ENCODE, c) for c, *_ in mine]
        + (passes(team) if domain.holds[team] else [])
        + [Op(Kind.ENCODE_BACKWARD, c) for c, *_ in mine]
        for team, mine in enumerate(encoder_batches_by_team(domain))
    ]


def build_in_turn(domain: DomainPlan, facts: Facts) -> Order:
    """All microbatches through one virtual stage after the other, then back: for any table of them."""
    microbatches = range(len(domain.microbatches))

    def passes(team: int) -> list[Op]:
        vpp = domain.holds[team]
        forward = [Op(Kind.FORWARD, m, virtual_stage=p) for p in sorted(vpp) for m in microbatches]
        backward = [Op(Kind.BACKWARD, m, virtual_stage=p) for p in sorted(vpp)[::-1] for m in microbatches]
        return forward + backward

    return with_encoders_around(domain, passes)


def timed(domain: DomainPlan, lists: list[list[Op]] | Order) -> list[list[tuple[int, Op]]]:
    """The ops of each team with when they end if every compute takes a while."""
    planned = replace(domain, ops=tuple(map(tuple, lists)))
    timeline = run(planned, lambda rank, op: 10 if op.kind in COMPUTE else 0, lambda op: 1)
    return [[(event.end_ns, event.op) for event in events] for events in timeline.events]


def with_split_backwards(builder: Builder, seed: int, share: float = 0.7) -> Builder:
    """Split a share of the backwards, with the half for weights at any later time, as zero-bubble schedules.

    Ops stay in the order of one clock for all ranks, so that those who run a half together agree on it.
    """

    def halves(end: int, op: Op, domain: DomainPlan, partners: range) -> list[tuple[int, str, Op]]:
        random = Random(f"{seed} {op} {partners}")  # the same for all who run it together
        whole = op.kind not in BACKWARDS or op.grad is not Grad.BOTH or random.random() >= share
        if whole:
            return [(end, "", op)]
        first, later = replace(op, grad=Grad.INPUT), replace(op, grad=Grad.WEIGHT)
        if op.kind is Kind.BACKWARD and (domain.llm, op.virtual_stage) not in domain.reductions:
            return [(end, "", first)]  # it does not learn
        return [(end, "", first), (end + random.randint(0, 120), str(later), later)]

    def build(domain: DomainPlan, facts: Facts) -> Order:
        order = []
        for team, ops in enumerate(timed(domain, expand(builder(domain, facts), domain))):
            entries = []
            for end, op in ops:
                if op.kind in COMPUTE:
                    entries += halves(end, op, domain, domain.collective_group_of(op, team * domain.team))
            order.append([op for *_, op in sorted(entries, key=lambda entry: entry[:2])])
        return order

    return build


def with_early_reductions(plan: StepPlan, random: Random) -> StepPlan:
    """Reduce what is complete at any time from then on, in the order of these times."""
    domain = plan.domain
    lists = timed(domain, [[op for op in ops if not reduces(op)] for ops in domain.ops])
    ready = dict.fromkeys(domain.reductions, 0)
    for ops in lists:
        for end, op in ops:
            if op.kind in BACKWARDS:
                component = LLM if op.kind is Kind.BACKWARD else domain.encoder_batches[op.index].component
                pair = plan.components.index(component), op.virtual_stage
                if pair in ready:
                    ready[pair] = max(ready[pair], end)
    first, last = (domain.llm, 0), (domain.llm, domain.num_virtual_stages - 1)
    if first in ready:  # the output may be the embedding
        ready[first] = max(ready[first], ready[last])
    at = {pair: end + random.choice((0, 0, 15, 60, 10**6)) for pair, end in ready.items()}
    reductions = tuple(sorted(at, key=lambda pair: (at[pair], pair)))
    merged = []
    for team, ops in enumerate(lists):
        reduced = [Op(Kind.REDUCE, n, virtual_stage=p) for n, p in reductions]
        own = [(at[op.index, op.virtual_stage], 1, op) for op in reduced if team in domain.reducing(op)]
        entries = [(end, 0, op) for end, op in ops] + own
        waits = [Op(Kind.WAIT, op.index, Kind.REDUCE, op.virtual_stage) for *_, op in own]
        merged.append((*(op for *_, op in sorted(entries, key=lambda entry: entry[:2])), *waits))
    return replace(plan, domain=replace(domain, reductions=reductions, ops=tuple(merged)))


def reduces(op: Op) -> bool:
    """Whether an op issues a reduction or waits for one."""
    return Kind.REDUCE in (op.kind, op.on)


LLM = "llm"


def random_wide_shape(
    random: Random,
    max_stages: int,
    max_wide: int = 3,
    vpp: Sequence[int] = (1, 2, 2, 3),
    folds: bool = True,
) -> Shape:
    """Any shape with teams and one of `vpp` on a rank, some tables folded if it `folds`."""
    shape = random_shape(random, max_stages, max_wide)
    vpp = random.choice(vpp)
    team = random.choice((1, shape.tp))
    homes = tuple((first - first % team, stop + -stop % team) for first, stop in shape.homes)
    beside = shape.beside + -shape.beside % team
    last = shape.stages * vpp - 1
    taps = (Point("a", 0, 1), Point("b", last // 2, 2), Point("c", last, 3))
    taps = tuple(random.sample(taps, random.choice((0, 0, 1, 2, 3))))
    return replace(
        shape,
        vpp=vpp,
        fold=folds and vpp == 2 and random.random() < 0.4,
        team=team,
        beside=beside,
        homes=homes,
        taps=tuple(sorted(taps, key=lambda tap: tap.place)),
    )


def whole_teams(work: list[Work], shape: Shape) -> list[Work]:
    """The same work on whole teams: each rank of an encoder batch becomes its team, as far as the home
    reaches.
    """
    if shape.team == 1:
        return work
    wide = []
    for piece in work:
        first, stop = shape.home(piece.component)
        stop = min(stop, shape.llm) if piece.ranks[0] < shape.llm else stop
        start = piece.ranks[0] - piece.ranks[0] % shape.team
        size, num_tp_groups = len(piece.ranks) * shape.team, piece.num_tp_groups
        if start + size > stop:
            size, num_tp_groups = shape.team, 1
        assert first <= start < stop
        wide.append(replace(piece, ranks=tuple(range(start, start + size)), num_tp_groups=num_tp_groups))
    return wide


def random_wide_plan(random: Random, max_stages: int = 4, most: int = 6) -> StepPlan:
    """Any plan that is safe: of our schedules, or of those here."""
    shape = random_wide_shape(random, max_stages)
    microbatches = random.randint(0, most)
    work = whole_teams(random_work(random, shape, microbatches), shape)
    frozen = random.choice(((), (), ("image",), ("audio", "image"), ("llm",)))
    names = [*SCHEDULES] if shape.vpp == 1 else ["forward_only"]
    if shape.vpp > 1 and not shape.fold:
        names += ["interleaved"]
    schedule: str | Builder = random.choice([*names, build_in_turn, build_in_turn])
    if schedule == "forward_only":
        return make_plan(shape, microbatches, work, schedule, frozen, cuts=random)
    if random.random() < 0.6:
        builder = BUILDERS[schedule] if isinstance(schedule, str) else schedule
        schedule = with_split_backwards(builder, random.randint(0, 10**6))
    plan = make_plan(shape, microbatches, work, schedule, frozen, cuts=random)
    return with_early_reductions(plan, random) if random.random() < 0.5 else plan
