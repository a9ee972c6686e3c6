"""What every op of a domain takes, from its plan and a cost table: what schedules are simulated with.

Compute includes the collectives inside layers; a shipment takes the time that its transport was chosen by.
All times are integer nanoseconds.
"""

from functools import cache

from parallel.costs import CostTable
from parallel.work import Grad
from pipeline.plan import COLLECTIVE, DomainPlan, Kind, Op
from pipeline.simulator import ComputeCost, MessageCost, Timeline, run


def plan_costs(domain: DomainPlan, table: CostTable) -> tuple[ComputeCost, MessageCost]:
    """Return the costs of a planned domain under a cost table: of compute and reduction, and of messages."""

    def compute(rank: int, op: Op) -> int:
        if op.kind is Kind.REDUCE:
            return reduce_ns(domain, table, rank, op)
        if op.kind in (Kind.FORWARD, Kind.BACKWARD):
            return pass_ns(domain, table, rank, op)
        return chunk_ns(domain, table, rank, op)

    def message(op: Op) -> int:
        return ship_ns(domain, table, op) if op.kind in COLLECTIVE else hand_on_ns(domain, table, op)

    return cache(compute), cache(message)


def pass_ns(domain: DomainPlan, table: CostTable, rank: int, op: Op) -> int:
    """Time of a forward or backward of a microbatch through the part of the LLM at a position."""
    cost = table.parts[f"llm/{domain.stage(rank)}"]
    work = domain.microbatches[op.index].work(domain.member(rank))
    return cost.forward_ns(*work) if op.kind is Kind.FORWARD else cost.backward_ns(*work, grad=grad_of(op))


def chunk_ns(domain: DomainPlan, table: CostTable, rank: int, op: Op) -> int:
    """Time of encoding a chunk on the slot of a position, or of its backward."""
    chunk = domain.chunks[op.index]
    cost, work = table.parts[chunk.component], chunk.work(rank)
    return cost.forward_ns(*work) if op.kind is Kind.ENCODE else cost.backward_ns(*work, grad=grad_of(op))


def grad_of(op: Op) -> Grad:
    """Which gradients a backward makes."""
    return Grad.BOTH


def reduce_ns(domain: DomainPlan, table: CostTable, rank: int, op: Op) -> int:
    """Time of reducing the gradients of a component at a position, and of gathering its weights."""
    name = table.components[op.index]
    return table.parts[name if name in table.parts else f"{name}/{domain.stage(rank)}"].reduce_ns


def ship_ns(domain: DomainPlan, table: CostTable, op: Op) -> int:
    """Time of the rows of a microbatch over the transport of their route, to the LLM or back."""
    route = domain.routes[op.index]
    return route.ns if route else 0


def hand_on_ns(domain: DomainPlan, table: CostTable, op: Op) -> int:
    """Time of a microbatch's activations from one part of the LLM to the next, or of their gradients back."""
    layout = domain.microbatches[op.index].layout
    most = max(layout.padded_tokens(member, domain.tp) for member in range(domain.pool))
    return table.message_ns(most // domain.tp)


def simulate(domain: DomainPlan, table: CostTable, single_fifo: bool = False) -> Timeline:
    """Time a planned domain with a cost table. The result is simulated, not measured."""
    return run(domain, *plan_costs(domain, table), single_fifo=single_fifo)
