"""What the ops of a planned domain cost, under a cost table."""

from functools import cache

from parallel.costs import CostTable
from pipeline.plan import COLLECTIVE, DomainPlan, Grad, Kind, Op
from pipeline.simulator import ComputeCost, MessageCost, Timeline, run
from pipeline.verifier import Kept

Costs = tuple[ComputeCost, MessageCost]
"""Nanoseconds of a compute op at a position, and of what an op issues."""


def plan_costs(domain: DomainPlan, table: CostTable) -> Costs:
    """Return the costs of a planned domain under a cost table."""

    def compute(rank: int, op: Op) -> int:
        if op.kind is Kind.REDUCE:
            return 0
        if op.kind in (Kind.FORWARD, Kind.BACKWARD):
            cost = table.parts[f"llm/{op.part}"]
            work = domain.microbatches[op.index].work(domain.member(rank))
        else:
            chunk = domain.chunks[op.index]
            cost = table.parts[chunk.component]
            work = chunk.work(rank)
        if op.kind in (Kind.FORWARD, Kind.ENCODE):
            return cost.forward_ns(*work)
        # Weights take as many products as a forward pass has, and no attention: the rest is inputs.
        weights = cost.marginal_ns(work[0], 0)
        whole = cost.backward_ns(*work)
        return {Grad.BOTH: whole, Grad.INPUT: whole - weights, Grad.WEIGHT: weights}[op.grad]

    def message(op: Op) -> int:
        if op.kind in COLLECTIVE:
            route = domain.routes[op.index]
            return table.message_ns(route.moved_rows() if route else 0)
        layout = domain.microbatches[op.index].layout
        most = max(layout.padded_tokens(member, domain.tp) for member in range(domain.pool))
        return table.message_ns(most // domain.tp)

    return cache(compute), cache(message)


def plan_memory(domain: DomainPlan, table: CostTable) -> Kept:
    """Return the bytes that each forward of a planned domain keeps for its backward."""

    def kept(rank: int, op: Op) -> int:
        return 1

    return kept


def simulate(domain: DomainPlan, table: CostTable, single_fifo: bool = False) -> Timeline:
    """Time a planned domain with a cost table. The result is simulated, not measured."""
    return run(domain, *plan_costs(domain, table), single_fifo=single_fifo)
