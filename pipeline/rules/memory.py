"""R6: activations that a domain rank holds stay under the bound of their part."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from parallel.work import Grad, virtual_stage_name
from pipeline.ops import BACKWARDS, Kind, Op
from pipeline.plan import StepPlan
from pipeline.rules.lists import ENCODES, who

Kept = Callable[[int, Op], int]
"""Bytes that a FORWARD or ENCODE at a domain rank keeps until the last of its backward has run."""


class PartPeak(NamedTuple):
    """The most bytes of activations of a `part` that the ranks of a team hold, `at` one of their ops."""

    team: int
    part: str
    bytes: int
    at: Op


def in_flight(plan: StepPlan, kept: Kept) -> Iterator[str]:
    """Activations live from a forward to the last half of its backward."""
    bounds = dict(plan.domain.bounds)
    for team, part, size, op in peaks(plan, kept):
        if size > bounds[part]:
            yield (
                f"R6: {who(plan.domain, team)} holds {size} bytes of activations of {part} at {op}, more "
                f"than its bound of {bounds[part]}"
            )


def peaks(plan: StepPlan, kept: Kept) -> Iterator[PartPeak]:
    """Yield for each team the most that it holds of each part whose activations are bounded."""
    domain, llm = plan.domain, plan.components[plan.domain.llm]
    names = [virtual_stage_name(llm, number) for number in range(domain.num_virtual_stages)]
    bounded = {name for name, _ in domain.bounds}
    for team, ops in enumerate(domain.ops):
        if not any(op.kind in BACKWARDS for op in ops):
            continue  # forward only: activations die at once
        rank = team * domain.team
        live: dict[str, int] = defaultdict(int)
        found: dict[str, PartPeak] = {}
        split = {(op.kind, op.index, op.virtual_stage) for op in ops if op.grad is Grad.WEIGHT}
        held: dict[tuple[str, int], int] = {}
        for op in ops:
            if op.kind in ENCODES:
                part = domain.encoder_batches[op.index].component
            elif op.kind in (Kind.FORWARD, Kind.BACKWARD):
                part = names[op.virtual_stage]
            else:
                continue
            if part not in bounded:
                continue
            if op.kind in (Kind.FORWARD, Kind.ENCODE):
                held[part, op.index] = kept(rank, op)
                live[part] += held[part, op.index]
                if part not in found or live[part] > found[part].bytes:
                    found[part] = PartPeak(team, part, live[part], op)
            elif op.grad is not Grad.INPUT or (op.kind, op.index, op.virtual_stage) not in split:
                live[part] -= held.pop((part, op.index), 0)
        yield from found.values()
