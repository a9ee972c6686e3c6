"""Why a simulated step takes longer than all work over all ranks.

The slowest domain is timed again and again, each time with one thing more, from even work to its whole step:

    work        its busiest rank has so much more work than all have on average
    bubble      waiting, were exchanges and messages free and each communicator had a queue of its own
    exchange    of shared sequences
    messages    between stages, and rows
    queue       waiting because everything stands in one queue, and issuing
    reducing    gradients, and gathering weights, as far as nothing hides that

Work is compute with the collectives that its layers need in any case (tensor and sequence parallelism). What
each thing adds is exact for this order of adding; another order would divide what they share otherwise.
"""

from dataclasses import dataclass
from itertools import pairwise

from parallel.costs import CostTable
from pipeline.costs import Costs, begun_before, part_of, plan_costs, simulate
from pipeline.domain_plan import DomainPlan
from pipeline.ops import COMPUTE, Op
from pipeline.simulator import ComputeCost, nothing, run


@dataclass(frozen=True)
class Causes:
    """Nanoseconds of a step by what takes them: `even` work, and what comes on top. Together they are the
    step.
    """

    even: float
    work: float
    bubble: float
    exchange: float
    messages: float
    queue: float
    reducing: float


def causes_of(domain: DomainPlan, table: CostTable, even_ns: float, single_queue: bool) -> Causes:
    """Divide the step of a domain, of which even work would take `even_ns`."""
    unreduced, message_ns = without_reductions(domain, table)
    upto = [
        even_ns,
        max(work_of(domain, table)),
        run(domain, without_exchanges(domain, table), lambda op: 0).makespan_ns,
        run(domain, unreduced, lambda op: 0).makespan_ns,
        run(domain, unreduced, message_ns).makespan_ns,
        unreduced_ns(domain, table, single_queue),
        simulate(domain, table, single_queue).makespan_ns,
    ]
    return Causes(even_ns, *(after - before for before, after in pairwise(upto)))


def work_of(domain: DomainPlan, table: CostTable) -> list[int]:
    """Compute of each rank of a domain, with the collectives of its layers and without exchanges."""
    cost = without_exchanges(domain, table)
    ranks = range(domain.num_ranks)
    return [sum(cost(rank, op) for op in domain.ops_of(rank) if op.kind in COMPUTE) for rank in ranks]


def unreduced_ns(domain: DomainPlan, table: CostTable, single_queue: bool) -> int:
    """What a domain's step takes were reductions and gathering free. They begin as early as they do, behind
    the backward in front of them, or in one queue ranks would meet later for them than they do.
    """
    free, message_ns = without_reductions(domain, table)
    behind = nothing, begun_before(domain, table, free)
    return run(domain, free, message_ns, single_queue, table.issue_ns, behind).makespan_ns


def without_reductions(domain: DomainPlan, table: CostTable) -> Costs:
    """The costs of a planned domain; reductions take nothing."""
    compute_ns, message_ns = plan_costs(domain, table)
    return lambda rank, op: compute_ns(rank, op) if op.kind in COMPUTE else 0, message_ns


def without_exchanges(domain: DomainPlan, table: CostTable) -> ComputeCost:
    """What ops of a domain take but for exchanges of shared sequences; reductions take nothing."""
    compute_ns, _ = plan_costs(domain, table)

    def of(rank: int, op: Op) -> int:
        if op.kind not in COMPUTE:
            return 0
        part, share = part_of(domain, table, rank, op)
        assert share is not None
        grad, cost = domain.made_by(op), table.parts[part].of(share.anew)
        exchanged = cost.talk_ns(share.tokens, share.exchange_ns, grad) - cost.talk_ns(share.tokens, 0, grad)
        return compute_ns(rank, op) - exchanged

    return of
