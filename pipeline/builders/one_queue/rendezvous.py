"""Order transfers where compute stands in one queue with them: then teams can only meet between their ops.

Where layers communicate and a rank has one queue for everything, a pass holds the queue for all of its time,
and a message goes only while both its ends stand between ops. Whoever comes first waits. This module decides
who: it runs the lists from event to event, and whenever a team stands between two ops, it

1. makes every transfer whose teams all stand between ops, those first that come first with free queues;
2. or starts its next op, if all that take part in it are there and all that they wait for has come;
3. but delays that op if another team needs a transfer from this one sooner, and would lose more time than
   this team spends waiting;
4. and for a transfer that a team is held back for: no team begins what ends after all of them could meet, for
   as long as that team stands idle. Where many take part, they would hardly ever meet by chance.

So a transfer that nobody needs yet waits until its teams meet by themselves, and those of many microbatches
pass at one meeting. When others come and what they need then is taken from their compute alone, as if they
waited for nobody; no op is held back for longer than it takes. Only issues change their places. The lists
run with one queue as they ran here, or sooner, so they cannot hang.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from pipeline.channels import Name, Transfer
from pipeline.ops import COMPUTE, ISSUED, Kind, Op
from pipeline.simulator import Timeline

NEVER = 1 << 62  # nanoseconds
_RECEIVES = (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)


class _Team:
    """A team's list and how far it has come: `at` is its next op, `until` when it is free. `open` are the
    transfers that it has come to and that are not made, without receives; its next op is held back since
    `held`, or -1.
    """

    def __init__(self, ops: Sequence[Op], transfers: Sequence[Transfer | None], ends: Sequence[int]) -> None:
        self.ops, self.transfers = ops, transfers
        self.at = self.until = 0
        self.held = -1
        self.open: dict[_Meeting, None] = {}
        self.reductions: list[tuple[Name, Op]] = []
        self.out: list[Op] = []
        # Nanoseconds of each op of compute; and of all before an op, a transfer's issue, and its use.
        self.takes: list[int] = []
        self.before = [0]
        self.issues: dict[Transfer, int] = {}
        self.uses: dict[Transfer, int] = {}
        passes = [at for at, op in enumerate(ops) if op.kind in (Kind.FORWARD, Kind.BACKWARD)]
        self.last_pass = passes[-1] if passes else -1
        began = 0
        for op, transfer, end in zip(ops, transfers, ends, strict=True):
            ns = 0
            if op.kind in COMPUTE:
                ns = end - began if transfer is None else transfer.ns
            elif transfer is not None and op.kind is Kind.WAIT:
                self.uses[transfer] = self.before[-1]
            elif transfer is not None:
                # A receive needs no data, so it may come before its place.
                self.issues[transfer] = 0 if op.kind in _RECEIVES else self.before[-1]
            self.takes.append(ns)
            self.before.append(self.before[-1] + ns)
            began = end

    def comes_to(self, before: int, now: int) -> int:
        """When the team can come to what so many nanoseconds of its compute stand before, at the earliest."""
        ahead = before - self.before[self.at]
        free = self.until if self.until > now else now
        return free + ahead if ahead > 0 else free


@dataclass(eq=False, slots=True)
class _Meeting:
    """A transfer to be made, until it is `made`: the `missing` of its teams have yet to come to it. It is
    `called` while a team is held back for it, and not made before `soonest`: teams only come later than they
    can at the earliest. `busy` is the team for which it waited last; by team, no other one needs it before
    `used`.
    """

    transfer: Transfer
    missing: int
    made: bool = False
    ops: dict[int, Op] = field(default_factory=dict)
    called: bool = False
    soonest: int = 0
    busy: int = 0
    used: dict[int, int] = field(default_factory=dict)


def meet(timeline: Timeline, patience: int = 1) -> list[list[Op]]:
    """Return the lists of a `timeline`, which ran with a queue for each communicator, with the issues of
    every team where it meets the others.

    An op is held back where `patience` times the wait is less than the delay: with 0 wherever it delays
    anyone, and then no team is held back because another one is.
    """
    return _Meetings(timeline, patience).run()


class _Meetings:
    def __init__(self, timeline: Timeline, patience: int) -> None:
        self.patience, self.now = patience, 0
        rows = zip(timeline.domain.ops, timeline.transfers, timeline.ends_ns, strict=True)
        self.teams = [_Team(*row) for row in rows]
        self.meetings: dict[Transfer, _Meeting] = {}
        self.ready: list[_Meeting] = []
        self.events = [0]
        for number, team in enumerate(self.teams):
            for op, transfer in zip(team.ops, team.transfers, strict=True):
                if op.kind in _RECEIVES and transfer is not None:
                    self.come(number, op, transfer)

    def run(self) -> list[list[Op]]:
        """Run to the end, from event to event."""
        while self.events:
            self.now = heappop(self.events)
            while self.events and self.events[0] == self.now:
                heappop(self.events)
            moved = True
            while moved:
                free = [number for number, team in enumerate(self.teams) if team.until <= self.now]
                for number in free:
                    self.advance(number)
                moved = self.meet_those_free() or self.start_those_ready(free)
        assert all(team.at == len(team.ops) for team in self.teams), "lists that run freely wait for ever"
        return [team.out for team in self.teams]

    def advance(self, number: int) -> None:
        """Pass what a free team need not wait for, up to its next op of compute."""
        team = self.teams[number]
        while team.at < len(team.ops):
            op, transfer = team.ops[team.at], team.transfers[team.at]
            if op.kind in COMPUTE:
                return
            if op.kind is Kind.REDUCE:
                assert transfer is not None
                team.reductions.append((transfer.name, op))
            elif op.kind in ISSUED:
                if transfer is None:
                    team.out.append(op)
                elif op.kind not in _RECEIVES:
                    self.come(number, op, transfer)
            else:
                if op.on is Kind.REDUCE:
                    # Reductions come last: they would keep others waiting for gradients.
                    team.out += [each for _, each in sorted(team.reductions, key=lambda entry: entry[0])]
                    team.reductions.clear()
                elif transfer in self.meetings and not self.meetings[transfer].made:
                    return  # a team that has made it is not free before its end
                team.out.append(op)
            team.at += 1

    def come(self, number: int, op: Op, transfer: Transfer) -> None:
        """Note that a team has come to a transfer."""
        meeting = self.meetings.get(transfer)
        if meeting is None:
            meeting = self.meetings[transfer] = _Meeting(transfer, len(transfer.teams))
        meeting.ops[number] = op
        meeting.missing -= 1
        if op.kind not in _RECEIVES:
            self.teams[number].open[meeting] = None
        if not meeting.missing:
            insort(self.ready, meeting, key=lambda one: (one.transfer.start, one.transfer.name))

    def meet_those_free(self) -> bool:
        """Make the transfers whose teams all stand between ops; tell if there were any."""
        left = []
        for meeting in self.ready:
            transfer = meeting.transfer
            if self.waits(meeting):
                left.append(meeting)
                continue
            teams = [self.teams[each] for each in transfer.teams]
            meeting.made, done = True, self.now + transfer.ns
            for each, team in zip(transfer.teams, teams, strict=True):
                team.out.append(meeting.ops[each])
                team.until = done
                team.open.pop(meeting, None)
            heappush(self.events, done)
        made = len(left) < len(self.ready)
        self.ready = left
        return made

    def waits(self, meeting: _Meeting) -> bool:
        """Whether any team of a meeting is not free yet."""
        teams, now = self.teams, self.now
        if teams[meeting.busy].until > now and meeting.busy in meeting.ops:
            return True
        for each in meeting.transfer.teams:
            if teams[each].until > now:
                meeting.busy = each
                return True
        return False

    def start_those_ready(self, free: Sequence[int]) -> bool:
        """Start the next ops of teams that nothing holds back; tell if there were any."""
        started = False
        for number in free:
            team = self.teams[number]
            if team.until > self.now or team.at == len(team.ops) or team.ops[team.at].kind not in COMPUTE:
                continue
            transfer, ns = team.transfers[team.at], team.takes[team.at]
            teams = [team] if transfer is None else [self.teams[each] for each in transfer.teams]
            if len(teams) > 1 and not all(self.stands_at(each, transfer) for each in teams):
                continue
            if self.is_held(team, ns, [number] if transfer is None else transfer.teams):
                continue
            for each in teams:
                if each.held >= 0:
                    for meeting in each.open:
                        meeting.called = False
                each.out.append(each.ops[each.at])
                each.at += 1
                each.until, each.held = self.now + ns, -1
            heappush(self.events, self.now + ns)
            started = True
        return started

    def stands_at(self, team: _Team, transfer: Transfer | None) -> bool:
        """Whether a team is free for what it takes part in next."""
        return team.until <= self.now and team.at < len(team.ops) and team.transfers[team.at] is transfer

    def is_held(self, first: _Team, ns: int, together: Sequence[int]) -> bool:
        """Whether an op of so many nanoseconds, of teams of which this is the `first`, waits for others."""
        if 0 <= first.held <= self.now - ns or not any(self.holds(each, ns) for each in together):
            return False
        if first.held < 0:
            first.held = self.now
            heappush(self.events, self.now + ns)
        return True

    def holds(self, number: int, ns: int) -> bool:
        """Whether a team had better make a transfer before an op of so many nanoseconds."""
        team, end = self.teams[number], self.now + ns
        come: dict[int, int] = {}  # by those who take part in what all of them have come to, as below
        for meeting in team.open:
            if meeting.soonest >= end:
                continue
            made = -1 if meeting.missing else come.get(id(meeting.transfer.teams), -1)
            if made < 0:
                made = self.soonest(meeting, number, end)
                if not meeting.missing:
                    come[id(meeting.transfer.teams)] = made
            if made >= end:
                continue
            if meeting.called:
                return True
            before = end - self.patience * (made - self.now)  # who needs it later gains less than this waits
            # Rows that go back are not worth a meeting later on, between long ops: they are used at once.
            late = team.at > team.last_pass
            if made < before and (late or self.is_used(meeting, number, before)):
                meeting.called = self.patience > 0
                return True
        return False

    def is_used(self, meeting: _Meeting, number: int, before: int) -> bool:
        """Whether any other team can come to what needs a transfer before a moment."""
        if meeting.used.get(number, 0) >= before:
            return False
        transfer, now, teams = meeting.transfer, self.now, self.teams
        soonest = NEVER
        for each in transfer.teams:
            if each != number:
                other = teams[each]
                comes = other.comes_to(other.uses[transfer], now)
                if comes < before:
                    return True
                if comes < soonest:
                    soonest = comes
        meeting.used[number] = soonest
        return False

    def soonest(self, meeting: _Meeting, number: int, end: int) -> int:
        """When a team can meet the others at the earliest, or a moment after `end` before which it cannot."""
        transfer, made, now, teams = meeting.transfer, self.now, self.now, self.teams
        for each in transfer.teams:
            if each != number:
                comes = (other := teams[each]).comes_to(other.issues[transfer], now)
                if comes > made:
                    made = comes
                    if made >= end:
                        break
        meeting.soonest = made
        return made
