"""From an order of compute to op lists: insert every communication and every wait, by fixed rules.

- A receive is issued before the compute that precedes its use, so that it overlaps with that compute.
- SHIP(m) follows the rank's last encoder batch of all microbatches up to m: one order on every rank (R1).
- RETURN(m) is issued as soon as the rank's own backward of m is done, long before any rank waits for it: a
  return issued only where it is needed would make every encoder batch a barrier. All ranks return in the
  order in which the first one goes back. A rank beside the LLM has no backward to wait for: it issues each
  return with its shipment, or ranks that it shares the domain with would wait for it to go back itself.
- A send is waited for once something has come back that its receiver made after using it, else at the end. So
  no send waits for its receive: where parts interleave, ranks that send to each other in a circle would hang.
- A part hands on to another part of its own rank without a message.
- A reduction is issued where it stands and waited for at the end. The LLM's that follows a backward comes in
  front of what that sends, as it begins behind the backward. Gradients of weights stay where they stand.
"""

from collections import defaultdict, deque

from parallel.work import Grad
from pipeline.domain_plan import DomainPlan
from pipeline.ops import BACKWARDS, Kind, Op

_Flight = tuple[Kind, int, int]
_Fields = tuple[Kind, int, Kind | None, int, Grad]


def expand(order: list[list[Op]], domain: DomainPlan) -> list[list[Op]]:
    """Insert all communication into an order of compute, for every team of a domain."""
    returned = {
        m
        for ops in order
        for op in ops
        if op.kind is Kind.ENCODE_BACKWARD
        for m in domain.encoder_batches[op.index].microbatches
    }
    went_back = (op for op in order[0] if op.kind is Kind.BACKWARD and op.makes_input and op.part == 0)
    returns = [op.index for op in went_back if op.index in returned]
    places = [_places(ops) for ops in order]
    made: dict[_Fields, Op] = {}
    return [_Expanded(domain, team, ops, returns, places, made).run() for team, ops in enumerate(order)]


def _places(order: list[Op]) -> dict[_Flight, int]:
    """Where a team's passes stand in its order, of split backwards the half that makes what goes on."""
    passes = (Kind.FORWARD, Kind.BACKWARD)
    return {
        (op.kind, op.index, op.part): at
        for at, op in enumerate(order)
        if op.kind in passes and op.makes_input
    }


