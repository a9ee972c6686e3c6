"""From an order of compute to op lists: insert every communication and every wait, by fixed rules.

- A receive is issued before the compute that precedes its use, so that it overlaps with that compute.
- SHIP(m) follows the rank's last encoder batch of all microbatches up to m: one order on every rank (R1).
- RETURN(m) is issued as soon as the rank's own backward of m is done, long before any rank waits for it: a
  return issued only where it is needed would make every encoder batch a barrier. All ranks return in the
  order in which the first one goes back. A rank beside the LLM has no backward to wait for: it issues each
  return with its shipment, or ranks that it shares the domain with would wait for it to go back itself.
- A send is waited for once something has come back that its receiver made after using it, else at the end. So
  no send waits for its receive: where virtual stages interleave, ranks that send to each other in a circle
  would hang.
- A virtual stage hands on to another virtual stage of its own rank without a message.
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
    went_back = (
        op for op in order[0] if op.kind is Kind.BACKWARD and op.makes_input and op.virtual_stage == 0
    )
    returns = [op.index for op in went_back if op.index in returned]
    places = [_places(ops) for ops in order]
    made: dict[_Fields, Op] = {}
    return [_Expanded(domain, team, ops, returns, places, made).run() for team, ops in enumerate(order)]


def _places(order: list[Op]) -> dict[_Flight, int]:
    """Where a team's passes stand in its order, of split backwards the half that makes what goes on."""
    passes = (Kind.FORWARD, Kind.BACKWARD)
    return {
        (op.kind, op.index, op.virtual_stage): at
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
        self.virtual_stages = domain.holds[team]
        self.takes_rows = bool(domain.virtual_stages_with_rows(self.rank))
        self.out: list[Op] = []
        self.unwaited: dict[_Flight, None] = {}
        # Sends that are not waited for, by the team they go to, with where this team uses them.
        self.sending: dict[int, list[tuple[int, _Flight]]] = defaultdict(list)
        self.receives = {
            Kind.RECV_FORWARD: deque(
                (op.index, op.virtual_stage)
                for op in order
                if op.kind is Kind.FORWARD
                and op.virtual_stage
                and op.virtual_stage - 1 not in self.virtual_stages
            ),
            Kind.RECV_BACKWARD: deque(
                (op.index, op.virtual_stage)
                for op in order
                if op.kind is Kind.BACKWARD
                and op.makes_input
                and domain.hands_on(op.virtual_stage, self.rank)
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
                self.issue(op.kind, op.index, op.virtual_stage)
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
        m, virtual_stage = op.index, op.virtual_stage
        if self.takes_rows:
            self.wait(Kind.SHIP, m)
        self.take(Kind.RECV_FORWARD, m, virtual_stage, (Kind.FORWARD, m, virtual_stage - 1))
        self.run_op(op)
        if self.domain.hands_on(virtual_stage, self.rank):
            self.send(Kind.SEND_FORWARD, m, virtual_stage, (Kind.FORWARD, m, virtual_stage + 1))

    def backward(self, op: Op) -> None:
        m, virtual_stage = op.index, op.virtual_stage
        self.take(Kind.RECV_BACKWARD, m, virtual_stage, (Kind.BACKWARD, m, virtual_stage + 1))
        self.run_op(op)
        while self.order and (self.order[0].kind, self.order[0].index) == (Kind.REDUCE, self.domain.llm):
            self.issue(Kind.REDUCE, self.domain.llm, self.order.popleft().virtual_stage)
        if virtual_stage and virtual_stage - 1 not in self.virtual_stages:
            self.send(Kind.SEND_BACKWARD, m, virtual_stage, (Kind.BACKWARD, m, virtual_stage - 1))
        self.unpassed[m] -= 1
        self.return_ready()

    def take(self, kind: Kind, m: int, virtual_stage: int, made_by: _Flight) -> None:
        """Wait for what a virtual stage receives, if it receives anything, and issue the next receive."""
        if (kind, m, virtual_stage) not in self.unwaited:
            return
        self.wait(kind, m, virtual_stage)
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
        self.put(op.kind, op.index, op.on, op.virtual_stage, op.grad)

    def put(
        self, kind: Kind, index: int, on: Kind | None, virtual_stage: int, grad: Grad = Grad.BOTH
    ) -> None:
        """Append an op to the list."""
        key = kind, index, on, virtual_stage, grad
        op = self.made.get(key)
        if op is None:
            op = self.made[key] = Op(*key)
        self.out.append(op)

    def issue(self, kind: Kind, m: int, virtual_stage: int = 0) -> None:
        self.put(kind, m, None, virtual_stage)
        self.unwaited[kind, m, virtual_stage] = None

    def wait(self, kind: Kind, m: int, virtual_stage: int = 0) -> None:
        if (kind, m, virtual_stage) in self.unwaited:
            del self.unwaited[kind, m, virtual_stage]
            self.put(Kind.WAIT, m, kind, virtual_stage)

    def receive(self, kind: Kind) -> None:
        if self.receives[kind]:
            self.issue(kind, *self.receives[kind].popleft())

    def send(self, kind: Kind, m: int, virtual_stage: int, used_by: _Flight) -> None:
        self.issue(kind, m, virtual_stage)
        team, at = self.other(used_by)
        self.sending[team].append((at, (kind, m, virtual_stage)))

    def ship_ready(self) -> None:
        while self.ships and not any(self.unencoded[: self.ships[0] + 1]):
            self.issue(Kind.SHIP, self.ships.popleft())
            if not self.virtual_stages:
                self.return_ready()

    def return_ready(self) -> None:
        while self.returns and not self.unpassed[self.returns[0]] and self.returns[0] not in self.ships:
            m = self.returns.popleft()
            if self.virtual_stages:
                self.wait(Kind.SHIP, m)
            self.issue(Kind.RETURN, m)
