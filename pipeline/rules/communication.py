"""R1, R2 and R4: ranks that communicate agree on the order, and wait once for what they issue."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from pipeline.domain_plan import DomainPlan
from pipeline.ops import ISSUED, POINT_TO_POINT, Kind, Op
from pipeline.rules.lists import Fields, Lists, who


def collective_order(domain: DomainPlan, lists: Lists) -> Iterator[str]:
    """R1: shipments are in one order on all ranks, reductions in the plan's order."""
    # A route that never leaves its ranks is no collective.
    local = [route is not None and route.is_local for route in domain.routes]
    for kind in (Kind.SHIP, Kind.RETURN):
        orders = [[op[1] for op in ops if op[0] is kind and not local[op[1]]] for ops in lists]
        for team, order in enumerate(orders):
            if order != orders[0]:
                yield f"R1: {who(domain, team)} issues {kind} in order {order}, domain rank 0 {orders[0]}"
    place = {pair: number for number, pair in enumerate(domain.reductions)}
    for team, ops in enumerate(lists):
        reduced = [(op[1], op[3]) for op in ops if op[0] is Kind.REDUCE]
        places = [place.get(pair, -1) for pair in reduced]
        if -1 in places or places != sorted(places):
            yield f"R1: {who(domain, team)} reduces in order {reduced}, not that of the plan"


def pair_order(domain: DomainPlan, lists: Lists) -> Iterator[str]:
    """R2: messages by directed pair of teams and by what they carry, as sent and as received."""
    sent: dict[tuple[bool, int, int], list[tuple[int, int]]] = defaultdict(list)
    received: dict[tuple[bool, int, int], list[tuple[int, int]]] = defaultdict(list)
    for team, ops in enumerate(lists):
        # With the virtual stage that takes them.
        lines: dict[tuple[Kind, int], tuple[list[tuple[int, int]], int]] = {}
        for kind, index, _, virtual_stage, _ in ops:
            if kind not in POINT_TO_POINT:
                continue
            line = lines.get((kind, virtual_stage))
            if line is None:
                forward = kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
                op = Op(kind, index, virtual_stage=virtual_stage)
                pair = (forward, *domain.sender(op, team * domain.team))
                sends = kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
                to = virtual_stage + (1 if forward else -1) if sends else virtual_stage
                line = lines[kind, virtual_stage] = (sent if sends else received)[pair], to
            line[0].append((index, line[1]))
    for pair in sorted(sent.keys() | received.keys()):
        forward, source, destination = pair
        if sent[pair] != received[pair]:
            what = "send_forward" if forward else "send_backward"
            out, into = (_messages(of[pair], domain) for of in (sent, received))
            yield f"R2: domain rank {source} sends {what} {out}, domain rank {destination} receives {into}"


def _messages(messages: Sequence[tuple[int, int]], domain: DomainPlan) -> list[object]:
    """Microbatches, with the virtual stage that takes them where a rank may hold several."""
    several = any(len(held) > 1 for held in domain.holds)
    return [message if several else message[0] for message in messages]


def waits_once(domain: DomainPlan, team: int, ops: Sequence[Fields]) -> Iterator[str]:
    """R4: what a team issues it waits for, once and later."""
    issued: set[tuple[Kind | None, int, int]] = set()
    waited: set[tuple[Kind | None, int, int]] = set()
    for kind, index, on, virtual_stage, _ in ops:
        if kind in ISSUED:
            if (kind, index, virtual_stage) in issued:
                yield f"R4: {who(domain, team)} issues {Op(kind, index, virtual_stage=virtual_stage)} twice"
            issued.add((kind, index, virtual_stage))
        elif kind is Kind.WAIT:
            flight = (on, index, virtual_stage)
            if flight not in issued or flight in waited:
                yield f"R4: {who(domain, team)} waits for {on}({index}) that is not in flight"
            waited.add(flight)
    for kind, index, _, virtual_stage, _ in ops:
        if kind in ISSUED and (kind, index, virtual_stage) not in waited:
            yield f"R4: {who(domain, team)} never waits for {Op(kind, index, virtual_stage=virtual_stage)}"
