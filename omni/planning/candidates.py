"""The plans that the candidates of a schedule make of a domain: the quickest that fits first, then lean ones.

Lists for one queue take no less than lists with a queue for each communicator, and take long to make. So
candidates are ranked by the latter, and the former are made in this order, until none that is left can be
quicker.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import chain

from parallel.costs import CostTable
from pipeline.builders import SchedulePolicy
from pipeline.builders.one_queue.moves import moves_of, queue_ns
from pipeline.builders.one_queue.serial import in_orders, orders_of, run_freely
from pipeline.costs import begun_before, plan_costs, plan_memory, simulate
from pipeline.domain_plan import DomainPlan
from pipeline.ops import Kind
from pipeline.simulator import Timeline

QUARTERS = (3, 2, 1)  # of what encoders hold of a step, that a lean schedule is tried with


def quickest_first(
    planned: Sequence[DomainPlan],
    in_other_orders: Callable[[int], Iterable[DomainPlan]],
    fits: Callable[[DomainPlan], bool],
    lean: Iterator[DomainPlan],
    queued: Callable[[DomainPlan], DomainPlan],
    table: CostTable,
    single_queue: bool,
) -> Iterator[DomainPlan]:
    """Yield plans that fit in the order of their simulated times, then `lean` ones and those that do not, all
    with the lists that `queued` makes of them. The quickest candidate that fits is planned
    `in_other_orders`, too: it is given by its number.
    """
    runs = [run_freely(each, *plan_costs(each, table)) for each in planned]
    queue = [(free.makespan_ns, at, False, free.domain) for at, free in enumerate(runs)]
    heapify(queue)
    others = []
    while queue:
        _, at, is_made, made = heappop(queue)
        if is_made:
            yield made
        elif not fits(made):
            others.append(made)
        else:
            if len(runs) == len(planned):
                runs += (run_freely(each, *plan_costs(each, table)) for each in in_other_orders(at))
                for other in range(len(planned), len(runs)):
                    heappush(queue, (runs[other].makespan_ns, other, False, runs[other].domain))
            ns, made = _queued(runs[at], table, single_queue)
            heappush(queue, (ns, at, True, made))
    yield from map(queued, chain(lean, others))


def lean_plans(
    planned: DomainPlan,
    policies: Sequence[SchedulePolicy],
    table: CostTable,
    scheduled: Callable[[SchedulePolicy, int], DomainPlan],
) -> Iterator[DomainPlan]:
    """Have lean schedules `scheduled`, in turn; those that place encoder batches under bounds on activations
    of encoders, shares of all that a rank encodes in the step as `planned`, in bytes.
    """
    kept = plan_memory(planned, table)
    encoded = (
        sum(kept(team * planned.team, op) for op in ops if op.kind is Kind.ENCODE)
        for team, ops in enumerate(planned.ops)
    )
    most = max(encoded)
    for policy in policies if most else ():
        for quarters in QUARTERS if policy.encoder_batches else (4,):
            yield scheduled(policy, most * quarters // 4)


def _queued(free: Timeline, table: CostTable, single_queue: bool) -> tuple[int, DomainPlan]:
    """Return what a step takes of lists that ran freely, and these: with one queue a rank if there is one."""
    if not single_queue:
        return simulate(free.domain, table).makespan_ns, free.domain
    compute_ns, _ = plan_costs(free.domain, table)
    moves = moves_of(free, begun_before(free.domain, table, compute_ns))
    orders = orders_of(free, moves)
    lists = tuple(map(tuple, in_orders(free.domain, orders)))
    ns = queue_ns(moves, orders, table.issue_ns)
    assert ns is not None
    return ns, replace(free.domain, ops=lists)
