"""Schedules of what ours do not order: several virtual stages of the LLM on a rank, split backward passes,
reductions before the end of the step.

Each is made by ordering passes of the LLM, and by functions that turn an order into another. All ranks encode
before the pipeline starts.
"""

from dataclasses import replace
from functools import partial

from parallel.work import Grad
from pipeline.builders import Facts, Order, SchedulePolicy, encoder_batches_by_team
from pipeline.builders.passes import interleaved_passes, most_in_flight
from pipeline.domain_plan import DomainPlan
from pipeline.ops import BACKWARDS, Kind, Op

DELAY = 3  # ops between the gradients of inputs and those of weights


def split(ops: list[Op], delay: int = DELAY) -> list[Op]:
    """Put the gradients of weights off by `delay` ops, at most to the end of the list."""
    out: list[Op] = []
    due: list[tuple[int, Op]] = []
    for at, op in enumerate(ops):
        while due and due[0][0] <= at:
            out.append(due.pop(0)[1])
        if op.kind in BACKWARDS:
            out.append(replace(op, grad=Grad.INPUT))
            due.append((at + delay, replace(op, grad=Grad.WEIGHT)))
        else:
            out.append(op)
    return out + [op for _, op in due]


def by_hand(vpp: int = 1, splits: bool = False) -> SchedulePolicy:
    """All encoder forwards, interleaved 1F1B over `vpp` virtual stages a rank, all encoder backwards; with
    `splits` every backward in two halves.
    """

    def decide(domain: DomainPlan, facts: Facts) -> Order:
        order: Order = []
        for team, mine in enumerate(encoder_batches_by_team(domain)):
            stage, count = domain.stage(team * domain.team), len(domain.microbatches)
            ops = [Op(Kind.ENCODE, c) for c, *_ in mine]
            ops += [] if stage is None else interleaved_passes(domain.num_stages, vpp, count, stage)
            ops += [Op(Kind.ENCODE_BACKWARD, c) for c, *_ in mine]
            order.append(split(ops) if splits else ops)
        return order

    def passes(stages: int, vpp: int, microbatches: int, stage: int) -> list[Op]:
        ops = interleaved_passes(stages, vpp, microbatches, stage)
        return split(ops) if splits else ops

    name = "_".join(("by_hand", str(vpp), *["split"] * splits))
    return SchedulePolicy(name, decide, in_flight=partial(most_in_flight, passes), vpp=vpp)


SPLIT = by_hand(splits=True)
INTERLEAVED = by_hand(vpp=2)
BOTH = by_hand(vpp=2, splits=True)
POLICIES = {"SPLIT": SPLIT, "INTERLEAVED": INTERLEAVED, "BOTH": BOTH}
