"""Joint: encoder work placed where the LLM's pipeline idles.

The passes of the LLM keep the order of another builder: 1F1B, interleaved, zero bubble. Around them all ranks
encode quanta of about equal cost, of any microbatches, and go back through them: in the warm-up, wherever a
pass must wait, and in the cool-down. Three steps:

1. the passes are timed alone (`alone.py`): what does each rank do, and idle once gradients are back?
2. quanta are dealt to slots in proportion to the shares that follow (`shares.py`);
3. list scheduling puts them between the passes (`filling.py`).
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from pipeline.builders.alone import rooms_of, timed_passes
from pipeline.builders.crews import Crews, crews_of
from pipeline.builders.filling import Boundary, Quantum, fill
from pipeline.builders.interleaved import interleaved_passes
from pipeline.builders.one_f_one_b import one_f_one_b_passes
from pipeline.builders.schedule import Facts, Order, Passes, SchedulePolicy, most_in_flight
from pipeline.builders.shares import Room, deal_out, share_out
from pipeline.builders.zero_bubble import zb_h1_passes
from pipeline.domain_plan import DomainPlan
from pipeline.ops import Kind, Op
from pipeline.policies import Slot
from pipeline.rules.lists import ENCODES

QUANTA = 2  # for each slot and microbatch


def build_joint(passes: Passes, domain: DomainPlan, facts: Facts, lookahead: int | None = None) -> Order:
    """Order the teams of a domain; a chunk of one slot may come to another of its encoder.

    No chunk is encoded more than `lookahead` microbatches ahead of the first part, nor beyond the domain's
    bounds on activations of encoders.
    """
    crews = crews_of(domain, facts.slots)
    boundary = _boundary(domain, facts, crews)
    of_llm = timed_passes(passes, domain, facts, crews, boundary.shipped)
    of_crews, makespan = rooms_of(of_llm, boundary)
    slots = _deal(domain, facts, crews, [of_crews[crew] for crew in crews.crew_of], makespan)
    quanta, barriers = _quanta(domain, facts, crews, slots)
    bounds = dict(domain.bounds)
    room = min((bounds[name] for name in facts.slots if name in bounds), default=None)
    units = fill(crews, of_llm, quanta, barriers, boundary, room, lookahead)
    return [
        [
            op
            for op in units[crews.unit_of[team]]
            if op.kind not in ENCODES or team * domain.team in slots[op.index]
        ]
        for team in domain.teams
    ]


def _boundary(domain: DomainPlan, facts: Facts, crews: Crews) -> Boundary:
    """The way of rows: nothing is shipped for a microbatch without items, so it may enter at once."""
    _, message_ns = facts.costs
    ship_ns = [message_ns(Op(Kind.SHIP, m)) if of else -1 for m, of in enumerate(domain.chunks_of)]
    entered = [
        crew
        for crew, units in enumerate(crews.crews)
        if domain.parts_with_rows(crews.units[units[0]][0] * domain.team)
    ]
    return Boundary(ship_ns, [-1 if ns >= 0 else 0 for ns in ship_ns], tuple(entered))


def _deal(domain: DomainPlan, facts: Facts, crews: Crews, rooms: Sequence[Room], makespan: int) -> list[Slot]:
    """Choose the ranks of every chunk: one slot's go to any, by shares, those that several share stay."""
    ranks = [chunk.ranks for chunk in domain.chunks]
    free: dict[str, list[int]] = defaultdict(list)
    taken = list(rooms)
    for number, chunk in enumerate(domain.chunks):
        if chunk.layout.num_members == 1 and chunk.component in facts.slots:
            free[chunk.component].append(number)
        else:
            _take(taken, _units(crews, domain, chunk.ranks), _times(domain, facts, number))
    for component, numbers in free.items():
        numbers.sort(key=lambda number: domain.chunks[number].microbatches)
        times = [_times(domain, facts, number) for number in numbers]
        units = [_units(crews, domain, slot) for slot in facts.slots[component]]
        own = sorted({unit for of in units for unit in of})
        encode_ns, back_ns = (sum(of) for of in zip(*times, strict=True))
        given = share_out([taken[unit] for unit in own], makespan, encode_ns, back_ns)
        shares = dict(zip(own, given, strict=True))
        dealt = deal_out(list(map(sum, times)), [min(shares[unit] for unit in of) for of in units])
        for number, slot, of in zip(numbers, dealt, times, strict=True):
            ranks[number] = facts.slots[component][slot]
            _take(taken, units[slot], of)
    return ranks


def _take(rooms: list[Room], units: range, times: tuple[int, int]) -> None:
    """Note what a chunk takes of the room of units."""
    for unit in units:
        room = rooms[unit]
        rooms[unit] = Room(room.work_ns + sum(times), room.idle_ns - times[1])


def _units(crews: Crews, domain: DomainPlan, ranks: Slot) -> range:
    """The units that ranks belong to."""
    first, last = (crews.unit_of[rank // domain.team] for rank in (ranks[0], ranks[-1]))
    return range(first, last + 1)


def _times(domain: DomainPlan, facts: Facts, number: int) -> tuple[int, int]:
    """What encoding a chunk takes its slowest slot, and its backward, none for a frozen encoder."""
    chunk, (compute_ns, _) = domain.chunks[number], facts.costs
    ranks = chunk.ranks[:: chunk.tp]
    encode = max(compute_ns(rank, Op(Kind.ENCODE, number)) for rank in ranks)
    if chunk.component in facts.frozen:
        return encode, 0
    return encode, max(compute_ns(rank, Op(Kind.ENCODE_BACKWARD, number)) for rank in ranks)


def _quanta(
    domain: DomainPlan, facts: Facts, crews: Crews, slots: Sequence[Slot]
) -> tuple[list[list[Quantum]], list[Quantum]]:
    """The quanta of each unit, and those of several, earlier microbatches first."""
    quanta: list[list[Quantum]] = [[] for _ in crews.units]
    barriers = []
    for number, chunk in sorted(enumerate(domain.chunks), key=lambda entry: entry[1].microbatches):
        learns = chunk.component not in facts.frozen
        encode_ns, back_ns = _times(domain, facts, number)
        kept = max(facts.kept(rank, Op(Kind.ENCODE, number)) for rank in chunk.ranks[:: chunk.tp])
        one = Quantum(
            chunk=number,
            units=_units(crews, domain, slots[number]),
            microbatches=chunk.microbatches,
            encode_ns=max(1, encode_ns),
            back_ns=max(1, back_ns),
            kept=kept if learns else 0,
            learns=learns,
        )
        if len(one.units) == 1:
            quanta[one.units[0]].append(one)
        else:
            barriers.append(one)
    return quanta, barriers


def joint_over(name: str, passes: Passes, parts: int | None = 1) -> SchedulePolicy:
    """Return the policy of encoder work around an order of passes, with its bounds."""
    return SchedulePolicy(
        name, partial(build_joint, passes), partial(most_in_flight, passes), parts, quanta=QUANTA
    )


JOINT = joint_over("joint", one_f_one_b_passes)
JOINT_INTERLEAVED = joint_over("joint_interleaved", interleaved_passes, parts=None)
JOINT_ZERO_BUBBLE_H1 = joint_over("joint_zero_bubble_h1", zb_h1_passes)
