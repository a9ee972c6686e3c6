"""Refuse a plan that could hang, lose a row or hold too much, before any of it runs.

R1  every communicator sees one order of collectives on all its ranks
R2  sends and receives of each directed pair of stages are in the same order
R3  data order on a rank: encode < ship, wait(ship) < forward, backward < return,
    wait(return) < encode-backward, and the same for activations and their gradients; all of it < reduce
R4  every issued op is waited for exactly once, after it was issued
R5  each item is encoded once, and its backward runs once, on the same ranks (never for a frozen encoder),
    neighbours that hold its encoder; every rank that holds a component reduces it once
R6  microbatches in flight on a stage stay under the cap
R7  the abstract machine runs the lists to the end (`pipeline/simulator.py`)
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from pipeline.plan import ISSUED, DomainPlan, Kind, Op, StepPlan
from pipeline.routes import plan_route, row_counts
from pipeline.simulator import StuckError, run


class PlanRefusedError(RuntimeError):
    """A plan broke a rule; nothing of it has run. The message lists the rules and where they broke."""


def verify(plan: StepPlan, max_in_flight: int, single_fifo: bool = False, domain: int | None = None) -> None:
    """Check all rules on every domain of a plan, or on one of them: its ranks need not check the others.

    `max_in_flight` caps the microbatches whose activations a stage may hold (R6); the last stages hold
    fewer. With `single_fifo` the lists must also run with one communication queue a rank.

    Raises:
        PlanRefusedError: with the first violations of each domain.
    """
    problems: list[str] = []
    for number, planned in enumerate(plan.domains):
        if domain not in (None, number):
            continue
        found = list(violations(planned, plan, max_in_flight, single_fifo))
        problems += [f"domain {number}: {text}" for text in found[:10]]
    if problems:
        lines = "\n  ".join(problems)
        raise PlanRefusedError(f"the plan of step {plan.step} is refused:\n  {lines}")


def violations(
    domain: DomainPlan, plan: StepPlan, max_in_flight: int, single_fifo: bool = False
) -> Iterator[str]:
    """Yield every broken rule of one domain as text; nothing if the plan is safe."""
    if unclear := [*_unknown_indices(domain, plan), *_unclear_chunks(domain)]:
        yield from unclear
        return
    static = [
        *_collective_order(domain),
        *_pair_order(domain),
        *_data_order(domain),
        *_waits(domain),
        *_items(domain, plan),
        *_routes(domain),
        *_in_flight(domain, max_in_flight),
    ]
    yield from static
    for fifo in (False, True) if single_fifo else (False,):
        try:
            run(domain, lambda rank, op: 1, lambda op: 1, single_fifo=fifo)
        except StuckError as error:
            name = "R7 with a single queue a rank" if fifo else "R7"
            yield f"{name}: {error}"


def _indices(ops: Sequence[Op], kind: Kind) -> list[int]:
    return [op.index for op in ops if op.kind is kind]


def _unknown_indices(domain: DomainPlan, plan: StepPlan) -> Iterator[str]:
    """Ops of chunks, components or microbatches that the plan does not have: nothing else can be checked."""
    sizes = {
        Kind.ENCODE: len(domain.chunks),
        Kind.ENCODE_BACKWARD: len(domain.chunks),
        Kind.REDUCE: len(plan.components),
    }
    for rank, ops in enumerate(domain.ops):
        for op in ops:
            if not 0 <= op.index < sizes.get(op.kind, len(domain.microbatches)):
                yield f"R5: rank {rank} runs {op}, which is not in the plan"


def _unclear_chunks(domain: DomainPlan) -> Iterator[str]:
    """Chunks that say different things of their work: nothing else can be checked."""
    for c, chunk in enumerate(domain.chunks):
        items = [domain.items[i] for i in chunk.items if 0 <= i < len(domain.items)]
        slots = chunk.layout.num_ranks
        if len(items) < len(chunk.items) or {(i.component, i.microbatch) for i in items} != {
            (chunk.component, chunk.microbatch)
        }:
            yield f"R5: chunk {c} holds items of another microbatch or component, or of none"
        elif chunk.layout.lengths != tuple(item.tokens for item in items):
            yield f"R5: chunk {c} divides {chunk.layout.lengths} tokens, which are not those of its items"
        elif not chunk.ranks or chunk.ranks != tuple(
            range(chunk.ranks[0], chunk.ranks[0] + len(chunk.ranks))
        ):
            yield f"R5: chunk {c} is on ranks {chunk.ranks}, which are not neighbours"
        elif len(chunk.ranks) % slots or chunk.rows != row_counts(
            items, chunk.layout, chunk.tp, len(domain.fed_by(chunk.component))
        ):
            yield f"R5: chunk {c} puts out {chunk.rows} rows, not those of its items on {slots} slots"


def _collective_order(domain: DomainPlan) -> Iterator[str]:
    def seen(ops: Sequence[Op], kind: Kind) -> list[int]:
        # A route that never leaves its ranks is no collective.
        routes = ((m, domain.routes[m]) for m in _indices(ops, kind))
        return [m for m, route in routes if route is None or not route.is_local]

    for kind in (Kind.SHIP, Kind.RETURN):
        expected = seen(domain.ops[0], kind)
        for rank, ops in enumerate(domain.ops[1:], start=1):
            if seen(ops, kind) != expected:
                yield f"R1: rank {rank} issues {kind} in order {seen(ops, kind)}, rank 0 {expected}"
    for rank, ops in enumerate(domain.ops):
        reduced = _indices(ops, Kind.REDUCE)
        if reduced != sorted(reduced):
            yield f"R1: rank {rank} reduces in order {reduced}, not that of the components"


def _pair_order(domain: DomainPlan) -> Iterator[str]:
    for low in range((domain.num_stages - 1) * domain.stage_size):
        high = low + domain.stage_size
        for sender, receiver, send, receive in (
            (low, high, Kind.SEND_FORWARD, Kind.RECV_FORWARD),
            (high, low, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD),
        ):
            sent = _indices(domain.ops[sender], send)
            received = _indices(domain.ops[receiver], receive)
            if sent != received:
                yield f"R2: rank {sender} sends {send} {sent}, rank {receiver} receives {received}"


def _data_order(domain: DomainPlan) -> Iterator[str]:
    for rank, ops in enumerate(domain.ops):
        place = {op: position for position, op in enumerate(ops)}
        if len(place) != len(ops):
            twice = next(op for op, count in Counter(ops).items() if count > 1)
            yield f"R3: rank {rank} runs {twice} more than once"
        for op in ops:
            for earlier in _must_precede(op, rank, domain, place):
                if place.get(earlier, len(ops)) > place[op]:
                    yield f"R3: rank {rank} must run {earlier} before {op}"


def _must_precede(op: Op, rank: int, domain: DomainPlan, place: dict[Op, int]) -> Iterator[Op]:
    """The ops of this rank whose result `op` uses, or that others need before they come to it."""
    first, last = domain.is_first(rank), domain.is_last(rank)
    takes_rows = bool(domain.points(rank))
    m = op.index
    if op.kind is Kind.FORWARD:
        if not first:
            yield Op(Kind.WAIT, m, Kind.RECV_FORWARD)
        if takes_rows and domain.routes[m] is not None:
            yield Op(Kind.WAIT, m, Kind.SHIP)
    elif op.kind is Kind.BACKWARD:
        yield Op(Kind.FORWARD, m)
        if not last:
            yield Op(Kind.WAIT, m, Kind.RECV_BACKWARD)
    elif op.kind is Kind.SEND_FORWARD:
        yield Op(Kind.FORWARD, m)
    elif op.kind is Kind.SEND_BACKWARD or (op.kind is Kind.RETURN and takes_rows):
        yield Op(Kind.BACKWARD, m)
    elif op.kind is Kind.SHIP:
        for c, chunk in enumerate(domain.chunks):
            if chunk.microbatch == m and rank in chunk.ranks:
                yield Op(Kind.ENCODE, c)
    elif op.kind is Kind.ENCODE_BACKWARD:
        yield Op(Kind.ENCODE, m)
        yield Op(Kind.WAIT, domain.chunks[m].microbatch, Kind.RETURN)
    elif op.kind is Kind.REDUCE:
        # It waits for other ranks, so whatever they may wait for comes first.
        yield from (other for other in place if other.kind not in (Kind.WAIT, Kind.REDUCE))


def _waits(domain: DomainPlan) -> Iterator[str]:
    for rank, ops in enumerate(domain.ops):
        open_: set[tuple[Kind, int]] = set()
        for op in ops:
            if op.kind in ISSUED:
                open_.add((op.kind, op.index))
            elif op.kind is Kind.WAIT:
                assert op.on is not None
                if (op.on, op.index) not in open_:
                    yield f"R4: rank {rank} waits for {op.on}({op.index}) that is not in flight"
                open_.discard((op.on, op.index))
        for kind, index in sorted(open_):
            yield f"R4: rank {rank} never waits for {kind}({index})"


def _items(domain: DomainPlan, plan: StepPlan) -> Iterator[str]:
    """Each item is in one chunk, which its ranks run once; each pass and each reduction happens once."""
    counts = [Counter(ops) for ops in domain.ops]
    homes = dict(zip(plan.components, domain.homes, strict=True))

    def check(op: Op, ranks: Collection[int], times: int, what: str) -> Iterator[str]:
        for rank, count in enumerate(counts):
            expected = times if rank in ranks else 0
            if count[op] != expected:
                yield f"R5: rank {rank} runs {op} {count[op]} times, not {expected}: {what}"

    owners = Counter(number for chunk in domain.chunks for number in chunk.items)
    for number in range(len(domain.items)):
        if owners[number] != 1:
            yield f"R5: item {number} is in {owners[number]} chunks"
    for c, chunk in enumerate(domain.chunks):
        trains = plan.train and chunk.component not in plan.frozen
        what = f"a chunk of ranks {chunk.ranks}"
        yield from check(Op(Kind.ENCODE, c), chunk.ranks, 1, what)
        yield from check(Op(Kind.ENCODE_BACKWARD, c), chunk.ranks, int(trains), what)
        if not set(chunk.ranks) <= set(range(*homes[chunk.component])):
            yield f"R5: chunk {c} is on ranks {chunk.ranks}, which do not all hold {chunk.component}"
    for number, component in enumerate(plan.components):
        times = 1 if plan.train and component not in plan.frozen else 0
        yield from check(Op(Kind.REDUCE, number), range(*homes[component]), times, component)
    llm = range(domain.num_stages * domain.stage_size)
    for m in range(len(domain.microbatches)):
        yield from check(Op(Kind.FORWARD, m), llm, 1, "a microbatch passes every stage")
        yield from check(Op(Kind.BACKWARD, m), llm, int(plan.train), "a microbatch passes every stage")


def _routes(domain: DomainPlan) -> Iterator[str]:
    """Every row leaves the rank that encoded it once, and arrives where its item stands, once."""
    for m, (batch, route) in enumerate(zip(domain.microbatches, domain.routes, strict=True)):
        if route is None:
            for rank, ops in enumerate(domain.ops):
                if Op(Kind.SHIP, m) in ops or Op(Kind.RETURN, m) in ops:
                    yield f"R5: rank {rank} ships microbatch {m}, which has no route"
        try:
            expected = plan_route(
                m, batch.layout, domain.tp, domain.num_ranks, domain.items, domain.chunks, domain.fed_by
            )
        except AssertionError as error:
            yield f"R5: microbatch {m}: {error}"
            continue
        if route is not None and expected is not None:
            expected = replace(expected, transport=route.transport, nodes=route.nodes)
        if route != expected:
            yield f"R5: the route of microbatch {m} does not bring each row to the place of its item"


def _in_flight(domain: DomainPlan, cap: int) -> Iterator[str]:
    for rank, ops in enumerate(domain.ops):
        if not any(op.kind is Kind.BACKWARD for op in ops):
            continue  # forward only: activations die at once
        live = 0
        for op in ops:
            live += (op.kind is Kind.FORWARD) - (op.kind is Kind.BACKWARD)
            if live > cap:
                yield f"R6: rank {rank} holds {live} microbatches at {op}, more than {cap}"
                break
