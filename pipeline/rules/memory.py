"""R6: activations that a position holds stay under the bound of their part."""

from collections import defaultdict
from collections.abc import Callable, Iterator

from parallel.work import Grad, part_name
from pipeline.ops import BACKWARDS, Kind, Op
from pipeline.plan import StepPlan
from pipeline.rules.lists import ENCODES, who

Kept = Callable[[int, Op], int]
"""Bytes that a FORWARD or ENCODE at a position keeps until the last of its backward has run."""


def in_flight(plan: StepPlan, kept: Kept) -> Iterator[str]:
    """Activations live from a forward to the last half of its backward."""
    domain, llm = plan.domain, plan.components[plan.domain.llm]
    bounds = dict(domain.bounds)
    names = [part_name(llm, part) for part in range(domain.num_parts)]
    for team, ops in enumerate(domain.ops):
        rank = team * domain.team
        live: dict[str, int] = defaultdict(int)
        if not any(op.kind in BACKWARDS for op in ops):
            continue  # forward only: activations die at once
        split = {(op.kind, op.index, op.part) for op in ops if op.grad is Grad.WEIGHT}
        held: dict[tuple[str, int], int] = {}
        for op in ops:
            if op.kind in ENCODES:
                part = domain.chunks[op.index].component
            elif op.kind in (Kind.FORWARD, Kind.BACKWARD):
                part = names[op.part]
            else:
                continue
            if part not in bounds:
                continue
            if op.kind in (Kind.FORWARD, Kind.ENCODE):
                held[part, op.index] = kept(rank, op)
                live[part] += held[part, op.index]
                if live[part] > bounds[part]:
                    yield (
                        f"R6: {who(domain, team)} holds {live[part]} bytes of activations of {part} at "
                        f"{op}, more than its bound of {bounds[part]}"
                    )
                    break
            elif op.grad is not Grad.INPUT or (op.kind, op.index, op.part) not in split:
                live[part] -= held.pop((part, op.index), 0)
