"""The time of lists in one queue, against the abstract machine that runs them op by op."""

from dataclasses import replace
from random import Random

import pytest
from domain_plans import BUILDERS
from random_domains import random_domain

from pipeline.builders.one_queue.moves import moves_of, queue_ns
from pipeline.builders.one_queue.rendezvous import meet
from pipeline.builders.one_queue.serial import in_orders, orders_of, run_freely
from pipeline.costs import Costs
from pipeline.simulator import run


def costly(costs: Costs) -> Costs:
    """Costs of which none is nothing."""
    compute_ns, message_ns = costs
    return lambda rank, op: compute_ns(rank, op) + 1, lambda op: message_ns(op) + 1


@pytest.mark.parametrize("schedule", BUILDERS)
def test_lists_take_in_one_queue_what_the_abstract_machine_says(schedule: str) -> None:
    """Whether ranks compute alone or together, and whatever issuing takes them."""
    for number in range(12):
        random = Random(f"{schedule}/{number}")
        plan, costs = random_domain(random, BUILDERS[schedule])
        costs = costly(costs)
        domain, issue_ns = plan.domain, random.choice((0, 0, 3))
        timeline = run_freely(domain, *costs)
        moves = moves_of(timeline)
        for orders in (orders_of(timeline, moves), meet(moves, 0), meet(moves, 1)):
            lists = replace(domain, ops=tuple(map(tuple, in_orders(domain, orders))))
            wanted = run(lists, *costs, single_fifo=True, issue_ns=issue_ns).makespan_ns
            assert queue_ns(moves, orders, issue_ns) == wanted, number
