"""Lists that ran with a queue for each communicator, as columns: what orders for one queue are made from and
timed by.

An order gives for each team the places of its ops, in the order in which it shall run them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.channels import Transfer
from pipeline.ops import COMPUTE as COMPUTES
from pipeline.ops import Kind
from pipeline.simulator import Timeline

# What an op is here; a wait for a reduction is the last one.
COMPUTE, ISSUE, RECEIVE, REDUCE, WAIT, WAIT_REDUCED = range(6)
_OTHER = {Kind.RECV_FORWARD: RECEIVE, Kind.RECV_BACKWARD: RECEIVE, Kind.REDUCE: REDUCE, Kind.WAIT: WAIT}
Orders = list[list[int]]


@dataclass(frozen=True, slots=True)
class Moves:
    """The ops of a team by place: what each is, the transfer that it takes part in, if any, and, of compute,
    its nanoseconds. By transfer, `issues` and `uses` say how much compute of the team stands before it comes
    to it and before it waits for it; a receive needs no data, so it may come at once. Receives are also
    listed by place. `last_pass` is the place of the last pass of the LLM, or -1. `computes_together` says
    whether some of its compute is a transfer as well.
    """

    kinds: list[int]
    transfers: tuple[Transfer | None, ...]
    takes: list[int]
    issues: dict[Transfer, int]
    uses: dict[Transfer, int]
    receives: list[int]
    last_pass: int
    computes_together: bool


def moves_of(timeline: Timeline) -> list[Moves]:
    """Return the moves of every team of a timeline, which ran with a queue for each communicator."""
    return [
        _moves(timeline, team, transfers, ends)
        for team, (transfers, ends) in enumerate(zip(timeline.transfers, timeline.ends_ns, strict=True))
    ]


def _moves(
    timeline: Timeline, team: int, transfers: tuple[Transfer | None, ...], ends: Sequence[int]
) -> Moves:
    kinds: list[int] = []
    takes: list[int] = []
    issues: dict[Transfer, int] = {}
    uses: dict[Transfer, int] = {}
    receives: list[int] = []
    before = began = 0
    last_pass, together = -1, False
    for at, (op, transfer, end) in enumerate(zip(timeline.domain.ops[team], transfers, ends, strict=True)):
        kind, ns = op.kind, 0
        what = COMPUTE if kind in COMPUTES else _OTHER.get(kind, ISSUE)
        if what == COMPUTE:
            together = together or transfer is not None
            ns = end - began if transfer is None else transfer.ns
            if kind is Kind.FORWARD or kind is Kind.BACKWARD:
                last_pass = at
        elif what == WAIT:
            if op.on is Kind.REDUCE:
                what = WAIT_REDUCED
            if transfer is not None:
                uses[transfer] = before
        elif transfer is not None:
            issues[transfer] = before
            if what == RECEIVE:
                issues[transfer] = 0
                receives.append(at)
        kinds.append(what)
        takes.append(ns)
        before += ns
        began = end
    return Moves(kinds, transfers, takes, issues, uses, receives, last_pass, together)


def queue_ns(moves: Sequence[Moves], orders: Sequence[Sequence[int]], issue_ns: int = 0) -> int:
    """Return the simulated nanoseconds of lists in these orders with one queue a rank: what
    `pipeline.simulator.run` says of them with `single_fifo`, but for what is free: that takes 1 ns.
    """
    return _OneQueue(moves, orders, issue_ns).run()


class _OneQueue:
    """Lists on the way: in one queue transfers complete in the order of issue, so a team is known to the
    nanosecond once the transfer at the head of its queue is complete.
    """

    def __init__(self, moves: Sequence[Moves], orders: Sequence[Sequence[int]], issue_ns: int) -> None:
        self.moves, self.orders, self.issue_ns = moves, orders, issue_ns
        self.at = [0] * len(moves)  # what follows the op at the head of the queue, in the order of the team
        self.now = [0] * len(moves)
        self.free = [0] * len(moves)  # when all that was issued before is complete
        self.first: dict[Transfer, int] = {}  # teams with the transfer at the head of their queue
        self.times: dict[Transfer, tuple[int, int]] = {}  # start and end of what is complete
        self.complete: list[Transfer] = []

    def run(self) -> int:
        """Run to the end and return when that is."""
        held: list[Transfer] = []
        for team in range(len(self.moves)):
            self.walk(team)
        while self.complete:
            transfer = self.complete.pop()
            behind = transfer.behind
            if behind is not None and behind not in self.times:
                held.append(transfer)
                continue
            self.make(transfer)
            if held and transfer.name[0] is Kind.REDUCE:
                self.complete += held
                held.clear()
        assert all(map(int.__eq__, self.at, map(len, self.orders))), "lists in an order of one run get stuck"
        return max(self.now, default=0)

    def make(self, transfer: Transfer) -> None:
        """Complete a transfer that is at the head of all its queues, and go on with its teams."""
        start, end = 0, 0
        if transfer.behind is not None:
            start, end = self.times[transfer.behind]
        for team in transfer.teams:
            start = max(start, self.now[team], self.free[team])
        computes, ns = transfer.name[0] in COMPUTES, transfer.ns
        if not computes and transfer.name[0] is not Kind.REDUCE:
            ns = max(0, ns - 2 * self.issue_ns)
        end = max(start + ns, end)
        self.times[transfer] = start, end
        for team in transfer.teams:
            self.free[team] = end
            if computes:
                self.now[team] = end
            self.walk(team)

    def walk(self, team: int) -> None:
        """Run a team's ops up to the next one that stands in its queue."""
        of, order, now = self.moves[team], self.orders[team], self.now[team]
        kinds, transfers = of.kinds, of.transfers
        for at in range(self.at[team], len(order)):
            place = order[at]
            kind, transfer = kinds[place], transfers[place]
            if kind >= WAIT:
                if transfer in self.times:
                    now = max(now, self.times[transfer][1])
                now += self.issue_ns
            elif transfer is None:
                now += of.takes[place] if kind == COMPUTE else self.issue_ns
            else:
                if kind != COMPUTE:
                    now += self.issue_ns
                self.at[team], self.now[team] = at + 1, now
                ready = self.first[transfer] = self.first.get(transfer, 0) + 1
                if ready == len(transfer.teams):
                    self.complete.append(transfer)
                return
        self.at[team], self.now[team] = len(order), now
