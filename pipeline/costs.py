"""What every op of a domain takes, from its plan and a cost table: schedules are built and simulated with it.

Compute includes the collectives inside layers; a shipment takes the time that its transport was chosen by.
Times are integer nanoseconds, sizes integer bytes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from parallel.cluster import Link
from parallel.costs import CostTable, WorkCost
from parallel.learning import Sample
from parallel.work import Grad
from pipeline.domain_plan import DomainPlan, Share
from pipeline.ops import COLLECTIVE, COMPUTE, POINT_TO_POINT, Kind, Op
from pipeline.reductions import closing, in_front, made_by, runs_alone
from pipeline.rules.memory import Kept
from pipeline.simulator import ComputeCost, MessageCost, Timeline, run

Costs = tuple[ComputeCost, MessageCost]
"""Nanoseconds of a compute op or a reduction at a domain rank, and of what an op issues."""


def plan_costs(domain: DomainPlan, table: CostTable, link: Link | None = None) -> Costs:
    """Return the costs of a planned domain under a cost table. As long as no routes are planned, rows are
    taken to travel over `link`: the one between nodes, unless given.
    """
    # Ranks of a stage with the same work take the same time: a pass is timed once for each amount of work.
    times: dict[tuple[object, ...], int] = {}

    def compute(rank: int, op: Op) -> int:
        part, share = part_of(domain, table, rank, op)
        if share is None:
            return table.parts[part].reduce_ns
        grad = domain.made_by(op)
        key = (part, grad, share)
        ns = times.get(key)
        if ns is None:
            cost, of = table.parts[part].of(share.anew), share[:3]
            ns = times[key] = cost.backward_ns(*of, grad) if grad else cost.forward_ns(*of)
        return ns

    @cache
    def message(op: Op) -> int:
        if op.kind in COLLECTIVE:
            if not domain.routes:
                return _guess_ns(domain, op.index, link or table.links.across, table.row_bytes)
            route = domain.routes[op.index]
            return route.ns if route else 0
        layout = domain.microbatches[op.index].layout
        most = max(layout.padded_tokens(cp_rank, domain.tp) for cp_rank in range(domain.pool))
        return table.message_ns(most // domain.tp)

    return compute, message


def arrivals(domain: DomainPlan, table: CostTable, compute_ns: ComputeCost) -> ComputeCost:
    """Return when a forward may begin at a domain rank, for its weights: from the start of the step on they
    are gathered one after the other, the LLM's last. What arrives layer by layer may do so during the pass.
    Rows that are shipped meanwhile are not held up by it, not even in one queue.
    """
    arrived: list[dict[str, int]] = [{} for _ in domain.teams]
    now = [0] * len(arrived)
    for number, virtual_stage in sorted(domain.reductions, key=lambda at: (at[0] == domain.llm, at)):
        op = Op(Kind.REDUCE, number, virtual_stage=virtual_stage)
        name, _ = part_of(domain, table, 0, op)
        for team in domain.reducing(op):
            now[team] += table.parts[name].gather_ns
            arrived[team][name] = now[team]

    def arrival(rank: int, op: Op) -> int:
        of_llm = op.kind is Kind.FORWARD
        name = (
            table.llm_virtual_stage(domain.llm, op.virtual_stage)
            if of_llm
            else domain.encoder_batches[op.index].component
        )
        ns = arrived[rank // domain.team].get(name, 0)
        return ns and ns - table.parts[name].gathered_behind_ns(compute_ns(rank, op))

    return arrival


def begun_before(domain: DomainPlan, table: CostTable, compute_ns: ComputeCost) -> ComputeCost:
    """Return how long before its place in the list a REDUCE has begun at a domain rank; of a backward, how
    long before its end one that follows it at once may begin, if it is of another component.
    """

    @cache
    def front(team: int) -> dict[Op, tuple[tuple[int, int], ...]]:
        return in_front(domain, table.components, team)

    @cache
    def of_team(team: int) -> dict[tuple[int, int], Op]:
        return {each: op for op, begins in closing(domain, team, front).items() for each in begins}

    def before(rank: int, op: Op) -> int:
        team, last = rank // domain.team, op
        if op.kind is Kind.REDUCE:
            found = of_team(team).get((op.index, op.virtual_stage))
            if found is None:
                return 0
            last = found
        elif not runs_alone(domain, op, team):
            return 0
        name, share = part_of(domain, table, rank, last)
        assert share is not None
        # What layers tell each other takes the same links.
        alone_ns = compute_ns(rank, last) - _talk_ns(table.parts[name], share, last.grad)
        if op.kind is Kind.REDUCE and made_by(domain, table.components, last) == (op.index, op.virtual_stage):
            return table.parts[name].reduced_behind_ns(alone_ns)
        return table.parts[name].behind_layers_ns(alone_ns)

    return before


def _guess_ns(domain: DomainPlan, m: int, link: Link, row_bytes: int) -> int:
    """What the rows of a microbatch take before their route is planned: as if they left all ranks alike."""
    rows = sum(item.rows for item in domain.items if item.microbatch == m)
    return link.message_ns(rows * row_bytes // domain.num_ranks)


def measured(
    domain: DomainPlan, table: CostTable, rank: int, timings: Iterable[tuple[Op, int]], *, talks: bool
) -> Iterator[Sample]:
    """Yield what each pass of a planned domain took at a domain rank: `timings` are its ops, and nanoseconds
    that it was busy with them. If that `talks`, it includes the collectives inside layers, which the table
    knows the time of.
    """
    for op, busy_ns in timings:
        if op.kind in COMPUTE:
            part, share = part_of(domain, table, rank, op)
            assert share is not None
            direction = domain.made_by(op)
            cost = table.parts[part]
            if direction and cost.of(share.anew) is not cost:
                continue  # it takes a forward more than the part's laws say
            talk = _talk_ns(cost, share, direction) if talks else 0
            yield Sample(part, direction, share.tokens, share.squares, busy_ns - talk)


def _talk_ns(cost: WorkCost, share: Share, grad: Grad | None) -> int:
    """What the layers of a pass communicate, as far as the pass waits for it."""
    cost = cost.of(share.anew)
    compute_ns = cost.compute_ns(share.tokens, share.squares, grad)
    exposed_ns = cost.exposed_ns(share.tokens, compute_ns, grad)
    return cost.talk_ns(share.tokens, share.exchange_ns, grad) + exposed_ns


def plan_memory(domain: DomainPlan, table: CostTable) -> Kept:
    """Return the bytes that each forward of a planned domain keeps for its backward."""

    def kept(rank: int, op: Op) -> int:
        part, share = part_of(domain, table, rank, op)
        return 0 if share is None else table.parts[part].of(share.anew).kept_bytes(share.tokens)

    return kept


def part_of(domain: DomainPlan, table: CostTable, rank: int, op: Op) -> tuple[str, Share | None]:
    """Return the name of the part that an op of compute runs at a domain rank, and what it processes; of a
    reduction the part alone.
    """
    if op.kind in (Kind.FORWARD, Kind.BACKWARD):
        share = domain.microbatches[op.index].share(domain.cp_rank(rank))
        return table.llm_virtual_stage(domain.llm, op.virtual_stage), share
    if op.kind is Kind.REDUCE:
        if op.index == domain.llm:
            return table.llm_virtual_stage(domain.llm, op.virtual_stage), None
        return table.components[op.index], None
    batch = domain.encoder_batches[op.index]
    return batch.component, batch.share(rank)


@dataclass(frozen=True)
class SimulatedSpent:
    """What a domain rank spends a simulated step with: nanoseconds of compute, of collectives inside layers,
    of waiting for updated weights, of standing by while gradients are reduced, while rows travel
    (`boundary_ns`) and while messages between virtual stages do, of issuing and taking in all that, and of
    idling until other ranks come.
    """

    compute_ns: int
    layers_ns: int
    weights_ns: int
    reducing_ns: int
    boundary_ns: int
    messages_ns: int
    issuing_ns: int
    idle_ns: int


def spent_on(timeline: Timeline, table: CostTable, rank: int) -> SimulatedSpent:
    """Divide the time of a simulated step of a domain rank; the parts add up to the makespan."""
    compute_ns, _ = plan_costs(timeline.domain, table)
    computed = layers = reducing = boundary = messages = 0
    team = rank // timeline.domain.team
    for event, transfer in zip(timeline.events[team], timeline.transfers[team], strict=True):
        op = event.op
        if op.kind in COMPUTE:
            part, share = part_of(timeline.domain, table, rank, op)
            assert share is not None
            computed += compute_ns(rank, op)
            grad = timeline.domain.made_by(op)
            layers += _talk_ns(table.parts[part], share, grad)
        elif op.kind is Kind.WAIT:
            assert transfer is not None
            moving = max(0, min(event.end_ns, transfer.done) - max(event.start_ns, transfer.start))
            reducing += moving * (op.on is Kind.REDUCE)
            boundary += moving * (op.on in COLLECTIVE)
            messages += moving * (op.on in POINT_TO_POINT)
    issuing = table.issue_ns * sum(op.kind not in COMPUTE for op in timeline.domain.ops[team])
    weights = sum(timeline.weights_ns[team].values())
    idle = timeline.makespan_ns - computed - weights - reducing - boundary - messages - issuing
    return SimulatedSpent(computed - layers, layers, weights, reducing, boundary, messages, issuing, idle)


def simulate(domain: DomainPlan, table: CostTable, single_fifo: bool = False) -> Timeline:
    """Time a planned domain with a cost table, after another step. The result is simulated, not measured."""
    compute_ns, message_ns = plan_costs(domain, table)
    behind = arrivals(domain, table, compute_ns), begun_before(domain, table, compute_ns)
    return run(domain, compute_ns, message_ns, single_fifo, table.issue_ns, behind)
