"""An abstract machine that runs op lists: at once the simulator of a step's time and rule R7 of the verifier.

Each team runs its list in order. Compute takes time; issuing communication takes none; a WAIT blocks until
the communication it names is done. Communication completes in the order of issue on its channel: one channel
for each direction of each pair that sends, one for SHIP and one for RETURN. Ranks whose layers communicate
(tensor, sequence, expert parallelism) run an op together: it begins when all of them have come to it and
takes the time of the slowest, a transfer on a channel of their own. A REDUCE is run together by all that
hold the part, and reductions complete in the plan's order: other domains take part, and if each domain can
run to the end with the reductions in one order, all of them can together. With `single_fifo` a rank has one
channel for everything, the strictest thing a GPU may do.

The machine is deterministic and confluent: if it runs the lists to the end, no interleaving of real ranks can
hang, whatever the op times; so one run proves it. Lists that run with one channel for everything run with
several too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from pipeline.plan import COLLECTIVE, COMPUTE, ISSUED, DomainPlan, Kind, Op

ComputeCost = Callable[[int, Op], int]
MessageCost = Callable[[Op], int]
Transfer = tuple[object, ...]
"""What ranks take part in together, by a name that all of them give it."""

_ALONE, _TOGETHER, _ISSUE, _WAIT = range(4)


class StuckError(Exception):
    """The lists cannot run to the end; the message says who waits for whom."""


@dataclass(frozen=True)
class Event:
    """One op of one team, from `start_ns` to `end_ns`; waits appear with the time they cost."""

    op: Op
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Timeline:
    """What happened: `ends_ns[t]` are when the ops of team t ended, each having begun when the one before
    it ended, and `started_ns` when transfers did. All times are simulated nanoseconds.
    """

    domain: DomainPlan
    ends_ns: tuple[tuple[int, ...], ...]
    started_ns: dict[Transfer, int]

    @cached_property
    def events(self) -> tuple[tuple[Event, ...], ...]:
        """The ops of each team with their times."""
        return tuple(
            tuple(map(Event, ops, (0, *ends), ends))
            for ops, ends in zip(self.domain.ops, self.ends_ns, strict=True)
        )

    @property
    def makespan_ns(self) -> int:
        """End of the last op of any rank."""
        return max((ends[-1] for ends in self.ends_ns if ends), default=0)

    def spent_ns(self, rank: int, *kinds: Kind) -> int:
        """Time that a position spent in ops of some kinds; a WAIT that others made it wait counts as one."""
        events = self.events[rank // self.domain.team]
        return sum(e.end_ns - e.start_ns for e in events if e.op.kind in kinds)

    def waited_ns(self, rank: int) -> int:
        """Time that a position spent waiting."""
        return self.spent_ns(rank, Kind.WAIT)


def transfer_of(op: Op, team: int, domain: DomainPlan) -> tuple[Transfer, Transfer, tuple[int, ...]]:
    """Name the transfer that an op of a team takes part in, its channel, and the teams that take part.

    All of these teams give it the same name.
    """
    kind, rank = op.kind, team * domain.team
    if kind in COLLECTIVE:
        return (kind, op.index), (kind,), domain.teams
    if kind in COMPUTE:
        together = domain.parties(op, rank)
        first, last = together[0] // domain.team, together[-1] // domain.team
        return (kind, first, last, op.index, op.part, op.grad), (first, last), tuple(range(first, last + 1))
    if kind is Kind.REDUCE:
        return (kind, op.index, op.part), (kind,), domain.reducing(op)
    source, destination = (position // domain.team for position in domain.sender(op, rank))
    # A message is called by the part that sends: of an output, the one below; of a gradient, the one above.
    direction = "activation" if kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD) else "gradient"
    shift = {Kind.RECV_FORWARD: -1, Kind.RECV_BACKWARD: 1}.get(kind, 0)
    channel = (direction, source, destination)
    return (*channel, op.index, op.part + shift), channel, (source, destination)


def communicates(op: Op, team: int, domain: DomainPlan) -> bool:
    """Whether an op is communication, or compute whose layers communicate; a local route is neither."""
    if op.kind in COMPUTE:
        return len(domain.parties(op, team * domain.team)) > domain.team
    if op.kind in COLLECTIVE:
        route = domain.routes[op.index]
        return route is None or not route.is_local
    return op.kind in ISSUED or op.kind is Kind.REDUCE


def run(
    domain: DomainPlan, compute_ns: ComputeCost, message_ns: MessageCost, single_fifo: bool = False
) -> Timeline:
    """Run the lists of all teams of a domain to the end.

    `compute_ns` gives the time of a compute op or a REDUCE at a position, `message_ns` that of what an op
    issues.

    Raises:
        StuckError: naming, for every rank that cannot go on, the op it stands at and whom it waits for.
    """
    return _Machine(domain, compute_ns, message_ns, single_fifo).run()


class _Flight:
    """A transfer: it completes once it is first in line at all its teams. `behind` is what must be complete
    before, for reductions; `ready` counts the teams where it is first.
    """

    __slots__ = ("behind", "channel", "done", "issued", "name", "ns", "ready", "start", "teams", "waiting")

    def __init__(self, name: Transfer, channel: Transfer, teams: tuple[int, ...]) -> None:
        self.name, self.channel, self.teams = name, channel, teams
        self.ns = self.ready = 0
        self.start, self.done = -1, -1
        self.issued: dict[int, int] = {}
        self.behind: _Flight | None = None
        self.waiting: list[int] = []


class _Queue:
    """Transfers of one team on one channel, in the order of issue: those before `head` are complete, the
    last of them at `free`.
    """

    __slots__ = ("flights", "free", "head")

    def __init__(self) -> None:
        self.flights: list[_Flight] = []
        self.head = self.free = 0


class _Machine:
    def __init__(
        self, domain: DomainPlan, compute_ns: ComputeCost, message_ns: MessageCost, single_fifo: bool
    ) -> None:
        self.domain = domain
        self.single_fifo = single_fifo
        self.flights: dict[Transfer, _Flight] = {}
        self.queues: dict[tuple[int, Transfer | None], _Queue] = {}
        self.programs = [
            [self._compiled(op, team, compute_ns, message_ns) for op in ops]
            for team, ops in enumerate(domain.ops)
        ]
        before = None
        for pair in domain.reductions:
            flight = self.flights.get((Kind.REDUCE, *pair))
            if flight is not None:
                flight.behind, before = before, flight
        self.complete: list[_Flight] = []

    def _compiled(
        self, op: Op, team: int, compute_ns: ComputeCost, message_ns: MessageCost
    ) -> tuple[int, int, _Flight | None]:
        """What running an op takes: how it runs, its time if it runs alone, the transfer it takes part in."""
        kind, domain = op.kind, self.domain
        if kind is Kind.WAIT:
            assert op.on is not None
            return _WAIT, 0, self._flight(Op(op.on, op.index, part=op.part), team)
        if kind in ISSUED:
            flight = self._flight(op, team)
            if not flight.ns and communicates(op, team, domain):
                flight.ns = message_ns(op)
            return _ISSUE, 0, flight
        ns = compute_ns(team * domain.team, op)
        if not communicates(op, team, domain):
            return _ALONE, ns, None
        flight = self._flight(op, team)
        flight.ns = max(flight.ns, ns)
        return _TOGETHER, ns, flight

    def _flight(self, op: Op, team: int) -> _Flight:
        name, channel, teams = transfer_of(op, team, self.domain)
        flight = self.flights.get(name)
        if flight is None:
            if op.kind in COLLECTIVE and not communicates(op, team, self.domain):
                channel = ()
            flight = self.flights[name] = _Flight(name, channel, teams)
        return flight

    def run(self) -> Timeline:
        at = [0] * len(self.programs)
        clock = [0] * len(self.programs)
        ends: list[list[int]] = [[] for _ in self.programs]
        runnable = list(range(len(self.programs)))
        while runnable:
            for team in runnable:
                at[team], clock[team] = self._advance(team, at[team], clock[team], ends[team])
            woken = {team for flight in self._complete() for team in flight.waiting}
            runnable = sorted(woken)
        stuck = [team for team, program in enumerate(self.programs) if at[team] < len(program)]
        if stuck:
            raise StuckError("; ".join(self._describe(team, at[team]) for team in stuck))
        started = {name: flight.start for name, flight in self.flights.items()}
        return Timeline(self.domain, tuple(map(tuple, ends)), started)

    def _advance(self, team: int, at: int, now: int, ends: list[int]) -> tuple[int, int]:
        """Run a team's ops until one must wait. Returns the op it stands at and the team's time."""
        program = self.programs[team]
        while at < len(program):
            how, ns, flight = program[at]
            if how == _ALONE:
                now += ns
            else:
                assert flight is not None
                if how == _ISSUE:
                    self._issue(flight, team, now)
                else:
                    if team not in flight.issued:
                        if how == _WAIT:
                            op = self.domain.ops[team][at]
                            raise StuckError(
                                f"rank {team * self.domain.team} waits for {op.on}({op.index}), which it "
                                "never issued before"
                            )
                        self._issue(flight, team, now)
                    if not flight.channel:  # a route that leaves no rank is done when it is issued
                        now = max(now, flight.issued[team])
                    elif flight.done < 0:
                        flight.waiting.append(team)
                        break
                    else:
                        now = max(now, flight.done)
            ends.append(now)
            at += 1
        return at, now

    def _issue(self, flight: _Flight, team: int, now: int) -> None:
        flight.issued[team] = now
        if not flight.channel:
            return
        queue = self._queue(flight, team)
        queue.flights.append(flight)
        if queue.flights[queue.head] is flight:
            self._is_first(flight)

    def _queue(self, flight: _Flight, team: int) -> _Queue:
        key = (team, None if self.single_fifo else flight.channel)
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = _Queue()
        return queue

    def _is_first(self, flight: _Flight) -> None:
        flight.ready += 1
        if flight.ready == len(flight.teams):
            self.complete.append(flight)

    def _complete(self) -> list[_Flight]:
        """Complete every transfer that is first in line everywhere, and those that this lets be first."""
        done: list[_Flight] = []
        held: list[_Flight] = []  # reductions behind one that is not complete
        while self.complete:
            flight = self.complete.pop()
            earliest = 0 if flight.behind is None else flight.behind.done
            if earliest < 0:
                held.append(flight)
                continue
            queues = [self._queue(flight, team) for team in flight.teams]
            came = [max(flight.issued[t], q.free) for t, q in zip(flight.teams, queues, strict=True)]
            flight.start = max(earliest, *came)
            flight.done = flight.start + flight.ns
            done.append(flight)
            for queue in queues:
                queue.free = flight.done
                queue.head += 1
                if queue.head < len(queue.flights):
                    self._is_first(queue.flights[queue.head])
            if flight.name[0] is Kind.REDUCE:
                self.complete += held
                held.clear()
        self.complete = held
        return done

    def _describe(self, team: int, at: int) -> str:
        op, (how, _, flight) = self.domain.ops[team][at], self.programs[team][at]
        text = f"rank {team * self.domain.team} stands at op {at}, {op}"
        if how not in (_TOGETHER, _WAIT) or flight is None:
            return text
        missing = [other * self.domain.team for other in flight.teams if other not in flight.issued]
        if missing:
            return f"{text}, waiting for rank {', '.join(map(str, missing))} to take part"
        if flight.behind is not None and flight.behind.done < 0:
            return f"{text}, behind a reduction that other domains make first"
        return f"{text}, behind another transfer on its channel"
