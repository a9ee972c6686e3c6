"""Encoder work inserted evenly, on demand: before each forward of 1F1B an equal encoder batch
(`joint_uniform`).

This is how we read the joint pipeline of MegaScale-Omni (arXiv 2605.08962), of which the abstract says that
it withstands changing workloads. If every forward brought the work of its own microbatch, whose items differ,
stages would wait for each other by that difference. So encoder work stands in one row, in the order of
microbatches, and a slot takes the next part of the row, whatever microbatch that is for. Two stages,
four microbatches, each with one encoder batch (`w` to `z`) for either stage:

    stage 0   w 0 x 1 a W y 2 b X z 3 c Y d Z
    stage 1   w x 0 a y 1 b W z 2 c X 3 d Y Z        (digits are forwards, letters their backwards)

Stage s runs s forwards behind the first, so it is s encoder batches ahead. With S stages, M microbatches, a
forward of f, a backward of b and encoders that take e on all stages together, both ways, a step takes at most
(M + S - 1) (f + b + e/(M S)). `joint` puts encoder batches where the pipeline idles and takes less; here no
pass is timed, and slots stay alike however much encoders have to do.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeline.builders.joint.shares import deal_out
from pipeline.builders.just_in_time import in_slots, just_in_time
from pipeline.builders.schedule import Facts, Order, SchedulePolicy, TeamEncoderBatch
from pipeline.domain_plan import DomainPlan, EncoderBatch
from pipeline.ops import Kind, Op
from pipeline.policies import TpGroup

LONG = 2  # times the mean encoder batch


def build_joint_uniform(domain: DomainPlan, facts: Facts) -> Order:
    """Order the teams of a domain; an encoder batch of one tp group may come to another of its encoder.

    An encoder batch is encoded in the slot in which its middle lies in the row of its team, or in the one in
    which the first stage needs it, if that is earlier; it goes back in the slot in which its middle lies
    among backwards, or once its gradients are there, if that is later. What fits no slot comes before the
    passes and goes back after them: encoder batches of more than `LONG` times the mean, and those that
    several teams encode together and would all wait for. Encoder batches of an encoder whose activations are
    bounded are just in time.
    """
    compute_ns, _ = facts.costs
    encode_ns, back_ns = (
        [compute_ns(batch.ranks[0], Op(kind, number)) for number, batch in enumerate(domain.encoder_batches)]
        for kind in (Kind.ENCODE, Kind.ENCODE_BACKWARD)
    )
    last, bounded = len(domain.microbatches) - 1, {name for name, _ in domain.bounds}
    costs = [a + b for a, b in zip(encode_ns, back_ns, strict=True)]
    dealt = replace(domain, encoder_batches=_dealt(domain, facts.tp_groups, costs))

    def slots(stage: int, mine: Sequence[TeamEncoderBatch]) -> list[tuple[int, int]]:
        encoder_batches = [dealt.encoder_batches[batch.number] for batch in mine]
        mean_ns = sum(encode_ns[batch.number] for batch in mine) // max(1, last + 1)
        even = [
            at
            for at, batch in enumerate(encoder_batches)
            if batch.component not in bounded
            and batch.ranks[0] // domain.team == batch.ranks[-1] // domain.team
            and encode_ns[mine[at].number] <= LONG * mean_ns
        ]
        encoded, back = (
            _middles([of[mine[at].number] for at in even], last + 1) for of in (encode_ns, back_ns)
        )
        found = [(0, last)] * len(mine)
        for at, batch in enumerate(encoder_batches):
            if batch.component in bounded:
                found[at] = just_in_time(dealt, stage, mine[at])
        for at, forward, backward in zip(even, encoded, back, strict=True):
            soonest, latest = just_in_time(dealt, stage, mine[at])
            found[at] = min(soonest, max(0, forward - stage)), max(latest, min(last, backward + stage))
        return found

    return in_slots(dealt, slots)


def _middles(costs: Sequence[int], count: int) -> list[int]:
    """In which of `count` even slots of a row of `costs` the middle of each lies."""
    total, before, found = max(1, sum(costs)), 0, []
    for cost in costs:
        found.append(min(count - 1, (2 * before + cost) * count // (2 * total)))
        before += cost
    return found


def _dealt(
    domain: DomainPlan, tp_groups: Mapping[str, Sequence[TpGroup]], costs: Sequence[int]
) -> tuple[EncoderBatch, ...]:
    """The encoder batches of a domain, those of one tp group dealt to the tp groups of their encoder, as even
    as they go.
    """
    free: dict[str, list[int]] = defaultdict(list)
    for number, batch in enumerate(domain.encoder_batches):
        if batch.layout.num_cp_ranks == 1 and batch.component in tp_groups:
            free[batch.component].append(number)
    encoder_batches = list(domain.encoder_batches)
    for component, numbers in free.items():
        numbers.sort(key=lambda number: encoder_batches[number].microbatches)
        places = tp_groups[component]
        for number, at in zip(numbers, deal_out([costs[n] for n in numbers], [1] * len(places)), strict=True):
            encoder_batches[number] = replace(encoder_batches[number], ranks=tuple(places[at]))
    return tuple(encoder_batches)


JOINT_UNIFORM = SchedulePolicy("joint_uniform", build_joint_uniform, encoder_batches=1, uniform=True)
