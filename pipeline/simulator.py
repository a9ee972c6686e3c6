"""An abstract machine that runs op lists: at once the simulator of a step's time and rule R7 of the verifier.

Each team runs its list in order. Compute takes time; issuing communication takes none, unless the rank does
it itself (`issue_ns`); a WAIT blocks until the communication it names is done. Communication completes in the
order of issue on its channel: one for each direction of each pair that sends, one for SHIP and one for
RETURN. Ranks whose layers communicate (tensor, sequence, expert parallelism) run an op together: it begins
when all of them have come to it and takes the time of the slowest, a transfer on a channel of their own. A
REDUCE is issued by all that hold the part; those of a rank run one after the other, and all complete in the
plan's order: other domains take part, and if each domain can run to the end with the reductions in one order,
all of them can together. Weights of the last update are still being gathered when the lists begin: a forward
begins when those of its part have arrived, and a reduction may have begun behind the backward in front of it.
With `single_fifo` a rank has one channel for everything, the strictest thing a GPU
may do. A pass within which any rank of those that run it together issues messages runs in parts.

The machine is deterministic and confluent: if it runs the lists to the end, no interleaving of real ranks can
hang, whatever the op times; so one run proves it. Lists that run with one channel for everything run with
several too.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from pipeline.channels import Channel, Channels, Name, Queue, Transfer
from pipeline.domain_plan import DomainPlan
from pipeline.ops import COLLECTIVE, FORWARDS, ISSUED, PARTS, Kind, Op, issued_within

ComputeCost = Callable[[int, Op], int]
MessageCost = Callable[[Op], int]

Behind = tuple[ComputeCost, ComputeCost]

_ALONE, _TOGETHER, _ISSUE, _WAIT = range(4)


def nothing(rank: int, op: Op) -> int:
    """The cost of what is free."""
    return 0


def part_ns(ns: int, first: int, stop: int) -> int:
    """What parts of a pass of so many nanoseconds take, from the `first` to the last one before `stop`."""
    return ns * stop // PARTS - ns * first // PARTS


def passes_with_messages(lists: Sequence[Sequence[Op]]) -> Iterator[tuple[int, int, Op]]:
    """Yield the passes within which messages are issued: team, place in its list, and op."""
    for team, ops in enumerate(lists):
        for at, op in enumerate(ops[1:]):
            if op.within and not ops[at].within:
                yield team, at, ops[at]


class StuckError(Exception):
    """The lists cannot run to the end; the message says who waits for whom."""


@dataclass(frozen=True)
class OpEvent:
    """One op of one team, from `start_ns` to `end_ns`; waits appear with the time they cost."""

    op: Op
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Timeline:
    """What happened: `ends_ns[t]` are when the ops of team t ended, each having begun when the one before
    it ended, with messages within a pass when that did, and `transfers[t]` what each of these ops took part
    in, of a pass in parts the first one, None for what the team did alone;
    `weights_ns[t]` is how long ops waited for weights, by their place in the list. All times are simulated
    nanoseconds.
    """

    domain: DomainPlan
    ends_ns: tuple[tuple[int, ...], ...]
    transfers: tuple[tuple[Transfer | None, ...], ...]
    weights_ns: tuple[Mapping[int, int], ...]

    @cached_property
    def events(self) -> tuple[tuple[OpEvent, ...], ...]:
        """The ops of each team with their times."""
        return tuple(
            tuple(map(OpEvent, ops, (0, *ends), ends))
            for ops, ends in zip(self.domain.ops, self.ends_ns, strict=True)
        )

    @property
    def makespan_ns(self) -> int:
        """End of the last op of any rank."""
        return max((ends[-1] for ends in self.ends_ns if ends), default=0)

    def waited_ns(self, rank: int) -> int:
        """Time that a domain rank spent waiting."""
        events = self.events[rank // self.domain.team]
        return sum(e.end_ns - e.start_ns for e in events if e.op.kind is Kind.WAIT)


_Running = tuple[int, int, Transfer | None, Queue | None, int]
"""What running an op takes: how it runs, its time if it runs alone, what it takes part in, in which queue; of
a forward when the weights are there that it begins with, of a REDUCE how much earlier it began.
"""


def run(
    domain: DomainPlan,
    compute_ns: ComputeCost,
    message_ns: MessageCost,
    single_fifo: bool = False,
    issue_ns: int = 0,
    behind: Behind = (nothing, nothing),
) -> Timeline:
    """Run the lists of all teams of a domain to the end.

    `compute_ns` gives the time of a compute op or a REDUCE at a domain rank, `message_ns` that of what else
    an op issues, of which a rank itself spends `issue_ns` on issuing it, and as much on taking in what came;
    `behind` says when a domain rank has the weights that a forward begins with, from the start unless given,
    and how long before its place a REDUCE began, behind the backward in front of it.

    Raises:
        StuckError: naming, for every rank that cannot go on, the op it stands at and whom it waits for.
    """
    return _Simulation(domain, compute_ns, message_ns, single_fifo, issue_ns, behind).run()


class _Simulation:
    def __init__(
        self,
        domain: DomainPlan,
        compute_ns: ComputeCost,
        message_ns: MessageCost,
        single_fifo: bool,
        issue_ns: int,
        behind: Behind,
    ) -> None:
        self.domain = domain
        self.single_fifo, self.issue_ns = single_fifo, issue_ns
        self.compute_ns, self.message_ns = compute_ns, message_ns
        self.arrival_ns, self.before_ns = behind
        self.begun = set[tuple[int, int | str]]()  # teams, with the virtual stage or the encoder
        self.local = [route is not None and route.is_local for route in domain.routes]
        self.nothing = Transfer((), ())  # a route that leaves no rank is done when it is issued
        self.nothing.done = 0
        self.channels = Channels(domain, single_fifo)
        # Where parts end of passes within which messages are issued, for all that run these together.
        self.cuts = defaultdict[Name, set[int]](set)
        for team, at, op in passes_with_messages(domain.ops):
            self.cuts[self._pass(op, team)] |= {each.within for each in issued_within(domain.ops[team], at)}
        self.parts: list[tuple[Transfer, Transfer, int, int]] = []  # of which pass, and from where to where
        programs = [list(self._program(team)) for team in range(len(domain.ops))]
        self.programs = [[step for _, step in program] for program in programs]
        self.places = [[at for at, _ in program] for program in programs]  # of the ops of steps
        for part, whole, first, stop in self.parts:
            part.ns = part_ns(whole.ns, first, stop)
        before = None
        for number, virtual_stage in domain.reductions:
            op = Op(Kind.REDUCE, number, virtual_stage=virtual_stage)
            channel = self.channels.found.get(self.channels.name_of(op))
            if channel is not None:
                (reduction,) = channel.transfers.values()
                reduction.behind, before = before, reduction
        self.complete: list[Transfer] = []
        self.ends: list[list[int]] = [[] for _ in self.programs]
        self.weights_ns: list[dict[int, int]] = [{} for _ in self.programs]

    def _program(self, team: int) -> Iterator[tuple[int, _Running]]:
        """The steps of a team, each with the place of its op."""
        issued: dict[tuple[Kind | None, int, int], Transfer] = {}
        ops = self.domain.ops[team]

        def issuing(op: Op) -> _Running:
            if op.kind in COLLECTIVE and self.local[op.index]:
                issued[op.kind, op.index, op.virtual_stage] = self.nothing
                return _ALONE, self.issue_ns, None, None, 0
            transfer, queue = self._issuing(op, team)
            issued[op.kind, op.index, op.virtual_stage] = transfer
            before = self.before_ns(team * self.domain.team, op) if op.kind is Kind.REDUCE else 0
            return _ISSUE, self.issue_ns, transfer, queue, before

        for at, op in enumerate(ops):
            kind = op.kind
            if op.within:
                continue  # it was issued within the pass before
            if kind is Kind.WAIT:
                yield at, (_WAIT, self.issue_ns, issued.get((op.on, op.index, op.virtual_stage)), None, 0)
            elif kind in ISSUED:
                yield at, issuing(op)
            elif cuts := self.cuts and self.cuts.get(self._pass(op, team)):
                messages = list(enumerate(issued_within(ops, at), at + 1))
                for first, stop in pairwise((0, *sorted(cuts), PARTS)):
                    yield at, self._computing(op, team, first, stop)
                    yield from ((place, issuing(each)) for place, each in messages if each.within == stop)
            else:
                yield at, self._computing(op, team)

    def _pass(self, op: Op, team: int) -> Name:
        """What a pass is called by all teams that run it together."""
        channel = self.channels.compute(op, team)
        return (channel.name if channel else team), op.kind, op.index, op.virtual_stage, op.grad

    def _issuing(self, op: Op, team: int) -> tuple[Transfer, Queue]:
        if op.kind is Kind.REDUCE:
            return self._reducing(op, team)
        if op.kind in COLLECTIVE:
            channel = self.channels.collective(op.kind)
            key: Name = (op.index,)
        else:
            channel, virtual_stage = self.channels.message(op, team)
            key = (op.index, virtual_stage)
        transfer = channel.transfers.get(key)
        if transfer is None:
            ns = max(0, self.message_ns(op) - 2 * self.issue_ns)
            transfer = Transfer((*channel.name, *key), channel.teams, ns)
            channel.transfers[key] = transfer
        return transfer, channel.queues[team]

    def _reducing(self, op: Op, team: int) -> tuple[Transfer, Queue]:
        channel, rank = self.channels.reduction(op), team * self.domain.team
        self._check_part(channel, op, team)
        transfer = channel.transfers.get(())
        if transfer is None:
            transfer = channel.transfers[()] = Transfer(channel.name, channel.teams)
        transfer.ns = max(transfer.ns, self.compute_ns(rank, op))
        return transfer, channel.queues[team]

    def _check_part(self, channel: Channel, op: Op, team: int) -> None:
        if team not in channel.queues:
            raise StuckError(f"domain rank {team * self.domain.team} runs {op}, which it has no part in")

    def _computing(self, op: Op, team: int, first: int = 0, stop: int = PARTS) -> _Running:
        """Run an op, or of a pass the parts from the `first` one to the last one before `stop`."""
        kind = op.kind
        rank = team * self.domain.team
        ns = self.compute_ns(rank, op)
        arrival = 0
        if kind in FORWARDS:
            begins = (
                team,
                op.virtual_stage if kind is Kind.FORWARD else self.domain.encoder_batches[op.index].component,
            )
            if begins not in self.begun:  # when the first pass is through, all weights are there
                self.begun.add(begins)
                arrival = self.arrival_ns(rank, op)
        channel = self.channels.compute(op, team)
        if channel is None:
            return _ALONE, part_ns(ns, first, stop), None, None, arrival
        self._check_part(channel, op, team)
        key: Name = (kind, op.index, op.virtual_stage, op.grad)
        whole = channel.transfers.get(key)
        if whole is None:
            whole = channel.transfers[key] = Transfer((kind, *channel.name, *key[1:]), channel.teams)
        whole.ns = max(whole.ns, ns)
        transfer = whole
        if stop - first < PARTS:
            found = channel.transfers.get((*key, first))
            if found is None:
                found = channel.transfers[*key, first] = Transfer((*whole.name, first), channel.teams)
                self.parts.append((found, whole, first, stop))
            transfer = found
        # What a team does by itself waits for nobody, unless it stands in one queue with everything.
        alone = len(channel.teams) == 1 and not self.single_fifo
        how, ns = _ALONE if alone else _TOGETHER, part_ns(ns, first, stop)
        return how, ns, transfer, channel.queues[team], arrival

    def run(self) -> Timeline:
        runnable = list(range(len(self.programs)))
        while runnable:
            for team in runnable:
                self._advance(team)
            woken = {team for transfer in self._complete() for team in transfer.waiting}
            runnable = sorted(woken)
        stuck = [t for t, program in enumerate(self.programs) if len(self.ends[t]) < len(program)]
        if stuck:
            raise StuckError("; ".join(self._describe(team, len(self.ends[team])) for team in stuck))
        teams = range(len(self.programs))
        ends, transfers = zip(*map(self._by_op, teams), strict=True) if teams else ((), ())
        weights_ns = (
            {self.places[team][at]: ns for at, ns in waited.items()}
            for team, waited in enumerate(self.weights_ns)
        )
        return Timeline(self.domain, ends, transfers, tuple(weights_ns))

    def _by_op(self, team: int) -> tuple[tuple[int, ...], tuple[Transfer | None, ...]]:
        """When the ops of a team ended, and what they took part in."""
        ends, transfers = self.ends[team], [transfer for _, _, transfer, _, _ in self.programs[team]]
        ops = self.domain.ops[team]
        if len(ops) < len(ends):
            places = self.places[team]
            first = dict(zip(reversed(places), reversed(transfers), strict=True))
            last = dict(zip(places, ends, strict=True))
            ends, transfers = [], [first[at] for at in range(len(ops))]
            for at, op in enumerate(ops):
                ends.append(ends[-1] if op.within else last[at])
        return tuple(ends), tuple(transfers)

    def _advance(self, team: int) -> None:
        """Run a team's ops until one must wait."""
        program, ends = self.programs[team], self.ends[team]
        now = ends[-1] if ends else 0
        for at in range(len(ends), len(program)):
            how, ns, transfer, queue, shift = program[at]
            if how != _ISSUE and shift > now and at not in self.weights_ns[team]:
                self.weights_ns[team][at] = shift - now
                now = shift
            if how == _ALONE:
                if transfer is not None:
                    transfer.start = now
                now += ns
            elif transfer is None:
                raise StuckError(self._never_issued(team, at))
            elif how == _ISSUE:
                now += ns
                self._issue(transfer, queue, now, shift)
            elif transfer.done >= 0:
                now = max(now, transfer.done) + (ns if how == _WAIT else 0)
            else:
                if how == _TOGETHER:
                    self._issue(transfer, queue, now)
                transfer.waiting.append(team)
                return
            ends.append(now)

    def _issue(self, transfer: Transfer, queue: Queue | None, now: int, before: int = 0) -> None:
        assert queue is not None
        transfer.came.append((now, before, queue))
        queue.transfers.append(transfer)
        if len(queue.transfers) == queue.head + 1:
            self._is_first(transfer)

    def _is_first(self, transfer: Transfer) -> None:
        transfer.ready += 1
        if transfer.ready == len(transfer.teams):
            self.complete.append(transfer)

    def _complete(self) -> list[Transfer]:
        """Complete every transfer that is first in line everywhere, and those that this lets be first."""
        done: list[Transfer] = []
        held: list[Transfer] = []  # reductions behind one that is not complete
        while self.complete:
            transfer = self.complete.pop()
            start = done_before = 0
            if transfer.behind is not None:
                start, done_before = transfer.behind.start, transfer.behind.done
            if done_before < 0:
                held.append(transfer)
                continue
            for now, before, queue in transfer.came:
                start = max(start, now - before, queue.free_for(before))
            transfer.start, transfer.done = start, max(start + transfer.ns, done_before)
            done.append(transfer)
            for *_, queue in transfer.came:
                queue.free = transfer.done
                queue.head += 1
                if queue.head < len(queue.transfers):
                    self._is_first(queue.transfers[queue.head])
            if transfer.name[0] is Kind.REDUCE:
                self.complete += held
                held.clear()
        self.complete = held
        return done

    def _never_issued(self, team: int, at: int) -> str:
        op = self.domain.ops[team][self.places[team][at]]
        return (
            f"domain rank {team * self.domain.team} waits for {op.on}({op.index}), which it never issued "
            "before"
        )

    def _describe(self, team: int, at: int) -> str:
        place, transfer = self.places[team][at], self.programs[team][at][2]
        op = self.domain.ops[team][place]
        text = f"domain rank {team * self.domain.team} stands at op {place}, {op}"
        assert transfer is not None
        came = {queue.team for *_, queue in transfer.came}
        missing = [other * self.domain.team for other in transfer.teams if other not in came]
        if missing:
            return f"{text}, waiting for domain rank {', '.join(map(str, missing))} to take part"
        if transfer.behind is not None and transfer.behind.done < 0:
            return f"{text}, behind a reduction that other domains make first"
        return f"{text}, behind another transfer on its channel"
