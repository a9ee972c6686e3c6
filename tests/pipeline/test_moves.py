"""The time of lists in one queue, against the abstract machine that runs them op by op."""

from dataclasses import replace
from random import Random

import pytest
from domain_plans import BUILDERS
from random_domains import random_domain

from pipeline.builders.one_queue.moves import (
    COMPUTE,
    REDUCE,
    Moves,
    moves_of,
    queue_ns,
    reduced_amid,
    reduced_early,
)
from pipeline.builders.one_queue.rendezvous import meet
from pipeline.builders.one_queue.serial import in_orders, ordered, run_freely
from pipeline.costs import Costs
from pipeline.domain_plan import DomainPlan
from pipeline.ops import Kind, Op
from pipeline.reductions import follows_llm, runs_alone
from pipeline.simulator import ComputeCost, StuckError, nothing, run


def costly(costs: Costs) -> Costs:
    """Costs of which none is nothing."""
    compute_ns, message_ns = costs
    return lambda rank, op: compute_ns(rank, op) + 1, lambda op: message_ns(op) + 1


def begun_before(lists: DomainPlan, domain: DomainPlan, ns: int) -> ComputeCost:
    """A reduction begins so long before its place where it follows a backward at once, as in the lists that
    `domain` had before they were put into an order; twice as long if it is another one and follows, behind
    reductions alone, the backward of an encoder that a team runs alone.
    """

    def before(rank: int, op: Op) -> int:
        team = rank // lists.team
        if op.kind is not Kind.REDUCE:
            return 2 * ns * runs_alone(lists, op, team)
        ops, own = lists.ops_of(rank), domain.ops_of(rank)
        fronts = (other for other in reversed(ops[: ops.index(op)]) if other.kind is not Kind.REDUCE)
        front = next(fronts, op)
        if own[own.index(op) - 1] == front:
            return ns * (front.kind is Kind.ENCODE_BACKWARD or follows_llm(lists, front, op))
        return 2 * ns * runs_alone(lists, front, team)

    return before


def delays_nothing(moves: Moves, order: list[int]) -> bool:
    """Whether no compute stands in the queue behind reductions that keep the pace of others."""
    paced = [
        number for number, at in enumerate(order) if moves.kinds[at] == REDUCE and order[number - 1] != at - 1
    ]
    behind = order[paced[0] :] if paced else []
    return all(moves.transfers[at] is None for at in behind if moves.kinds[at] == COMPUTE)


@pytest.mark.parametrize("schedule", BUILDERS)
def test_lists_take_in_one_queue_what_the_abstract_machine_says(schedule: str) -> None:
    """Whether ranks compute alone or together, whatever issuing takes them, and if reductions go on behind
    backwards.
    """
    for number in range(12):
        random = Random(f"{schedule}/{number}")
        plan, costs = random_domain(random, BUILDERS[schedule])
        costs = costly(costs)
        domain, issue_ns = plan.domain, random.choice((0, 0, 3))
        timeline = run_freely(domain, *costs)
        begun = random.choice((0, 7, 40))
        before = begun_before(domain, domain, begun)
        found = [ordered(timeline, before)]
        for in_parts in (False, True):
            moves = moves_of(timeline, before, in_parts=in_parts)
            late = meet(moves, 1)
            amid = reduced_amid(moves, late)
            assert amid is None or all(map(delays_nothing, moves, amid))
            others = filter(None, (meet(moves, 0), late, reduced_early(moves, late), amid))
            found += [(moves, orders) for orders in others]
        for moves, orders in found:
            lists = replace(domain, ops=tuple(map(tuple, in_orders(domain, moves, orders))))
            own = nothing, begun_before(lists, domain, begun)
            try:
                wanted = run(lists, *costs, single_fifo=True, issue_ns=issue_ns, behind=own).makespan_ns
            except StuckError:
                wanted = None
            assert queue_ns(moves, orders, issue_ns) == wanted, number
