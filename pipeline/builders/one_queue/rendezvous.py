"""Order transfers where compute stands in one queue with them: then teams can only meet between their moves.

Where layers communicate and a rank has one queue for everything, an op, or a part of a pass that comes in
parts, holds the queue for all of its time, and a message goes only while both its ends stand between two.
Whoever comes first waits. This module decides who: it runs the lists from event to event, and whenever a team
stands between two moves, it

1. makes every transfer whose teams all stand so, those first that come first with free queues;
2. or makes its next move, if all that take part in it are there and all that they wait for has come;
3. but delays that move if another team needs a transfer from this one sooner, and would lose more time than
   this team spends waiting;
4. and for a transfer that a team is held back for: no team begins what ends after all of them could meet, for
   as long as that team stands idle. Where many take part, they would hardly ever meet by chance.

So a transfer that nobody needs yet waits until its teams meet by themselves, and those of many microbatches
pass at one meeting. When others come and what they need then is taken from their compute alone, as if they
waited for nobody; no move is held back for longer than it takes. Only issues change their places. The lists
run with one queue as they ran here, or sooner, so they cannot hang.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count

from pipeline.builders.one_queue.moves import COMPUTE, ISSUE, REDUCE, WAIT, WAIT_REDUCED, Moves, Orders
from pipeline.channels import Name, Transfer

NEVER = 1 << 62  # nanoseconds


class _Team:
    """How far a team has come in its list: `at` is its next move, `past` what all its compute before took.
    `open` are the transfers that it has come to and others have not, numbered as it came to them, without
    receives; by peers, `complete` those that all of these have come to and that are not made. Its next op is
    held back since `held`, or -1. `out` are the places of the ops that it has run.
    """

    __slots__ = ("at", "complete", "held", "moves", "open", "opened", "out", "past", "reductions")

    def __init__(self, moves: Moves) -> None:
        self.moves = moves
        self.at = self.past = self.opened = 0
        self.held = -1
        self.open: dict[_Meeting, int] = {}
        self.complete: dict[_Peers, _Complete] = {}
        self.reductions: list[tuple[Name, int]] = []
        self.out: list[int] = []


@dataclass(eq=False, slots=True)
class _Meeting:
    """A transfer to be made, until it is `made`: the `absent` of its teams have yet to come to it. It is
    `called` while a team is held back for it, and not made before `soonest`: teams only come later than they
    can at the earliest. `last` is the team that came last of all by the latest reckoning; by team, no other
    one needs it before `used`.
    """

    transfer: Transfer
    absent: set[int]
    made: bool = False
    places: dict[int, int] = field(default_factory=dict)
    called: bool = False
    soonest: int = 0
    last: int = -1
    used: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Peers:
    """Teams that make transfers together, none before `soonest`. Those that all of them have come to are
    `ready`, a heap by start and name, and `called` while a team is held back for them. With any it waits for
    its teams to be free.
    """

    teams: tuple[int, ...]
    soonest: int = 0
    ready: list[tuple[int, Name, int, _Meeting]] = field(default_factory=list)
    called: set[_Meeting] = field(default_factory=set)
    waits: bool = False


@dataclass(slots=True)
class _Complete:
    """Transfers of peers that a team has come to, each with its number there. No other team needs any of them
    before they are `unused`.
    """

    numbers: dict[_Meeting, int] = field(default_factory=dict)
    unused: int = 0


def meet(moves: Sequence[Moves], patience: int = 2) -> Orders:
    """Return the lists of all teams, whose `moves` ran with a queue for each communicator, as places of ops,
    with the issues of every team where it meets the others.

    An op is held back where `patience` halves of the wait are less than the delay.
    """
    return _Meetings(moves, patience).run()


class _Meetings:
    def __init__(self, moves: Sequence[Moves], patience: int) -> None:
        self.patience, self.now = patience, 0
        self.teams = [_Team(of) for of in moves]
        self.until = [0] * len(moves)  # when each team is free
        self.meetings: dict[Transfer, _Meeting] = {}
        self.peers: dict[tuple[int, ...], _Peers] = {}
        self.numbers = count()  # of transfers that all have come to
        self.free: list[_Peers] = []  # whose teams may be free
        self.waiting: list[list[_Peers]] = [[] for _ in moves]  # those that wait for a team
        self.events = [(0, number) for number in range(len(moves))]  # when which team is free, or may start
        self.standing: set[int] = set()  # teams that are free and whose next move is compute
        for number, of in enumerate(moves):
            for at in of.receives:
                self.come(number, at, of.transfers[at], opens=False)

    def run(self) -> Orders:
        """Run to the end, from event to event."""
        events = self.events
        while events:
            self.now = now = events[0][0]
            while events and events[0][0] == now:
                number = heappop(events)[1]
                if self.until[number] == now:
                    self.free += self.waiting[number]
                    self.waiting[number].clear()
                    self.advance(number)
            while self.meet_those_free() or self.start_those_ready():
                pass
        assert all(team.at == len(team.moves.kinds) for team in self.teams), "lists that ran wait for ever"
        return [team.out for team in self.teams]

    def advance(self, number: int) -> None:
        """Pass what a free team need not wait for, up to its next op of compute."""
        team = self.teams[number]
        kinds, transfers, out, at = team.moves.kinds, team.moves.transfers, team.out, team.at
        while at < len(kinds):
            kind, transfer = kinds[at], transfers[at]
            if kind == COMPUTE:
                self.standing.add(number)
                break
            if kind == REDUCE:
                assert transfer is not None
                team.reductions.append((transfer.name, at))
            elif kind == ISSUE:
                if transfer is None:
                    out.append(at)
                else:
                    self.come(number, at, transfer)
            elif kind == WAIT:
                if transfer in self.meetings and not self.meetings[transfer].made:
                    break  # a team that has made it is not free before its end
                out.append(at)
            elif kind == WAIT_REDUCED:
                # Reductions come last: they would keep others waiting for gradients.
                out += [each for _, each in sorted(team.reductions)]
                team.reductions.clear()
                out.append(at)
            at += 1
        team.at = at

    def come(self, number: int, at: int, transfer: Transfer | None, *, opens: bool = True) -> None:
        """Note that a team has come to a transfer."""
        assert transfer is not None
        meeting = self.meetings.get(transfer)
        if meeting is None:
            meeting = self.meetings[transfer] = _Meeting(transfer, set(transfer.teams))
        meeting.places[number] = at
        meeting.absent.discard(number)
        if opens:
            team = self.teams[number]
            team.open[meeting] = team.opened = team.opened + 1
        if not meeting.absent:
            self.complete(meeting)

    def complete(self, meeting: _Meeting) -> None:
        """Note that all teams have come to a transfer."""
        transfer = meeting.transfer
        peers = self.peers.setdefault(transfer.teams, _Peers(transfer.teams))
        heappush(peers.ready, (transfer.start, transfer.name, next(self.numbers), meeting))
        if meeting.called:
            peers.called.add(meeting)
        if not peers.waits:
            peers.waits = True
            self.free.append(peers)
        for each in transfer.teams:
            team = self.teams[each]
            if meeting in team.open:
                own = team.complete.setdefault(peers, _Complete())
                own.numbers[meeting] = team.open.pop(meeting)
                own.unused = 0

    def meet_those_free(self) -> bool:
        """Make the transfers whose teams all stand between ops, the first first; tell if there were any."""
        any_made, until = False, self.until
        heads = [(peers.ready[0], peers) for peers in self.free]
        heapify(heads)
        self.free.clear()
        while heads:
            (*_, meeting), peers = heappop(heads)
            last = max(peers.teams, key=until.__getitem__)
            if until[last] > self.now:
                self.waiting[last].append(peers)
                continue
            meeting.made = any_made = True
            heappop(peers.ready)
            peers.called.discard(meeting)
            done = self.now + meeting.transfer.ns
            for each in peers.teams:
                team = self.teams[each]
                team.out.append(meeting.places[each])
                until[each] = done
                if peers in team.complete:
                    team.complete[peers].numbers.pop(meeting, None)
                self.standing.discard(each)
                heappush(self.events, (done, each))
            peers.waits = bool(peers.ready)
            if peers.waits:
                heappush(heads, (peers.ready[0], peers))
        return any_made

    def start_those_ready(self) -> bool:
        """Start the next ops of teams that nothing holds back; tell if there were any."""
        started = False
        for number in sorted(self.standing):
            if number not in self.standing:
                continue  # it has just started together with one before it
            team = self.teams[number]
            transfer, ns = team.moves.transfers[team.at], team.moves.takes[team.at]
            together = (number,) if transfer is None else transfer.teams
            if len(together) > 1 and not all(self.stands_at(each, transfer) for each in together):
                continue
            if self.is_held(team, ns, together):
                continue
            until = self.now + ns
            for each in together:
                one = self.teams[each]
                if one.held >= 0:
                    for meeting in one.open:
                        meeting.called = False
                    for peers, own in one.complete.items():
                        peers.called -= own.numbers.keys()
                one.out.append(one.at)
                one.at += 1
                one.past += ns
                self.until[each], one.held = until, -1
                self.standing.discard(each)
                heappush(self.events, (until, each))
            started = True
        return started

    def free_at(self, teams: Sequence[int]) -> int:
        """When the last of some teams is free."""
        until = self.until
        return max(until) if len(teams) == len(until) else max([until[each] for each in teams])

    def stands_at(self, number: int, transfer: Transfer | None) -> bool:
        """Whether a team is free for what it takes part in next."""
        team = self.teams[number]
        return number in self.standing and team.moves.transfers[team.at] is transfer

    def is_held(self, first: _Team, ns: int, together: Sequence[int]) -> bool:
        """Whether an op of so many nanoseconds, of teams of which this is the `first`, waits for others."""
        if 0 <= first.held <= self.now - ns or not any(self.holds(each, ns) for each in together):
            return False
        if first.held < 0:
            first.held = self.now
            heappush(self.events, (self.now + ns, together[0]))
        return True

    def holds(self, number: int, ns: int) -> bool:
        """Whether a team had better make a transfer before an op of so many nanoseconds."""
        team, now, end = self.teams[number], self.now, self.now + ns
        # Rows that go back are not worth a meeting later on, between long ops: they are used at once.
        late = team.at > team.moves.last_pass
        first, found = NEVER, None
        for peers, own in team.complete.items():
            if not own.numbers or peers.soonest >= end:
                continue
            made = peers.soonest = max(now, self.free_at(peers.teams))
            if made >= end:
                continue
            wanted = [meeting for meeting in peers.called if meeting in own.numbers]
            # Who needs it later gains less than this waits.
            before = end - self.patience * (made - now) // 2
            if made < before:
                wanted += own.numbers if late else self.needed(number, own, before)
            for meeting in wanted:
                if own.numbers[meeting] < first:
                    first, found = own.numbers[meeting], meeting
        for meeting, at in team.open.items():
            if at > first:
                break
            if meeting.soonest >= end or (made := self.soonest(meeting, end)) >= end:
                continue
            before = end - self.patience * (made - now) // 2
            if meeting.called or (made < before and (late or self.used(meeting, number, before) < before)):
                found = meeting
                break
        if found is None:
            return False
        if found.absent:
            found.called = True
        else:
            self.peers[found.transfer.teams].called.add(found)
        return True

    def needed(self, number: int, own: _Complete, before: int) -> list[_Meeting]:
        """Those of the transfers of peers that any other team needs before a moment."""
        if own.unused >= before:
            return []
        used = {meeting: self.used(meeting, number, before) for meeting in own.numbers}
        own.unused = min(used.values(), default=NEVER)
        return [meeting for meeting, at in used.items() if at < before]

    def used(self, meeting: _Meeting, number: int, before: int = NEVER) -> int:
        """When any other team can come to what needs a transfer, at the earliest; or a moment at or after
        `before` up to which none can.
        """
        found = meeting.used.get(number, 0)
        if found >= before:
            return found
        transfer, now, teams, until = meeting.transfer, self.now, self.teams, self.until
        soonest = NEVER
        for each in transfer.teams:
            if each != number:
                other = teams[each]
                comes = until[each] if until[each] > now else now
                ahead = other.moves.uses[transfer] - other.past
                if ahead > 0:
                    comes += ahead
                if comes < soonest:
                    soonest = comes
        meeting.used[number] = soonest
        return soonest

    def soonest(self, meeting: _Meeting, end: int) -> int:
        """When the teams can all meet at the earliest, or a moment after `end` before which they cannot.
        Those that have come can when they are free, the others when they have run what is ahead of them.
        """
        transfer, teams, until = meeting.transfer, self.teams, self.until
        made = max(self.now, self.free_at(transfer.teams))
        if made < end and meeting.absent:
            # Whoever came last by the latest reckoning often comes too late again: it is asked first.
            first = (meeting.last,) if meeting.last in meeting.absent else ()
            for each in (*first, *meeting.absent):
                other = teams[each]
                ahead = other.moves.issues[transfer] - other.past
                comes = max(until[each], self.now) + ahead
                if comes > made:
                    made, meeting.last = comes, each
                    if made >= end:
                        break
        meeting.soonest = made
        return made
