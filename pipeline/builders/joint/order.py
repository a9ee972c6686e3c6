"""Joint: encoder work placed where the LLM's pipeline idles.

The passes of the LLM keep the order of another builder: 1F1B, interleaved, zero bubble. Around them all ranks
encode batches of about equal cost, of any microbatches, and go back through them: in the warm-up, wherever a
pass must wait, and in the cool-down. Three steps:

1. the passes are timed alone (`alone.py`): what does each rank do, and idle once gradients are back?
2. encoder batches are dealt to tp groups in proportion to the shares that follow (`shares.py`);
3. list scheduling puts them between the passes (`filling.py`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from pipeline.builders.joint.alone import rooms_of, timed_passes
from pipeline.builders.joint.crews import Crews, crews_of
from pipeline.builders.joint.filling import NO_LIMIT, Bounds, fill
from pipeline.builders.joint.shares import Room, deal_out, share_out, within
from pipeline.builders.joint.timed import Boundary, TimedEncoderBatch, most
from pipeline.builders.passes import (
    Passes,
    interleaved_passes,
    most_in_flight,
    one_f_one_b_passes,
    zb_h1_5_passes,
    zb_h1_passes,
    zb_h2_passes,
)
from pipeline.builders.schedule import Facts, Order, SchedulePolicy
from pipeline.domain_plan import DomainPlan
from pipeline.ops import Kind, Op
from pipeline.policies import TpGroup
from pipeline.rules.lists import ENCODES

ENCODER_BATCHES = 2  # for each tp group and microbatch


def build_joint(passes: Passes, domain: DomainPlan, facts: Facts) -> Order:
    """Order the teams of a domain; an encoder batch of one tp group may come to another of its encoder.

    No encoder batch is encoded beyond the domain's bounds on activations of encoders.
    """
    crews = crews_of(domain, facts.tp_groups)
    boundary = _boundary(domain, facts, crews)
    of_llm = timed_passes(passes, domain, facts, crews, boundary.shipped)
    of_crews, makespan = rooms_of(of_llm, boundary, facts.one_queue)
    free = _timed_batches(domain, facts, max((one.ns for of in of_llm for one in of), default=0))
    rooms = [of_crews[crew] for crew in crews.crew_of]
    tp_groups = _deal(domain, facts, crews, free, rooms, makespan)
    timed_batches, barriers = _by_unit(crews, free)
    bytes_of = dict(domain.bounds)
    room = min((bytes_of[name] for name in facts.tp_groups if name in bytes_of), default=NO_LIMIT)
    bounds = Bounds(room, _late(rooms, free, makespan), facts.one_queue)
    units = fill(crews, of_llm, timed_batches, barriers, boundary, bounds)
    narrow = _narrow(domain, crews, free, tp_groups)
    return [_of_team(domain, team, units[crews.unit_of[team]], narrow) for team in domain.teams]


def _narrow(
    domain: DomainPlan, crews: Crews, timed_batches: Sequence[TimedEncoderBatch], tp_groups: Sequence[TpGroup]
) -> dict[int, TpGroup]:
    """The ranks of encoder batches that need not all of their units, whose tp groups of another encoder are
    wider.
    """
    size = [len(unit) * domain.team for unit in crews.units]
    return {
        number: tp_groups[number]
        for number, one in enumerate(timed_batches)
        if len(tp_groups[number]) < sum(size[unit] for unit in one.units)
    }


def _of_team(domain: DomainPlan, team: int, ops: list[Op], narrow: Mapping[int, TpGroup]) -> list[Op]:
    """The ops of a team among those of its unit."""
    if not narrow:
        return list(ops)
    rank = team * domain.team
    return [op for op in ops if op.kind not in ENCODES or rank in narrow.get(op.index, (rank,))]


def _boundary(domain: DomainPlan, facts: Facts, crews: Crews) -> Boundary:
    """The way of rows: nothing is shipped for a microbatch without items, so it may enter at once."""
    _, message_ns = facts.costs
    ship_ns = [message_ns(Op(Kind.SHIP, m)) if of else -1 for m, of in enumerate(domain.encoder_batches_of)]
    entered = [
        crew
        for crew, units in enumerate(crews.crews)
        if domain.virtual_stages_with_rows(crews.units[units[0]][0] * domain.team)
    ]
    return Boundary(ship_ns, [-1 if ns >= 0 else 0 for ns in ship_ns], tuple(entered))


def _timed_batches(domain: DomainPlan, facts: Facts, longest_pass: int) -> list[TimedEncoderBatch]:
    """What each encoder batch takes and keeps, wherever it will be."""
    compute_ns, _ = facts.costs
    timed_batches = []
    for number, batch in enumerate(domain.encoder_batches):
        encode, back = _ops_of(number)
        ranks, learns = batch.ranks[:: batch.tp], batch.component not in facts.frozen
        encode_ns = max(1, most(compute_ns, ranks, encode))
        timed_batches.append(
            TimedEncoderBatch(
                encode=encode,
                back=back,
                microbatches=batch.microbatches,
                encode_ns=encode_ns,
                back_ns=max(1, most(compute_ns, ranks, back)) if learns else 0,
                kept=most(facts.kept, ranks, encode) if learns else 0,
                learns=learns,
                is_long=encode_ns > longest_pass,
            )
        )
    return timed_batches


@lru_cache(maxsize=1 << 14)
def _ops_of(batch: int) -> tuple[Op, Op]:
    """The two ops of an encoder batch."""
    return Op(Kind.ENCODE, batch), Op(Kind.ENCODE_BACKWARD, batch)


def _deal(
    domain: DomainPlan,
    facts: Facts,
    crews: Crews,
    timed_batches: Sequence[TimedEncoderBatch],
    rooms: list[Room],
    makespan: int,
) -> list[TpGroup]:
    """Place every encoder batch in the `rooms` of units, which then hold what it leaves of them, and return
    its ranks: one tp group's go to any, by shares, those that several share stay.
    """
    ranks, bounds = [batch.ranks for batch in domain.encoder_batches], dict(domain.bounds)
    free: dict[str, list[int]] = defaultdict(list)
    for number, (batch, timed_batch) in enumerate(zip(domain.encoder_batches, timed_batches, strict=True)):
        if batch.layout.num_cp_ranks == 1 and batch.component in facts.tp_groups:
            free[batch.component].append(number)
        else:
            timed_batch.units = _units(crews, domain, batch.ranks)
            _take(rooms, timed_batch)
    for component, numbers in free.items():
        numbers.sort(key=lambda number: domain.encoder_batches[number].microbatches)
        own = [timed_batches[number] for number in numbers]
        units = [_units(crews, domain, tp_group) for tp_group in facts.tp_groups[component]]
        several = sorted({unit for of in units for unit in of})
        encode_ns, back_ns = sum(one.encode_ns for one in own), sum(one.back_ns for one in own)
        given = share_out([rooms[unit] for unit in several], makespan, encode_ns, back_ns)
        shares = dict(zip(several, given, strict=True))
        costs = [one.encode_ns + one.back_ns for one in own]
        dealt = deal_out(costs, [min(shares[unit] for unit in of) for of in units])
        if component in bounds:
            sizes, waves = [one.kept for one in own], [one.microbatches[0] for one in own]
            dealt = within(dealt, sizes, waves, len(units), bounds[component])
        for number, tp_group, one in zip(numbers, dealt, own, strict=True):
            ranks[number], one.units = facts.tp_groups[component][tp_group], units[tp_group]
            _take(rooms, one)
    return ranks


def _late(rooms: Sequence[Room], timed_batches: Sequence[TimedEncoderBatch], makespan: int) -> int:
    """How much later than `makespan` the last pass may end for the sake of encoder batches between passes:
    half of the time that some unit needs beyond that, apart from the last backward of an encoder batch, which
    follows anyway.

    Half, found by experiment: a delayed pass leaves other ranks gaps too short for any of their encoder work.
    """
    beyond = max(max(room.work_ns - makespan, -room.idle_ns) for room in rooms)
    last = max((one.back_ns for one in timed_batches if not one.is_long), default=0)
    return max(0, beyond - last) // 2


def _take(rooms: list[Room], timed_batch: TimedEncoderBatch) -> None:
    """Note what an encoder batch takes of the room of its units."""
    for unit in timed_batch.units:
        room = rooms[unit]
        work_ns = room.work_ns + timed_batch.encode_ns + timed_batch.back_ns
        rooms[unit] = Room(work_ns, room.idle_ns - timed_batch.back_ns)


def _units(crews: Crews, domain: DomainPlan, ranks: TpGroup) -> range:
    """The units that ranks belong to."""
    first, last = crews.unit_of[ranks[0] // domain.team], crews.unit_of[ranks[-1] // domain.team]
    return range(first, last + 1)


def _by_unit(
    crews: Crews, placed: Sequence[TimedEncoderBatch]
) -> tuple[list[list[TimedEncoderBatch]], list[TimedEncoderBatch]]:
    """The encoder batches of each unit, and those of several, earlier microbatches first; of a unit's own,
    those that take longer than any pass before the others.
    """
    timed_batches: list[list[TimedEncoderBatch]] = [[] for _ in crews.units]
    barriers = []
    for one in sorted(placed, key=lambda one: (not one.is_long, one.microbatches)):
        if len(one.units) == 1:
            timed_batches[one.units[0]].append(one)
        else:
            barriers.append(one)
    barriers.sort(key=lambda one: one.microbatches)
    return timed_batches, barriers


def joint_over(name: str, passes: Passes, vpp: int | None = 1) -> SchedulePolicy:
    """Return the policy of encoder work around an order of passes, with its bounds."""
    build, in_flight = partial(build_joint, passes), partial(most_in_flight, passes)
    return SchedulePolicy(name, build, in_flight, vpp, encoder_batches=ENCODER_BATCHES)


JOINT = joint_over("joint", one_f_one_b_passes)
JOINT_INTERLEAVED = joint_over("joint_interleaved", interleaved_passes, vpp=None)
JOINT_ZERO_BUBBLE_H1 = joint_over("joint_zero_bubble_h1", zb_h1_passes)
JOINT_ZERO_BUBBLE_H1_5 = replace(joint_over("joint_zero_bubble_h1_5", zb_h1_5_passes), deep=True)
JOINT_ZERO_BUBBLE_H2 = replace(
    joint_over("joint_zero_bubble_h2", zb_h2_passes), deep=True, shallower=JOINT_ZERO_BUBBLE_H1_5
)