class _Expanded:
    """The op list of one team in the making."""

    def __init__(
        self,
        domain: DomainPlan,
        team: int,
        order: list[Op],
        returns: list[int],
        places: list[dict[_Flight, int]],
        made: dict[_Fields, Op],
    ) -> None:
        self.domain, self.order, self.places = domain, deque(order), places
        self.made = made  # teams share the ops that are equal
        self.rank = team * domain.team
        self.parts = domain.holds[team]
        self.takes_rows = bool(domain.parts_with_rows(self.rank))
        self.out: list[Op] = []
        self.unwaited: dict[_Flight, None] = {}
        # Sends that are not waited for, by the team they go to, with where this team uses them.
        self.sending: dict[int, list[tuple[int, _Flight]]] = defaultdict(list)
        self.receives = {
            Kind.RECV_FORWARD: deque(
                (op.index, op.part)
                for op in order
                if op.kind is Kind.FORWARD and op.part and op.part - 1 not in self.parts
            ),
            Kind.RECV_BACKWARD: deque(
                (op.index, op.part)
                for op in order
                if op.kind is Kind.BACKWARD and op.makes_input and domain.hands_on(op.part, self.rank)
            ),
        }
        # What keeps a microbatch from being shipped or returned: ops of this team that are to come.
        self.unencoded = [0] * len(domain.microbatches)
        self.unpassed = [0] * len(domain.microbatches)
        for op in order:
            if op.kind is Kind.ENCODE:
                for m in domain.encoder_batches[op.index].microbatches:
                    self.unencoded[m] += 1
            elif op.kind is Kind.BACKWARD and op.makes_input:
                self.unpassed[op.index] += 1
        self.ships = deque(m for m, route in enumerate(domain.routes) if route is not None)
        self.returns = deque(returns)

    def run(self) -> list[Op]:
        """Walk the order once."""
        for kind in self.receives:
            self.receive(kind)
        self.ship_ready()
        while self.order:
            op = self.order.popleft()
            if op.kind is Kind.FORWARD:
                self.forward(op)
            elif op.kind is Kind.REDUCE:
                self.issue(op.kind, op.index, op.part)
            elif op.kind in BACKWARDS and not op.makes_input:
                self.run_op(op)
            elif op.kind is Kind.BACKWARD:
                self.backward(op)
            elif op.kind is Kind.ENCODE:
                self.encode(op)
            else:
                self.encode_backward(op)
        self.return_ready()
        for flight in sorted(self.unwaited, key=lambda flight: (flight[0] is Kind.REDUCE, flight)):
            self.wait(*flight)
        return self.out

    def encode(self, op: Op) -> None:
        self.run_op(op)
        for m in self.domain.encoder_batches[op.index].microbatches:
            self.unencoded[m] -= 1
        self.ship_ready()

    def encode_backward(self, op: Op) -> None:
        assert op.kind is Kind.ENCODE_BACKWARD, f"{op} is not compute"
        for m in self.domain.encoder_batches[op.index].microbatches:
            self.wait(Kind.SHIP, m)
            self.wait(Kind.RETURN, m)
        self.run_op(op)

    def forward(self, op: Op) -> None:
        m, part = op.index, op.part
        if self.takes_rows:
            self.wait(Kind.SHIP, m)
        self.take(Kind.RECV_FORWARD, m, part, (Kind.FORWARD, m, part - 1))
        self.run_op(op)
        if part < self.domain.num_parts - 1 and part + 1 not in self.parts:
            self.send(Kind.SEND_FORWARD, m, part, (Kind.FORWARD, m, part + 1))

    def backward(self, op: Op) -> None:
        m, part = op.index, op.part
        self.take(Kind.RECV_BACKWARD, m, part, (Kind.BACKWARD, m, part + 1))
        self.run_op(op)
        while self.order and (self.order[0].kind, self.order[0].index) == (Kind.REDUCE, self.domain.llm):
            self.issue(Kind.REDUCE, self.domain.llm, self.order.popleft().part)
        if part and part - 1 not in self.parts:
            self.send(Kind.SEND_BACKWARD, m, part, (Kind.BACKWARD, m, part - 1))
        self.unpassed[m] -= 1
        self.return_ready()

    def take(self, kind: Kind, m: int, part: int, made_by: _Flight) -> None:
        """Wait for what a part receives, if it receives anything, and issue the next receive."""
        if (kind, m, part) not in self.unwaited:
            return
        self.wait(kind, m, part)
        team, at = self.other(made_by)
        for used, flight in self.sending[team]:
            if used <= at:
                self.wait(*flight)
        self.sending[team] = [entry for entry in self.sending[team] if entry[0] > at]
        self.receive(kind)

    def other(self, compute: _Flight) -> tuple[int, int]:
        """The team that runs a pass at the other end of a message, and where in its order."""
        team = self.domain.holder(compute[2], self.rank) // self.domain.team
        return team, self.places[team][compute]

    def run_op(self, op: Op) -> None:
        self.put(op.kind, op.index, op.on, op.part, op.grad)

    def put(self, kind: Kind, index: int, on: Kind | None, part: int, grad: Grad = Grad.BOTH) -> None:
        """Append an op to the list."""
        key = kind, index, on, part, grad
        op = self.made.get(key)
        if op is None:
            op = self.made[key] = Op(*key)
        self.out.append(op)

    def issue(self, kind: Kind, m: int, part: int = 0) -> None:
        self.put(kind, m, None, part)
        self.unwaited[kind, m, part] = None

    def wait(self, kind: Kind, m: int, part: int = 0) -> None:
        if (kind, m, part) in self.unwaited:
            del self.unwaited[kind, m, part]
            self.put(Kind.WAIT, m, kind, part)

    def receive(self, kind: Kind) -> None:
        if self.receives[kind]:
            self.issue(kind, *self.receives[kind].popleft())

    def send(self, kind: Kind, m: int, part: int, used_by: _Flight) -> None:
        self.issue(kind, m, part)
        team, at = self.other(used_by)
        self.sending[team].append((at, (kind, m, part)))

    def ship_ready(self) -> None:
        while self.ships and not any(self.unencoded[: self.ships[0] + 1]):
            self.issue(Kind.SHIP, self.ships.popleft())
            if not self.parts:
                self.return_ready()

    def return_ready(self) -> None:
        while self.returns and not self.unpassed[self.returns[0]] and self.returns[0] not in self.ships:
            m = self.returns.popleft()
            if self.parts:
                self.wait(Kind.SHIP, m)
            self.issue(Kind.RETURN, m)
