"""Refuse a plan that could hang, lose a row or hold too much, before any of it runs.

R1  every communicator sees one order of collectives on all its ranks; gradients are reduced in the plan's
    order
R2  sends and receives of each directed pair of ranks are in the same order
R3  data order on a rank: encode < ship, wait(ship) < forward, backward < return, wait(return) <
    encode-backward, and the same for activations and their gradients, from part to part; gradients of
    weights after those of inputs; every gradient of a part before it is reduced
R4  every op is issued once and waited for exactly once, after it was issued
R5  each item is encoded once, and its backward runs once, whole or split in two, on the same ranks (never for
    a frozen encoder), neighbours that hold its encoder; each microbatch passes every part once; every rank
    that holds a part reduces it once
R6  activations that a position holds stay under the bound of their part
R7  the abstract machine runs the lists to the end (`pipeline/simulator.py`)
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter

from parallel.boundary import Route
from parallel.work import Grad
from pipeline.ops import BACKWARDS, COLLECTIVE, ISSUED, POINT_TO_POINT, Kind, Op
from pipeline.plan import DomainPlan, StepPlan
from pipeline.routes import outputs_of, plan_routes
from pipeline.simulator import StuckError, run

Kept = Callable[[int, Op], int]
"""Bytes that a FORWARD or ENCODE at a position keeps until the last of its backward has run."""
_ENCODER = (Kind.ENCODE, Kind.ENCODE_BACKWARD)

_Op = tuple[Kind, int, Kind | None, int, Grad]
"""The fields of an op: rules look up many, and a tuple is cheaper to make and to find than an Op."""
_Lists = list[tuple[_Op, ...]]
_fields: Callable[[Op], _Op] = attrgetter("kind", "index", "on", "part", "grad")


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
    if unclear := [*_unclear_table(domain), *_unclear_chunks(domain)]:
        yield from unclear
        return
    lists = [tuple(map(_fields, ops)) for ops in domain.ops]
    if unknown := list(_unknown_ops(plan, lists)):
        yield from unknown
        return
    yield from _collective_order(domain, lists)
    yield from _pair_order(domain, lists)
    for team, (ops, chunks) in enumerate(zip(lists, _chunks_by_team(domain), strict=True)):
        yield from _data_order(plan, team, ops, chunks)
        yield from _waits(domain, team, ops)
    yield from _once(plan, lists)
    yield from _routes(domain, lists)
    yield from _in_flight(plan, kept)
    try:
        run(domain, lambda rank, op: 1, lambda op: 1, single_fifo=single_fifo)
    except StuckError as error:
        yield f"R7{' with a single queue a rank' if single_fifo else ''}: {error}"


def _ranks(domain: DomainPlan, team: int) -> str:
    """The positions of a team, in words."""
    first = team * domain.team
    return f"rank {first}" if domain.team == 1 else f"the team of ranks {first} to {first + domain.team - 1}"


def _unclear_table(domain: DomainPlan) -> Iterator[str]:
    """Parts that are held unevenly, teams that are not whole: nothing else can be checked."""
    size = domain.stage_size // domain.team
    holds = domain.holds[: domain.llm_size // domain.team]
    stages = [set(holds[first : first + size]) for first in range(0, len(holds), size or 1)]
    holders = Counter(part for parts in domain.holds for part in parts)
    homes = [rank for home in domain.homes for rank in home]
    if any(rank % domain.team for rank in (domain.stage_size, *homes)):
        yield (
            f"R5: stages of {domain.stage_size} ranks and the homes {domain.homes} are not all whole teams "
            f"of {domain.team}"
        )
    elif sorted(holders) != list(range(domain.num_parts)) or set(holders.values()) != {size}:
        yield f"R5: the parts of the LLM are on {dict(sorted(holders.items()))} teams, not all on {size}"
    elif any(after and not before for before, after in pairwise(domain.holds)):
        yield "R5: positions beside the LLM stand before some of the LLM's"
    elif any(len(parts) > 1 for parts in stages):
        yield f"R5: teams of one stage hold different parts: {domain.holds}"
    elif len(domain.ops) != len(domain.holds):
        yield f"R5: there are {len(domain.ops)} op lists for {len(domain.holds)} teams"


def _unknown_ops(plan: StepPlan, lists: _Lists) -> Iterator[str]:
    """Ops of chunks, components, parts or microbatches that the plan does not have."""
    domain, components = plan.domain, len(plan.components)
    allowed = {parts: _allowed(domain, parts) for parts in set(domain.holds)}
    for team, ops in enumerate(lists):
        own = domain.holds[team]
        limits = allowed[own]
        for op in ops:
            kind, index, on, part, grad = op
            if kind is Kind.WAIT:
                known = on in ISSUED and grad is Grad.BOTH
            else:
                known = on is None and (grad is Grad.BOTH or kind in BACKWARDS)
            if kind is Kind.REDUCE:
                known = known and 0 <= index < components and part in (own if index == domain.llm else (0,))
            elif known:
                count, parts = limits[on or kind]
                known = 0 <= index < count and part in parts
            if not known:
                yield f"R5: {_ranks(domain, team)} runs {Op(*op)}, which is not in the plan"


def _allowed(domain: DomainPlan, own: tuple[int, ...]) -> dict[Kind, tuple[int, tuple[int, ...]]]:
    """How many indices there are for a kind of op, and for which parts, with the holders of parts `own`."""
    microbatches, chunks = len(domain.microbatches), len(domain.chunks)
    above = tuple(part for part in own if part < domain.num_parts - 1 and part + 1 not in own)
    below = tuple(part for part in own if part and part - 1 not in own)
    return {
        Kind.ENCODE: (chunks, (0,)),
        Kind.ENCODE_BACKWARD: (chunks, (0,)),
        Kind.FORWARD: (microbatches, own),
        Kind.BACKWARD: (microbatches, own),
        Kind.SHIP: (microbatches, (0,)),
        Kind.RETURN: (microbatches, (0,)),
        Kind.SEND_FORWARD: (microbatches, above),
        Kind.RECV_BACKWARD: (microbatches, above),
        Kind.SEND_BACKWARD: (microbatches, below),
        Kind.RECV_FORWARD: (microbatches, below),
    }


def _unclear_chunks(domain: DomainPlan) -> Iterator[str]:
    """Chunks that say different things of their work: nothing else can be checked."""
    for c, chunk in enumerate(domain.chunks):
        items = [domain.items[i] for i in chunk.items if 0 <= i < len(domain.items)]
        slots, ranks = chunk.layout.num_members, chunk.ranks
        if len(items) < len(chunk.items) or {i.component for i in items} != {chunk.component}:
            yield f"R5: chunk {c} holds items of another component, or of none"
        elif chunk.microbatches != tuple(sorted({i.microbatch for i in items})):
            yield f"R5: chunk {c} is of microbatches {chunk.microbatches}, which are not those of its items"
        elif chunk.layout.lengths != tuple(item.tokens for item in items):
            yield f"R5: chunk {c} divides {chunk.layout.lengths} tokens, which are not those of its items"
        elif not ranks or ranks != tuple(range(ranks[0], ranks[0] + len(ranks))):
            yield f"R5: chunk {c} is on ranks {ranks}, which are not neighbours"
        elif ranks[0] % domain.team or (len(ranks) % slots == 0 and chunk.tp % domain.team):
            yield (
                f"R5: chunk {c} is on {slots} slots of ranks {ranks}, which are not whole teams of "
                f"{domain.team}"
            )
        elif ranks[-1] >= domain.num_ranks:
            yield f"R5: chunk {c} is on ranks {ranks} of {domain.num_ranks}"
        elif len(ranks) % slots or chunk.outputs != outputs_of(
            chunk.items, domain.items, chunk.layout, chunk.tp, len(domain.fed_by(chunk.component))
        ):
            yield f"R5: chunk {c} puts out {chunk.rows} rows, not those of its items on {slots} slots"


def _collective_order(domain: DomainPlan, lists: _Lists) -> Iterator[str]:
    # A route that never leaves its ranks is no collective.
    local = [route is not None and route.is_local for route in domain.routes]
    for kind in (Kind.SHIP, Kind.RETURN):
        orders = [[op[1] for op in ops if op[0] is kind and not local[op[1]]] for ops in lists]
        for team, order in enumerate(orders):
            if order != orders[0]:
                yield f"R1: {_ranks(domain, team)} issues {kind} in order {order}, rank 0 {orders[0]}"
    place = {pair: number for number, pair in enumerate(domain.reductions)}
    for team, ops in enumerate(lists):
        reduced = [(op[1], op[3]) for op in ops if op[0] is Kind.REDUCE]
        places = [place.get(pair, -1) for pair in reduced]
        if -1 in places or places != sorted(places):
            yield f"R1: {_ranks(domain, team)} reduces in order {reduced}, not that of the plan"


def _pair_order(domain: DomainPlan, lists: _Lists) -> Iterator[str]:
    """Messages by directed pair of teams and by what they carry, as sent and as received."""
    sent: dict[tuple[bool, int, int], list[tuple[int, int]]] = defaultdict(list)
    received: dict[tuple[bool, int, int], list[tuple[int, int]]] = defaultdict(list)
    for team, ops in enumerate(lists):
        lines: dict[tuple[Kind, int], tuple[list[tuple[int, int]], int]] = {}  # with the part that takes them
        for kind, index, _, part, _ in ops:
            if kind not in POINT_TO_POINT:
                continue
            line = lines.get((kind, part))
            if line is None:
                forward = kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
                pair = (forward, *domain.sender(Op(kind, index, part=part), team * domain.team))
                sends = kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
                to = part + (1 if forward else -1) if sends else part
                line = lines[kind, part] = (sent if sends else received)[pair], to
            line[0].append((index, line[1]))
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


def _chunks_by_team(domain: DomainPlan) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in domain.teams]
    for c, chunk in enumerate(domain.chunks):
        for rank in range(chunk.ranks[0], chunk.ranks[-1] + 1, domain.team):
            found[rank // domain.team].append(c)
    return found


def _data_order(plan: StepPlan, team: int, ops: Sequence[_Op], chunks: Sequence[int]) -> Iterator[str]:
    place: dict[_Op, int] = {}
    for at, op in enumerate(ops):
        place.setdefault(op, at)
    needs = _Needs(plan, team, place, chunks)
    for op, at in place.items():
        if op[0] in _NEEDY:
            for before in needs.of(op):
                if place.get(before, len(ops)) > at:
                    yield f"R3: {_ranks(plan.domain, team)} must run {Op(*before)} before {Op(*op)}"


_NEEDY = frozenset(Kind) - {Kind.WAIT, Kind.ENCODE, Kind.RECV_FORWARD, Kind.RECV_BACKWARD}


def _op(kind: Kind, index: int, part: int = 0, on: Kind | None = None, grad: Grad = Grad.BOTH) -> _Op:
    return kind, index, on, part, grad


class _Needs:
    """What must come before an op in the list of its team, where `place` has the ops of the list, and
    `chunks` are those that the team should encode.
    """

    def __init__(self, plan: StepPlan, team: int, place: dict[_Op, int], chunks: Sequence[int]) -> None:
        domain = plan.domain
        self.domain, self.components, self.place = domain, plan.components, place
        self.parts = domain.holds[team]
        self.with_rows = domain.parts_with_rows(team * domain.team)
        self.encodes: dict[int, list[_Op]] = defaultdict(list)  # of each microbatch
        self.gradients: dict[tuple[str, int], list[_Op]] = defaultdict(list)  # of each component and part
        llm = plan.components[domain.llm]
        for op in place:
            kind, index, _, part, _ = op
            if kind is Kind.ENCODE:
                for m in domain.chunks[index].microbatches:
                    self.encodes[m].append(op)
            elif kind in BACKWARDS:
                component = llm if kind is Kind.BACKWARD else domain.chunks[index].component
                self.gradients[component, part].append(op)
        for c in chunks:
            if (encode := _op(Kind.ENCODE, c)) not in place:
                for m in domain.chunks[c].microbatches:
                    self.encodes[m].append(encode)

    def of(self, op: _Op) -> Iterator[_Op]:
        kind, m, _, part, grad = op
        if kind is Kind.FORWARD:
            if part:
                near = part - 1 in self.parts
                yield _op(kind, m, part - 1) if near else _op(Kind.WAIT, m, part, Kind.RECV_FORWARD)
            if part in self.with_rows and self.domain.routes[m] is not None:
                yield _op(Kind.WAIT, m, on=Kind.SHIP)
        elif grad is Grad.WEIGHT:
            yield _op(kind, m, part, grad=Grad.INPUT)
        elif kind is Kind.BACKWARD:
            yield _op(Kind.FORWARD, m, part)
            if part < self.domain.num_parts - 1:
                near = part + 1 in self.parts
                yield self.backward(m, part + 1) if near else _op(Kind.WAIT, m, part, Kind.RECV_BACKWARD)
        elif kind is Kind.SEND_FORWARD:
            yield _op(Kind.FORWARD, m, part)
        elif kind is Kind.SEND_BACKWARD:
            yield self.backward(m, part)
        elif kind is Kind.SHIP:
            yield from self.encodes[m]
        elif kind is Kind.RETURN:
            yield _op(Kind.WAIT, m, on=Kind.SHIP)
            for own in self.with_rows:
                yield self.backward(m, own)
        elif kind is Kind.ENCODE_BACKWARD:
            yield _op(Kind.ENCODE, m)
            for batch in self.domain.chunks[m].microbatches:
                yield _op(Kind.WAIT, batch, on=Kind.RETURN)
        elif kind is Kind.REDUCE:
            component = self.components[m]
            yield from self.gradients[component, part]
            if m == self.domain.llm and part == 0 and self.domain.num_parts > 1:
                # Where the output is tied to the embedding of its own rank, the last part's passes make
                # gradients of the first part's weight. What is tied a plan does not say: it always waits.
                yield from self.gradients[component, self.domain.num_parts - 1]

    def backward(self, m: int, part: int) -> _Op:
        """The op of this team that makes the gradient of the input of a part."""
        split = _op(Kind.BACKWARD, m, part, grad=Grad.INPUT)
        return split if split in self.place else _op(Kind.BACKWARD, m, part)


def _waits(domain: DomainPlan, team: int, ops: Sequence[_Op]) -> Iterator[str]:
    issued: set[tuple[Kind | None, int, int]] = set()
    waited: set[tuple[Kind | None, int, int]] = set()
    for kind, index, on, part, _ in ops:
        if kind in ISSUED:
            if (kind, index, part) in issued:
                yield f"R4: {_ranks(domain, team)} issues {Op(kind, index, part=part)} twice"
            issued.add((kind, index, part))
        elif kind is Kind.WAIT:
            flight = (on, index, part)
            if flight not in issued or flight in waited:
                yield f"R4: {_ranks(domain, team)} waits for {on}({index}) that is not in flight"
            waited.add(flight)
    for kind, index, _, part, _ in ops:
        if kind in ISSUED and (kind, index, part) not in waited:
            yield f"R4: {_ranks(domain, team)} never waits for {Op(kind, index, part=part)}"


def _once(plan: StepPlan, lists: _Lists) -> Iterator[str]:
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
    for team, (ops, own) in enumerate(zip(lists, _expected(plan), strict=True)):
        counts = Counter([op for op in ops if op[0] not in ISSUED and op[0] is not Kind.WAIT])
        if counts != own:
            yield from _not_once(plan, team, counts, own)


def _not_once(plan: StepPlan, team: int, counts: Counter[_Op], own: dict[_Op, int]) -> Iterator[str]:
    """What a team does not run as often as it must, where a backward may be split."""
    learns = plan.trains(plan.components[plan.domain.llm])
    for op in dict.fromkeys((*own, *((*op[:4], Grad.BOTH) for op in counts))):
        whole = counts[op]
        halves = [counts[*op[:4], grad] for grad in (Grad.INPUT, Grad.WEIGHT)]
        split = [1, int(learns or op[0] is not Kind.BACKWARD)]
        if op in own and op[0] in BACKWARDS and not whole and halves == split:
            continue
        if whole == int(op in own) and not any(halves):
            continue
        times = f"{whole} times"
        if any(halves):
            times += f" whole, {halves[0]} times for inputs and {halves[1]} for weights"
        what, why = Op(*op), _why(op, plan)
        yield f"R5: {_ranks(plan.domain, team)} runs {what} {times}, not {int(op in own)}: {why}"


def _expected(plan: StepPlan) -> list[dict[_Op, int]]:
    """What each team must run once; a backward as a whole."""
    domain = plan.domain
    expected: list[dict[_Op, int]] = [{} for _ in domain.teams]
    for c, chunk in enumerate(domain.chunks):
        for kind in _ENCODER if plan.trains(chunk.component) else _ENCODER[:1]:
            for rank in range(chunk.ranks[0], chunk.ranks[-1] + 1, domain.team):
                expected[rank // domain.team][_op(kind, c)] = 1
    for number, component in enumerate(plan.components):
        if plan.trains(component):
            for part in range(domain.num_parts) if number == domain.llm else (0,):
                for team in domain.reducing(Op(Kind.REDUCE, number, part=part)):
                    expected[team][_op(Kind.REDUCE, number, part)] = 1
    kinds = (Kind.FORWARD, Kind.BACKWARD) if plan.train else (Kind.FORWARD,)
    passes = [(kind, m) for kind in kinds for m in range(len(domain.microbatches))]
    of_part = [{_op(kind, m, part): 1 for kind, m in passes} for part in range(domain.num_parts)]
    for team, parts in enumerate(domain.holds):
        for part in parts:
            expected[team].update(of_part[part])
    return expected


def _why(op: _Op, plan: StepPlan) -> str:
    """The reason for how often an op runs."""
    kind, index, *_ = op
    if kind in _ENCODER:
        return f"a chunk of ranks {plan.domain.chunks[index].ranks}"
    return plan.components[index] if kind is Kind.REDUCE else "a microbatch passes every part"


def _routes(domain: DomainPlan, lists: _Lists) -> Iterator[str]:
    """Every row leaves the rank that encoded it once, and arrives where its item stands, once."""
    for m, route in enumerate(domain.routes):
        for team, ops in enumerate(lists) if route is None else ():
            if any(op[0] in COLLECTIVE and op[1] == m for op in ops):
                yield f"R5: {_ranks(domain, team)} ships microbatch {m}, which has no route"
    try:
        routes = plan_routes(domain)
    except AssertionError as error:
        yield f"R5: rows have no place, or that of others: {error}"
        return
    for m, (route, expected) in enumerate(zip(domain.routes, routes, strict=True)):
        # How the rows travel is a choice; which rows and where to is not.
        if _rows(route) != _rows(expected):
            yield f"R5: the route of microbatch {m} does not bring each row to the place of its item"


def _rows(route: Route | None) -> object:
    return None if route is None else (route.num_ranks, route.segments)


def _in_flight(plan: StepPlan, kept: Kept) -> Iterator[str]:
    """Activations live from a forward to the last half of its backward."""
    domain, llm = plan.domain, plan.components[plan.domain.llm]
    bounds = dict(domain.bounds)
    names = [f"{llm}/{part}" for part in range(domain.num_parts)]
    for team, ops in enumerate(domain.ops):
        rank = team * domain.team
        live: dict[str, int] = defaultdict(int)
        if not any(op.kind in BACKWARDS for op in ops):
            continue  # forward only: activations die at once
        split = {(op.kind, op.index, op.part) for op in ops if op.grad is Grad.WEIGHT}
        held: dict[tuple[str, int], int] = {}
        for op in ops:
            if op.kind in _ENCODER:
                part = domain.chunks[op.index].component
            elif op.kind in (Kind.FORWARD, Kind.BACKWARD):
                part = names[op.part]
            else:
                continue
            if part not in bounds:
                continue
            if op.kind in (Kind.FORWARD, Kind.ENCODE):
                held[part, op.index] = kept(rank, op)
                live[part] += held[part, op.index]
                if live[part] > bounds[part]:
                    yield (
                        f"R6: {_ranks(domain, team)} holds {live[part]} bytes of activations of {part} at "
                        f"{op}, more than its bound of {bounds[part]}"
                    )
                    break
            elif op.grad is not Grad.INPUT or (op.kind, op.index, op.part) not in split:
                live[part] -= held.pop((part, op.index), 0)
