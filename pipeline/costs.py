"""What every op of a domain takes, from its plan and a cost table: schedules are made and simulated with it.

Compute includes the collectives inside layers; a shipment takes the time that its transport was chosen by.
All times are integer nanoseconds.
"""

from functools import cache

from parallel.costs import CostTable, WorkCost
from parallel.work import Load, even_load
from pipeline.plan import COLLECTIVE, DomainPlan, Kind, Op
from pipeline.simulator import ComputeCost, MessageCost, Timeline, run
from pipeline.verifier import Kept

Costs = tuple[ComputeCost, MessageCost]
"""Nanoseconds of a compute op at a position, and of what an op issues."""


def plan_costs(domain: DomainPlan, table: CostTable) -> Costs:
    """Return the costs of a planned domain under a cost table: of compute and reduction, and of messages."""

    def compute(rank: int, op: Op) -> int:
        if op.kind is Kind.REDUCE:
            return reduce_ns(domain, table, op)
        if op.kind in (Kind.FORWARD, Kind.BACKWARD):
            return pass_ns(domain, table, rank, op)
        return chunk_ns(domain, table, rank, op)

    def message(op: Op) -> int:
        return ship_ns(domain, op) if op.kind in COLLECTIVE else hand_on_ns(domain, table, op)

    return cache(compute), cache(message)


def pass_ns(domain: DomainPlan, table: CostTable, rank: int, op: Op) -> int:
    """Time of a forward or backward of a microbatch through a part of the LLM at a position."""
    cost = table.parts[f"llm/{op.part}"]
    work = domain.microbatches[op.index].work(domain.member(rank))
    return cost.forward_ns(*work) if op.kind is Kind.FORWARD else cost.backward_ns(*work, grad=op.grad)


def chunk_ns(domain: DomainPlan, table: CostTable, rank: int, op: Op) -> int:
    """Time of encoding a chunk on the slot of a position, or of its backward."""
    chunk = domain.chunks[op.index]
    cost, work = table.parts[chunk.component], chunk.work(rank)
    return cost.forward_ns(*work) if op.kind is Kind.ENCODE else cost.backward_ns(*work, grad=op.grad)


def reduce_ns(domain: DomainPlan, table: CostTable, op: Op) -> int:
    """Time of reducing the gradients of a part of a component, and of gathering its weights."""
    if op.index == domain.llm:
        return table.parts[f"llm/{op.part}"].reduce_ns
    return table.parts[table.components[op.index]].reduce_ns if table.components else 0


def ship_ns(domain: DomainPlan, op: Op) -> int:
    """Time of the rows of a microbatch over the transport of their route, to the LLM or back."""
    route = domain.routes[op.index]
    return route.ns if route else 0


def hand_on_ns(domain: DomainPlan, table: CostTable, op: Op) -> int:
    """Time of a microbatch's activations from one part of the LLM to the next, or of their gradients back."""
    layout = domain.microbatches[op.index].layout
    most = max(layout.padded_tokens(member, domain.tp) for member in range(domain.pool))
    return table.message_ns(most // domain.tp)


def plan_memory(domain: DomainPlan, table: CostTable) -> Kept:
    """Return the bytes that each forward of a planned domain keeps for its backward.

    A bound, and fast: every token counts as a target, and attention as if nothing were shared.
    """

    def kept(rank: int, op: Op) -> int:
        cost, load = forward_of(domain, table, rank, op)
        return cost.kept_bytes(load)

    return cache(kept)


def forward_of(domain: DomainPlan, table: CostTable, rank: int, op: Op) -> tuple[WorkCost, Load]:
    """Return the costs of the part that a FORWARD or ENCODE runs at a position, and about its load."""
    if op.kind is Kind.ENCODE:
        chunk = domain.chunks[op.index]
        tokens, squares, _ = chunk.work(rank)
        return table.parts[chunk.component], even_load(tokens, squares, rows=chunk.rows_of(rank))
    layout, member = domain.microbatches[op.index].layout, domain.member(rank)
    tokens = layout.padded_tokens(member, domain.tp)
    return table.parts[f"llm/{op.part}"], even_load(tokens, targets=tokens)


def simulate(domain: DomainPlan, table: CostTable, single_fifo: bool = False) -> Timeline:
    """Time a planned domain with a cost table. The result is simulated, not measured."""
    return run(domain, *plan_costs(domain, table), single_fifo=single_fifo)
