"""1F1B with encoder work just in time: on ranks of the LLM (`one_f_one_b`), and on ranks beside it
(`disaggregated`).

1F1B holds the activations of as many microbatches at the first stage as there are stages, so gradients of a
microbatch return after that many forwards. Ranks beside the LLM encode that many before they go back through
the first, and `AHEAD` encoder batches more each: what they hold is bounded, however long the step. As long as
they make rows at least as fast as a stage consumes them, the first stage never waits for rows but the first
(tests/pipeline/test_builders.py): for each microbatch that it runs forward and back, they do so too. Any
number of such ranks serve any number of replicas, since a microbatch is one for the whole domain.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

from pipeline.builders.passes import one_f_one_b_passes
from pipeline.builders.schedule import Facts, Order, SchedulePolicy, TeamEncoderBatch, encoder_batches_by_team
from pipeline.domain_plan import DomainPlan
from pipeline.ops import Kind, Op

AHEAD = 2
"""Encoder batches of a rank: one whose rows are under way, and one that it encodes."""


Slots = Callable[[int, Sequence[TeamEncoderBatch]], Sequence[tuple[int, int]]]
"""For each encoder batch of a team of a stage: the forward before which it is encoded, and the backward after
which its own follows.
"""


def build_one_f_one_b(domain: DomainPlan, facts: Facts) -> Order:
    """1F1B with encoder work where the first stage needs it: just in time, at most a few microbatches ahead.

    Stage s runs s forwards behind the first stage, so it encodes microbatch m + s before its own forward of
    m, and finds the gradients of m - s ready after its own backward of m. Encoding its own microbatch would
    be too late: the first stage would wait for rows that a later stage encodes only after that stage itself
    waited for the first one. Ranks of several stages that encode together go back together, when the latest
    of these stages would: each at its own time would wait for the others in a circle.
    """
    return in_slots(domain, lambda stage, mine: [just_in_time(domain, stage, batch) for batch in mine])


def just_in_time(domain: DomainPlan, stage: int, batch: TeamEncoderBatch) -> tuple[int, int]:
    """Return the slots of an encoder batch: the latest forward and the first backward that hold up nobody."""
    number, first, last = batch
    latest = domain.stage(domain.encoder_batches[number].ranks[-1])
    assert latest is not None, "an encoder batch is on ranks of the LLM, or beside it"
    return max(0, first - stage), min(len(domain.microbatches) - 1, last + latest)


def in_slots(domain: DomainPlan, slots: Slots) -> Order:
    """1F1B with the encoder batches of each team in slots between its passes; beside the LLM all are encoded
    first.
    """
    order = []
    stages = domain.num_stages
    for team, mine in enumerate(encoder_batches_by_team(domain)):
        stage = domain.stage(team * domain.team)
        if stage is None:
            beside = (Kind.ENCODE, Kind.ENCODE_BACKWARD)
            order.append([Op(kind, c) for kind in beside for c, *_ in mine])
            continue
        before, after = defaultdict[int, list[Op]](list), defaultdict[int, list[Op]](list)
        for (batch, *_), (forward, backward) in zip(mine, slots(stage, mine), strict=True):
            before[forward].append(Op(Kind.ENCODE, batch))
            after[backward].append(Op(Kind.ENCODE_BACKWARD, batch))
        ops: list[Op] = []
        vpp = domain.num_virtual_stages // stages
        passes = one_f_one_b_passes(stages, vpp, len(domain.microbatches), stage)
        for op in passes:
            forward = op.kind is Kind.FORWARD
            ops += [*before[op.index], op] if forward else [op, *after[op.index]]
        order.append(ops)
    return order


ONE_F_ONE_B = SchedulePolicy("one_f_one_b", build_one_f_one_b)


def build_disaggregated(domain: DomainPlan, facts: Facts) -> Order:
    """1F1B, with encoder work beside it in the order of microbatches.

    Encoders on ranks of the LLM work as under `one_f_one_b`. All ranks beside it run ahead by one number of
    microbatches, so that those which share encoder batches meet them in one order: if they take turns, each
    has an encoder batch of every so many microbatches only.
    """
    order = build_one_f_one_b(domain, facts)
    beside = {
        team: mine
        for team, mine in enumerate(encoder_batches_by_team(domain))
        if domain.stage(team * domain.team) is None
    }
    encoder_batches = max(map(len, beside.values()), default=0)
    if encoder_batches:
        turn = -(-len(domain.microbatches) // encoder_batches)
        for team, mine in beside.items():
            order[team] = _around(mine, domain.num_stages + AHEAD * turn)
    return order


def _around(encoder_batches: Sequence[TeamEncoderBatch], most: int) -> list[Op]:
    """Order the encoder batches of a team, (number, first microbatch, last one): going back through an
    encoder batch follows those that begin less than `most` microbatches after it ends.
    """
    timed = [(2 * first, Op(Kind.ENCODE, c)) for c, first, _ in encoder_batches]
    timed += [(2 * (last + most) - 1, Op(Kind.ENCODE_BACKWARD, c)) for c, _, last in encoder_batches]
    return [op for _, op in sorted(timed, key=lambda entry: entry[0])]


DISAGGREGATED = SchedulePolicy("disaggregated", build_disaggregated)
