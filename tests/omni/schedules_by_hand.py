"""Schedules of what ours do not order: several parts of the LLM on a rank, split backward passes, reductions
before the end of the step.

Each is made by ordering passes of the LLM, and by functions that turn an order into another. All ranks encode
before the pipeline starts.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from parallel.work import Grad
from pipeline.builders import Order, SchedulePolicy, chunks_by_team
from pipeline.costs import Costs
from pipeline.domain_plan import DomainPlan
from pipeline.ops import BACKWARDS, Kind, Op

DELAY = 3  # ops between the gradients of inputs and those of weights
LONG = 64  # microbatches after which a schedule has shown how many it has in flight


def interleaved_passes(stages: int, parts: int, microbatches: int, stage: int) -> list[Op]:
    """1F1B over `parts` parts a stage: microbatches in groups of `stages`, each through part after part.

    After Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, section 2.2.
    A last group that is not full is ordered as if it were, for who uses it to leave out what it lacks.
    """
    groups = range(0, microbatches, stages)
    own = [stage + i * stages for i in range(parts)]
    forward, backward = (
        [Op(kind, m, part=p) for first in groups for p in order for m in range(first, first + stages)]
        for kind, order in ((Kind.FORWARD, own), (Kind.BACKWARD, own[::-1]))
    )
    ahead = min((stages - stage - 1) * (2 if parts > 1 else 1) + (parts - 1) * stages, len(forward))
    ops = forward[:ahead]
    for f, b in zip(forward[ahead:], backward, strict=False):
        ops += [f, b]
    return ops + backward[len(forward) - ahead :]


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


def reduced_early(order: Order, domain: DomainPlan) -> Order:
    """Reduce as soon as gradients are complete, and the plan's order of reductions lets it. One encoder."""
    for reduction in domain.reductions:
        op = Op(Kind.REDUCE, reduction[0], part=reduction[1])
        for team in domain.reducing(op):
            ops = order[team]
            last = max((at for at, other in enumerate(ops) if _before(other, op, domain)), default=-1)
            ops.insert(last + 1, op)
    return order


def _before(op: Op, reduction: Op, domain: DomainPlan) -> bool:
    """Whether an op makes gradients that a reduction sums, or is a reduction that comes first."""
    if op.kind is Kind.REDUCE:
        return True
    if reduction.index != domain.llm:
        return op.kind is Kind.ENCODE_BACKWARD
    tied = {domain.num_parts - 1} if reduction.part == 0 else set()
    return op.kind is Kind.BACKWARD and op.part in {reduction.part} | tied


def by_hand(parts: int = 1, splits: bool = False, early: bool = False) -> SchedulePolicy:
    """All encoder forwards, interleaved 1F1B over `parts` parts a rank, all encoder backwards; with `splits`
    every backward in two halves, with `early` reductions as soon as possible.
    """

    def decide(domain: DomainPlan, costs: Costs) -> Order:
        order: Order = []
        for team, mine in enumerate(chunks_by_team(domain)):
            stage, count = domain.stage(team * domain.team), len(domain.microbatches)
            ops = [Op(Kind.ENCODE, c) for c, *_ in mine]
            ops += [] if stage is None else interleaved_passes(domain.num_stages, parts, count, stage)
            ops += [Op(Kind.ENCODE_BACKWARD, c) for c, *_ in mine]
            ops = split(ops) if splits else ops
            passes = (Kind.FORWARD, Kind.BACKWARD)
            order.append([op for op in ops if op.kind not in passes or op.index < count])
        return reduced_early(order, domain) if early else order

    most = most_in_flight(parts, splits)
    name = "_".join(("by_hand", str(parts), *["split"] * splits, *["early"] * early))
    return SchedulePolicy(
        name, decide, in_flight=lambda domain, part: most(domain.num_parts, part), parts=parts
    )


def most_in_flight(parts: int, splits: bool) -> Callable[[int, int], int]:
    """The microbatches in flight at most, of so many parts in part so-and-so, counted in the order itself."""

    @cache
    def most(num_parts: int, part: int) -> int:
        stages = num_parts // parts
        ops = interleaved_passes(stages, parts, LONG, part % stages)
        return in_flight(split(ops) if splits else ops)[part]

    return most


def in_flight(ops: list[Op]) -> Counter[int]:
    """Count the microbatches that each part holds at most, from a forward to the last half of a backward."""
    live: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for op in ops:
        if op.kind is Kind.FORWARD:
            live[op.part] += 1
            most[op.part] = max(most[op.part], live[op.part])
        elif op.kind is Kind.BACKWARD and op.makes_weight:
            live[op.part] -= 1
    return most


SPLIT = by_hand(splits=True)
INTERLEAVED = by_hand(parts=2)
BOTH = by_hand(parts=2, splits=True)
EARLY = by_hand(parts=2, splits=True, early=True)
POLICIES = {"SPLIT": SPLIT, "INTERLEAVED": INTERLEAVED, "BOTH": BOTH, "EARLY": EARLY}
