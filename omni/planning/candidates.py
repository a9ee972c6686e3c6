"""The plans that the candidates of a schedule make of a domain: the quickest that fits first.

Lists for one queue take no less than lists with a queue for each communicator, and take long to make. So
candidates are ranked by the latter, and the former are made in this order, until none that is left can be
quicker by more than `SLIGHT`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from operator import itemgetter

from omni.planning.replanning import Refused, Replanning
from parallel.costs import CostTable
from pipeline.builders.one_queue.moves import queue_ns
from pipeline.builders.one_queue.serial import in_orders, ordered, run_freely
from pipeline.costs import begun_before, plan_costs, simulate
from pipeline.domain_plan import DomainPlan
from pipeline.simulator import Timeline

SLIGHT = 0.003  # of the step


def quickest_first(
    planned: Sequence[DomainPlan],
    replanning: Replanning,
    queued: Callable[[DomainPlan], DomainPlan],
    table: CostTable,
    single_queue: bool,
) -> Iterator[tuple[DomainPlan, int]]:
    """Yield plans that are not beyond what devices hold in the order of their simulated times; then leaner
    plans that are not, and of those that are the one that is least, all with the lists that `queued` makes of
    them, and with the bytes that they are beyond. The quickest candidate that fits is planned in other
    orders, too. One that does not fit is planned otherwise; leaner plans are made of all that do not, quicker
    ones first: `replanning` makes them. Likely ranks are asked what a plan holds, and all that matter once it
    has its lists.
    """
    runs = [run_freely(each, *plan_costs(each, table)) for each in planned]
    queue = [(free.makespan_ns, at, False, free.domain) for at, free in enumerate(runs)]
    heapify(queue)
    others, refused, ordered = list[tuple[int, DomainPlan]](), list[Refused](), False

    def consider(more: Iterable[DomainPlan]) -> None:
        for each in more:
            runs.append(run_freely(each, *plan_costs(each, table)))
            heappush(queue, (runs[-1].makespan_ns, len(runs) - 1, False, each))

    while queue:
        _, at, is_made, made = heappop(queue)
        more = replanning.beyond(made, is_made)
        if more > 0:
            others.append((more, runs[at].domain))
            if is_made or not ordered:
                refused.append((runs[at].domain, more))
                consider(replanning.otherwise(runs[at].domain, more))
        elif is_made:
            yield made, more
        else:
            if not ordered:
                ordered = True
                consider(replanning.in_other_orders(made))
            ns, made = _queued(runs[at], table, single_queue)
            heappush(queue, (int((1 - SLIGHT) * ns), at, True, made))
    for plan, more in replanning.leaner(refused):
        if more <= 0:
            made = queued(plan)
            more = replanning.beyond(made, True)
            if more <= 0:
                yield made, more
        if more > 0:
            others.append((more, plan))
    if others:
        more, plan = min(others, key=itemgetter(0))
        yield queued(plan), more


def _queued(free: Timeline, table: CostTable, single_queue: bool) -> tuple[int, DomainPlan]:
    """Return what a step takes of lists that ran freely, and these: with one queue a rank if there is one."""
    if not single_queue:
        return simulate(free.domain, table).makespan_ns, free.domain
    compute_ns, _ = plan_costs(free.domain, table)
    moves, orders = ordered(free, begun_before(free.domain, table, compute_ns))
    lists = tuple(map(tuple, in_orders(free.domain, moves, orders)))
    ns = queue_ns(moves, orders, table.issue_ns)
    assert ns is not None
    return ns, replace(free.domain, ops=lists)
