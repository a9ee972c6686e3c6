"""An abstract machine that runs op lists: at once the simulator of a step's time and rule R7 of the verifier.

Each rank runs its list in order. Compute takes time; issuing communication takes none; a WAIT blocks until
the communication it names is done. Communication completes in the order of issue on its channel: one channel
for each direction of each neighbouring pair, one for SHIP and one for RETURN. Ranks whose layers communicate
(tensor, sequence, expert parallelism) run an op together: it begins when all of them have come to it and
takes the time of the slowest, a transfer on a channel of their own. With `single_fifo` a rank has one channel
for everything, the strictest thing a GPU may do.

The machine is deterministic and confluent: if it runs the lists to the end, no interleaving of real ranks can
hang, whatever the op times; so one run proves it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.plan import COLLECTIVE, COMPUTE, ISSUED, DomainPlan, Kind, Op

ComputeCost = Callable[[int, Op], int]
MessageCost = Callable[[Op], int]
Transfer = tuple[str, int, int, int]  # kind, first rank, last rank, index
NEXT, PREVIOUS = "to_next_stage", "to_previous_stage"


class StuckError(Exception):
    """The lists cannot run to the end; the message says who waits for whom."""


@dataclass(frozen=True)
class Event:
    """One op of one rank, from `start_ns` to `end_ns`; waits appear with the time they cost."""

    op: Op
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Timeline:
    """What happened on every rank and when transfers started. All times are simulated nanoseconds."""

    events: tuple[tuple[Event, ...], ...]
    started_ns: dict[Transfer, int]

    @property
    def makespan_ns(self) -> int:
        """End of the last op of any rank."""
        return max((events[-1].end_ns for events in self.events if events), default=0)

    def waited_ns(self, rank: int) -> int:
        """Time that `rank` spent waiting."""
        return sum(e.end_ns - e.start_ns for e in self.events[rank] if e.op.kind is Kind.WAIT)


def transfer_of(op: Op, rank: int, domain: DomainPlan) -> Transfer:
    """Name the transfer that an op takes part in; all its ranks give it the same name."""
    kind, distance = op.kind, domain.stage_size
    if kind in COMPUTE:
        together = domain.parties(op, rank)
        return (kind, together[0], together[-1], op.index)
    if kind in COLLECTIVE:
        return (kind, 0, domain.num_ranks - 1, op.index)
    if kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD):
        first = rank if kind is Kind.SEND_FORWARD else rank - distance
        return (NEXT, first, first + distance, op.index)
    first = rank if kind is Kind.SEND_BACKWARD else rank + distance
    return (PREVIOUS, first, first - distance, op.index)


def communicates(op: Op, rank: int, domain: DomainPlan) -> bool:
    """Whether an op is communication, or compute whose layers communicate; a local route is neither."""
    if op.kind in COMPUTE:
        return len(domain.parties(op, rank)) > 1
    route = domain.routes[op.index] if op.kind in COLLECTIVE else None
    return op.kind in ISSUED and not (route is not None and route.is_local)


def run(
    domain: DomainPlan, compute_ns: ComputeCost, message_ns: MessageCost, single_fifo: bool = False
) -> Timeline:
    """Run the lists of all ranks of a domain to the end.

    Raises:
        StuckError: naming, for every rank that cannot go on, the op it stands at and whom it waits for.
    """
    ops = domain.ops
    num_ranks = len(ops)
    machine = _Machine(domain, compute_ns, message_ns, single_fifo)
    events: list[list[Event]] = [[] for _ in ops]
    counter = [0] * num_ranks
    clock = [0] * num_ranks
    progressed = True
    while progressed:
        progressed = False
        for rank in range(num_ranks):
            while counter[rank] < len(ops[rank]):
                op = ops[rank][counter[rank]]
                end = _advance(op, rank, clock[rank], machine)
                if end is None:
                    break
                events[rank].append(Event(op, clock[rank], end))
                clock[rank] = end
                counter[rank] += 1
                progressed = True
        progressed |= machine.complete()
    stuck = [rank for rank in range(num_ranks) if counter[rank] < len(ops[rank])]
    if stuck:
        raise StuckError("; ".join(machine.describe(r, ops[r][counter[r]], counter[r]) for r in stuck))
    return Timeline(tuple(map(tuple, events)), machine.started)


def _advance(op: Op, rank: int, now: int, machine: "_Machine") -> int | None:
    """Return when the op ends, or None if the rank must wait."""
    if op.kind in COMPUTE:
        if not communicates(op, rank, machine.domain):
            return now + machine.compute_ns(rank, op)
        transfer = transfer_of(op, rank, machine.domain)
        if (transfer, rank) not in machine.issued:
            machine.issue(rank, op, now)
        return machine.done_ns(transfer, rank)
    if op.kind in ISSUED:
        machine.issue(rank, op, now)
        return now
    if op.kind is Kind.WAIT:
        assert op.on is not None
        transfer = transfer_of(Op(op.on, op.index), rank, machine.domain)
        if (transfer, rank) not in machine.issued:
            raise StuckError(f"rank {rank} waits for {op.on}({op.index}), which it never issued before")
        done = machine.done_ns(transfer, rank)
        return None if done is None else max(now, done)
    return now  # REDUCE ends the step and is the same for all schedules


class _Machine:
    """Transfers in flight: each completes when it is first in line at all its ranks."""

    def __init__(
        self, domain: DomainPlan, compute_ns: ComputeCost, message_ns: MessageCost, single_fifo: bool
    ) -> None:
        self.domain = domain
        self.compute_ns = compute_ns
        self.message_ns = message_ns
        self.single_fifo = single_fifo
        self.queues: dict[tuple[int, object], deque[tuple[Transfer, Op]]] = defaultdict(deque)
        self.free: dict[tuple[int, object], int] = defaultdict(int)
        self.issued: dict[tuple[Transfer, int], int] = {}
        self.started: dict[Transfer, int] = {}
        self.done: dict[Transfer, int] = {}
        self.fresh: set[tuple[int, object]] = set()  # queues whose first in line may have changed

    def channel(self, transfer: Transfer) -> object:
        return "all" if self.single_fifo else transfer[:3]

    def ranks(self, transfer: Transfer) -> Sequence[int]:
        kind, first, last, _ = transfer
        return (first, last) if kind in (NEXT, PREVIOUS) else range(first, last + 1)

    def issue(self, rank: int, op: Op, now: int) -> None:
        transfer = transfer_of(op, rank, self.domain)
        self.issued[transfer, rank] = now
        if communicates(op, rank, self.domain):
            at = (rank, self.channel(transfer))
            self.queues[at].append((transfer, op))
            self.fresh.add(at)

    def done_ns(self, transfer: Transfer, rank: int) -> int | None:
        """When a transfer was done for `rank`, None if it is not; a local route is done when issued."""
        route = self.domain.routes[transfer[3]] if transfer[0] in COLLECTIVE else None
        if route is not None and route.is_local:
            return self.issued[transfer, rank]
        return self.done.get(transfer)

    def complete(self) -> bool:
        """Complete every transfer that is first in line everywhere; say whether there was one."""
        progressed = False
        while self.fresh:
            queue = self.queues[self.fresh.pop()]
            if not queue:
                continue
            transfer, op = queue[0]
            channel = self.channel(transfer)
            lines = [(rank, channel) for rank in self.ranks(transfer)]
            if not all(self.queues[at] and self.queues[at][0][0] == transfer for at in lines):
                continue
            start = max(max(self.issued[transfer, at[0]], self.free[at]) for at in lines)
            if op.kind in COMPUTE:
                end = start + max(self.compute_ns(rank, op) for rank, _ in lines)
            else:
                end = start + self.message_ns(op)
            self.started[transfer] = start
            self.done[transfer] = end
            for at in lines:
                self.queues[at].popleft()
                self.free[at] = end
            self.fresh.update(lines)
            progressed = True
        return progressed

    def describe(self, rank: int, op: Op, position: int) -> str:
        text = f"rank {rank} stands at op {position}, {op}"
        together = op.kind in COMPUTE and communicates(op, rank, self.domain)
        if not together and (op.kind is not Kind.WAIT or op.on is None):
            return text
        awaited = Op(op.on, op.index) if op.on is not None else op
        transfer = transfer_of(awaited, rank, self.domain)
        missing = [r for r in self.ranks(transfer) if (transfer, r) not in self.issued]
        if missing:
            return f"{text}, waiting for rank {', '.join(map(str, missing))} to take part"
        return f"{text}, behind another transfer on its channel"
