"""Refuse a plan that could hang, lose a row or hold too much, before any of it runs.

R1  every communicator sees one order of collectives on all its ranks; gradients are reduced in the plan's order
R2  sends and receives of each directed pair of ranks are in the same order
R3  data order on a rank: encode < ship, wait(ship) < forward, backward < return, wait(return) <
    encode-backward, and the same for activations and their gradients, from part to part; gradients of
    weights after those of inputs; every gradient of a part before it is reduced
R4  every issued op is waited for exactly once, after it was issued
R5  each item is encoded once, and its backward runs once, whole or split in two, on the same ranks (never for
    a frozen encoder), neighbours that hold its encoder; each microbatch passes every part once; every rank
    that holds a part reduces it once
R6  activations that a position holds stay under the bound of their part
R7  the abstract machine runs the lists to the end (`pipeline/simulator.py`)
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from pipeline.plan import (
    BACKWARDS,
    COLLECTIVE,
    ISSUED,
    POINT_TO_POINT,
    DomainPlan,
    Grad,
    Kind,
    Op,
    StepPlan,
)
from pipeline.routes import outputs_of, plan_routes
from pipeline.simulator import StuckError, run

Kept = Callable[[int, Op], int]
"""Bytes that a FORWARD or ENCODE at a position keeps until the last of its backward has run."""
_ENCODER = (Kind.ENCODE, Kind.ENCODE_BACKWARD)


class PlanRefusedError(RuntimeError):
    """A plan broke a rule; nothing of it has run. The message lists the rules and where they broke."""


def verify(plan: StepPlan, kept: Kept, single_fifo: bool = False) -> None:
    """Check all rules on the domain of a plan.

    With `single_fifo` the lists must also run with one communication queue a rank.

    Raises:
        PlanRefusedError: with the first violations.
    """
    found = list(violations(plan, kept, single_fifo))
    if found:
        lines = "\n  ".join(f"domain {plan.number}: {text}" for text in found[:10])
        raise PlanRefusedError(f"the plan of step {plan.step} is refused:\n  {lines}")


def violations(plan: StepPlan, kept: Kept, single_fifo: bool = False) -> Iterator[str]:
    """Yield every broken rule as text; nothing if the plan is safe."""
    domain = plan.domain
    if unclear := [*_unclear_table(domain), *_unknown_indices(plan), *_unclear_chunks(domain)]:
        yield from unclear
        return
    yield from _collective_order(domain)
    yield from _pair_order(domain)
    for team in domain.teams:
        yield from _data_order(plan, team)
        yield from _waits(domain, team)
    yield from _once(plan)
    yield from _routes(domain)
    yield from _in_flight(plan, kept)
    try:
        run(domain, lambda rank, op: 1, lambda op: 1, single_fifo=single_fifo)
    except StuckError as error:
        yield f"R7{' with a single queue a rank' if single_fifo else ''}: {error}"


def _ranks(domain: DomainPlan, team: int) -> str:
    """The positions of a team, in words."""
    first = team * domain.team
    return f"rank {first}" if domain.team == 1 else f"ranks {first} to {first + domain.team - 1}"


def _unclear_table(domain: DomainPlan) -> Iterator[str]:
    """Parts that are held unevenly: nothing else can be checked."""
    holders = Counter(part for parts in domain.holds for part in parts)
    if len(set(holders.values())) > 1 or sorted(holders) != list(range(domain.num_parts)):
        yield f"R5: the parts of the LLM are on {dict(sorted(holders.items()))} teams, not all on as many"
    elif any(after and not before for before, after in pairwise(domain.holds)):
        yield "R5: positions beside the LLM stand before some of the LLM's"
    elif len(domain.ops) != len(domain.holds):
        yield f"R5: there are {len(domain.ops)} op lists for {len(domain.holds)} teams"


def _unknown_indices(plan: StepPlan) -> Iterator[str]:
    """Ops of chunks, components, parts or microbatches that the plan does not have."""
    domain = plan.domain
    microbatches = len(domain.microbatches)
    chunks, components = len(domain.chunks), len(plan.components)
    last = domain.num_parts - 1
    for team, ops in enumerate(domain.ops):
        own = domain.holds[team]
        for op in ops:
            kind, part = op.kind, op.part
            if kind in _ENCODER:
                known = 0 <= op.index < chunks and not part
            elif kind is Kind.REDUCE:
                known = 0 <= op.index < components
                known = known and (part in own if op.index == domain.llm else not part)
            elif kind in COLLECTIVE or op.on in COLLECTIVE:
                known = 0 <= op.index < microbatches and not part
            else:
                known = 0 <= op.index < microbatches and part in own
                sends_on = op.kind if op.on is None else op.on
                if sends_on in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD):
                    known = known and part < last
                elif sends_on in (Kind.RECV_FORWARD, Kind.SEND_BACKWARD):
                    known = known and part > 0
            if not known:
                yield f"R5: {_ranks(domain, team)} runs {op}, which is not in the plan"


def _unclear_chunks(domain: DomainPlan) -> Iterator[str]:
    """Chunks that say different things of their work: nothing else can be checked."""
    for c, chunk in enumerate(domain.chunks):
        items = [domain.items[i] for i in chunk.items if 0 <= i < len(domain.items)]
        slots, ranks = chunk.layout.num_ranks, chunk.ranks
        if len(items) < len(chunk.items) or {i.component for i in items} != {chunk.component}:
            yield f"R5: chunk {c} holds items of another component, or of none"
        elif chunk.microbatches != tuple(sorted({i.microbatch for i in items})):
            yield f"R5: chunk {c} is of microbatches {chunk.microbatches}, which are not those of its items"
        elif chunk.layout.lengths != tuple(item.tokens for item in items):
            yield f"R5: chunk {c} divides {chunk.layout.lengths} tokens, which are not those of its items"
        elif not ranks or ranks != tuple(range(ranks[0], ranks[0] + len(ranks))):
            yield f"R5: chunk {c} is on ranks {ranks}, which are not neighbours"
        elif ranks[0] % domain.team or len(ranks) % domain.team:
            yield f"R5: chunk {c} is on ranks {ranks}, which are not whole teams of {domain.team}"
        elif len(ranks) % slots or chunk.outputs != outputs_of(
            chunk.items, domain.items, chunk.layout, chunk.tp, len(domain.fed_by(chunk.component))
        ):
            yield f"R5: chunk {c} puts out {chunk.rows} rows, not those of its items on {slots} slots"


def _collective_order(domain: DomainPlan) -> Iterator[str]:
    # A route that never leaves its ranks is no collective.
    local = [route is not None and route.is_local for route in domain.routes]
    for kind in (Kind.SHIP, Kind.RETURN):
        orders = [[op.index for op in ops if op.kind is kind and not local[op.index]] for ops in domain.ops]
        for team, order in enumerate(orders):
            if order != orders[0]:
                yield f"R1: {_ranks(domain, team)} issues {kind} in order {order}, rank 0 {orders[0]}"
    place = {pair: number for number, pair in enumerate(domain.reductions)}
    for team, ops in enumerate(domain.ops):
        reduced = [(op.index, op.part) for op in ops if op.kind is Kind.REDUCE]
        places = [place.get(pair, -1) for pair in reduced]
        if -1 in places or places != sorted(places):
            yield f"R1: {_ranks(domain, team)} reduces in order {reduced}, not that of the plan"


def _pair_order(domain: DomainPlan) -> Iterator[str]:
    """Messages by directed pair of teams and by what they carry, as sent and as received."""
    sent: dict[tuple[bool, int, int], list[tuple[int, int]]] = defaultdict(list)
    received: dict[tuple[bool, int, int], list[tuple[int, int]]] = defaultdict(list)
    for team, ops in enumerate(domain.ops):
        rank = team * domain.team
        for op in ops:
            if op.kind not in POINT_TO_POINT:
                continue
            forward = op.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
            source, destination = domain.sender(op, rank)
            if op.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                sent[forward, source, destination].append((op.index, op.part + (1 if forward else -1)))
            else:
                received[forward, source, destination].append((op.index, op.part))
    for pair in sorted(sent.keys() | received.keys()):
        forward, source, destination = pair
        if sent[pair] != received[pair]:
            what = "send_forward" if forward else "send_backward"
            out, into = (_messages(of[pair], domain) for of in (sent, received))
            yield f"R2: rank {source} sends {what} {out}, rank {destination} receives {into}"


def _messages(messages: Sequence[tuple[int, int]], domain: DomainPlan) -> list[object]:
    """Microbatches, with the part that takes them where a rank may hold several."""
    several = any(len(parts) > 1 for parts in domain.holds)
    return [message if several else message[0] for message in messages]


def _data_order(plan: StepPlan, team: int) -> Iterator[str]:
    domain = plan.domain
    ops = domain.ops[team]
    place: dict[Op, int] = {}
    for at, op in enumerate(ops):
        place.setdefault(op, at)
    needs = _Needs(plan, team, place)
    for op, at in place.items():
        for before in needs.of(op):
            if place.get(before, len(ops)) > at:
                yield f"R3: {_ranks(domain, team)} must run {before} before {op}"


class _Needs:
    """What must come before an op in the list of its team."""

    def __init__(self, plan: StepPlan, team: int, place: dict[Op, int]) -> None:
        domain = plan.domain
        self.domain, self.components, self.place = domain, plan.components, place
        self.rank = team * domain.team
        self.parts = domain.holds[team]
        self.with_rows = domain.parts_with_rows(self.rank)
        self.chunks_of: dict[int, list[int]] = defaultdict(list)
        for op in place:
            if op.kind is Kind.ENCODE:
                for m in domain.chunks[op.index].microbatches:
                    self.chunks_of[m].append(op.index)
        for c, chunk in enumerate(domain.chunks):
            if self.rank in chunk.ranks and Op(Kind.ENCODE, c) not in place:
                for m in chunk.microbatches:
                    self.chunks_of[m].append(c)

    def of(self, op: Op) -> Iterator[Op]:
        kind, m, part, domain = op.kind, op.index, op.part, self.domain
        if kind is Kind.FORWARD:
            if part:
                near = part - 1 in self.parts
                yield self.forward(m, part - 1) if near else Op(Kind.WAIT, m, Kind.RECV_FORWARD, part)
            if part in self.with_rows and domain.routes[m] is not None:
                yield Op(Kind.WAIT, m, Kind.SHIP)
        elif kind is Kind.BACKWARD:
            if op.grad is Grad.WEIGHT:
                yield Op(kind, m, part=part, grad=Grad.INPUT)
                return
            yield self.forward(m, part)
            if part < domain.num_parts - 1:
                near = part + 1 in self.parts
                yield self.backward(m, part + 1) if near else Op(Kind.WAIT, m, Kind.RECV_BACKWARD, part)
        elif kind is Kind.SEND_FORWARD:
            yield self.forward(m, part)
        elif kind is Kind.SEND_BACKWARD:
            yield self.backward(m, part)
        elif kind is Kind.SHIP:
            yield from (Op(Kind.ENCODE, c) for c in self.chunks_of[m])
        elif kind is Kind.RETURN:
            yield Op(Kind.WAIT, m, Kind.SHIP)
            yield from (self.backward(m, own) for own in self.with_rows)
        elif kind is Kind.ENCODE_BACKWARD:
            if op.grad is Grad.WEIGHT:
                yield Op(kind, m, grad=Grad.INPUT)
                return
            yield Op(Kind.ENCODE, m)
            yield from (Op(Kind.WAIT, b, Kind.RETURN) for b in domain.chunks[m].microbatches)
        elif kind is Kind.REDUCE:
            yield from (other for other in self.place if self._makes_gradients(other, op))

    def forward(self, m: int, part: int) -> Op:
        return Op(Kind.FORWARD, m, part=part)

    def backward(self, m: int, part: int) -> Op:
        """The op of this team that makes the gradient of the input of a part."""
        split = Op(Kind.BACKWARD, m, part=part, grad=Grad.INPUT)
        return split if split in self.place else Op(Kind.BACKWARD, m, part=part)

    def _makes_gradients(self, other: Op, reduction: Op) -> bool:
        if reduction.index == self.domain.llm:
            # Where the output is tied to the embedding of its own rank, the last part's passes make gradients
            # of a weight of the first part. A plan does not say what is tied, so it waits wherever it may be.
            makers = {reduction.part} | ({self.domain.num_parts - 1} if reduction.part == 0 else set())
            return other.kind is Kind.BACKWARD and other.part in makers
        component = other.kind is Kind.ENCODE_BACKWARD and self.domain.chunks[other.index].component
        return component == self.components[reduction.index]


def _waits(domain: DomainPlan, team: int) -> Iterator[str]:
    open_: set[tuple[Kind, int, int]] = set()
    for op in domain.ops[team]:
        if op.kind in ISSUED:
            open_.add((op.kind, op.index, op.part))
        elif op.kind is Kind.WAIT:
            assert op.on is not None
            if (op.on, op.index, op.part) not in open_:
                yield f"R4: {_ranks(domain, team)} waits for {op.on}({op.index}) that is not in flight"
            open_.discard((op.on, op.index, op.part))
    for kind, index, part in sorted(open_):
        yield f"R4: {_ranks(domain, team)} never waits for {Op(kind, index, part=part)}"


def _once(plan: StepPlan) -> Iterator[str]:
    """Each item is in one chunk, which its ranks run once; each pass and each reduction happens once."""
    domain = plan.domain
    homes = dict(zip(plan.components, domain.homes, strict=True))
    owners = Counter(number for chunk in domain.chunks for number in chunk.items)
    for number in range(len(domain.items)):
        if owners[number] != 1:
            yield f"R5: item {number} is in {owners[number]} chunks"
    for c, chunk in enumerate(domain.chunks):
        first, stop = homes[chunk.component]
        if not (first <= chunk.ranks[0] and chunk.ranks[-1] < stop):
            yield f"R5: chunk {c} is on ranks {chunk.ranks}, which do not all hold {chunk.component}"
    expected = _expected(plan)
    for team, ops in enumerate(domain.ops):
        own = expected[team]
        counts = Counter(op for op in ops if op.kind is not Kind.WAIT and op.kind not in ISSUED)
        wholes = dict.fromkeys((*own, *(replace(op, grad=Grad.BOTH) for op in counts)))
        for op in wholes:
            halves = [counts[replace(op, grad=grad)] for grad in (Grad.INPUT, Grad.WEIGHT)]
            learns = op.kind is not Kind.BACKWARD or plan.trains(plan.components[domain.llm])
            if op in own and not counts[op] and op.kind in BACKWARDS and halves == [1, int(learns)]:
                continue
            if counts[op] == int(op in own) and not any(halves):
                continue
            why = own.get(op) or _why(op, plan)
            times = (
                f"{counts[op]} times"
                if not any(halves)
                else (f"{counts[op]} times whole, {halves[0]} times for inputs and {halves[1]} for weights")
            )
            yield f"R5: {_ranks(domain, team)} runs {op} {times}, not {int(op in own)}: {why}"


def _expected(plan: StepPlan) -> list[dict[Op, str]]:
    """What each team must run once, with the reason; a backward as a whole."""
    domain = plan.domain
    expected: list[dict[Op, str]] = [{} for _ in domain.teams]
    for c, chunk in enumerate(domain.chunks):
        kinds = _ENCODER if plan.trains(chunk.component) else _ENCODER[:1]
        for kind in kinds:
            op = Op(kind, c)
            for rank in range(chunk.ranks[0], chunk.ranks[-1] + 1, domain.team):
                expected[rank // domain.team][op] = _why(op, plan)
    for number, component in enumerate(plan.components):
        if plan.trains(component):
            for part in range(domain.num_parts) if number == domain.llm else (0,):
                op = Op(Kind.REDUCE, number, part=part)
                for team in domain.reducing(op):
                    expected[team][op] = component
    kinds = (Kind.FORWARD, Kind.BACKWARD) if plan.train else (Kind.FORWARD,)
    passes = [(kind, m) for kind in kinds for m in range(len(domain.microbatches))]
    of_part = [
        {Op(kind, m, part=part): "a microbatch passes every part" for kind, m in passes}
        for part in range(domain.num_parts)
    ]
    for team, parts in enumerate(domain.holds):
        for part in parts:
            expected[team].update(of_part[part])
    return expected


def _why(op: Op, plan: StepPlan) -> str:
    """The reason for how often an op runs, where the plan has its chunk, microbatch or component."""
    if op.kind in _ENCODER:
        return f"a chunk of ranks {plan.domain.chunks[op.index].ranks}"
    return plan.components[op.index] if op.kind is Kind.REDUCE else "a microbatch passes every part"


def _routes(domain: DomainPlan) -> Iterator[str]:
    """Every row leaves the rank that encoded it once, and arrives where its item stands, once."""
    routes = plan_routes(domain)
    for m, (route, expected) in enumerate(zip(domain.routes, routes, strict=True)):
        if route is None:
            for team, ops in enumerate(domain.ops):
                if Op(Kind.SHIP, m) in ops or Op(Kind.RETURN, m) in ops:
                    yield f"R5: {_ranks(domain, team)} ships microbatch {m}, which has no route"
        if isinstance(expected, str):
            yield f"R5: microbatch {m}: {expected}"
            continue
        if route is not None and expected is not None:
            expected = replace(expected, transport=route.transport, nodes=route.nodes)
        if route != expected:
            yield f"R5: the route of microbatch {m} does not bring each row to the place of its item"


def _in_flight(plan: StepPlan, kept: Kept) -> Iterator[str]:
    """Activations live from a forward to the last half of its backward."""
    domain, llm = plan.domain, plan.components[plan.domain.llm]
    bounds = dict(domain.bounds)
    for team, ops in enumerate(domain.ops):
        rank = team * domain.team
        live: dict[str, int] = defaultdict(int)
        if not any(op.kind in BACKWARDS for op in ops):
            continue  # forward only: activations die at once
        done = {op for op in ops if op.kind in BACKWARDS and op.grad is Grad.WEIGHT}
        for op in ops:
            if op.kind in _ENCODER:
                part = domain.chunks[op.index].component
            elif op.kind in (Kind.FORWARD, Kind.BACKWARD):
                part = f"{llm}/{op.part}"
            else:
                continue
            if op.kind in (Kind.FORWARD, Kind.ENCODE):
                live[part] += kept(rank, op)
                if part in bounds and live[part] > bounds[part]:
                    yield (
                        f"R6: {_ranks(domain, team)} holds {live[part]} bytes of activations of {part} at "
                        f"{op}, more than its bound of {bounds[part]}"
                    )
                    break
            elif op.grad is not Grad.INPUT or replace(op, grad=Grad.WEIGHT) not in done:
                forward = Kind.FORWARD if op.kind is Kind.BACKWARD else Kind.ENCODE
                live[part] -= kept(rank, Op(forward, op.index, part=op.part))
