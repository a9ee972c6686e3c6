"""Lists that ran with a queue for each communicator, as columns: what orders for one queue are made from and
timed by.

An order gives for each team the places of its ops, in the order in which it shall run them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.channels import Transfer
from pipeline.ops import BACKWARDS, Kind
from pipeline.ops import COMPUTE as COMPUTES
from pipeline.reductions import follows_llm
from pipeline.simulator import ComputeCost, Timeline, nothing

# What an op is here; a wait for a reduction is the last one.
COMPUTE, ISSUE, RECEIVE, REDUCE, WAIT, WAIT_REDUCED = range(6)
_OTHER = {Kind.RECV_FORWARD: RECEIVE, Kind.RECV_BACKWARD: RECEIVE, Kind.REDUCE: REDUCE, Kind.WAIT: WAIT}
Orders = list[list[int]]


@dataclass(frozen=True, slots=True)
class Moves:
    """The ops of a team by place: what each is, the transfer that it takes part in, if any, and, of compute,
    its nanoseconds. By transfer, `issues` and `uses` say how much compute of the team stands before it
    comes to it and before it waits for it; a receive needs no data, so it may come at once. Receives are
    also listed by place. `last_pass` is the place of the last pass of the LLM, or -1. `computes_together`
    says whether some of its compute is a transfer as well.
    `goes_behind` has by place the reductions that follow a backward at once: if they do so in an order,
    they begin behind it, so many nanoseconds before it ends. `carries` has the backwards that other
    reductions may begin behind, if they follow at once in an order.
    """

    kinds: list[int]
    transfers: tuple[Transfer | None, ...]
    takes: list[int]
    issues: dict[Transfer, int]
    uses: dict[Transfer, int]
    receives: list[int]
    last_pass: int
    computes_together: bool
    goes_behind: dict[int, int]
    carries: dict[int, int]


def moves_of(timeline: Timeline, before_ns: ComputeCost = nothing) -> list[Moves]:
    """Return the moves of every team of a timeline, which ran with a queue for each communicator. A REDUCE
    begins behind a backward that it follows at once, `before_ns` before that ends: that of the REDUCE if it
    is of the same part, else that of the backward.
    """
    return [
        _moves(timeline, team, transfers, ends, before_ns)
        for team, (transfers, ends) in enumerate(zip(timeline.transfers, timeline.ends_ns, strict=True))
    ]


def _moves(
    timeline: Timeline,
    team: int,
    transfers: tuple[Transfer | None, ...],
    ends: Sequence[int],
    before_ns: ComputeCost,
) -> Moves:
    kinds: list[int] = []
    takes: list[int] = []
    issues: dict[Transfer, int] = {}
    uses: dict[Transfer, int] = {}
    receives: list[int] = []
    goes_behind: dict[int, int] = {}
    carries: dict[int, int] = {}
    before = began = 0
    last_pass, together = -1, False
    domain, ops = timeline.domain, timeline.domain.ops[team]
    for at, (op, transfer, end) in enumerate(zip(ops, transfers, ends, strict=True)):
        kind, ns = op.kind, 0
        what = COMPUTE if kind in COMPUTES else _OTHER.get(kind, ISSUE)
        if what == COMPUTE:
            together = together or transfer is not None
            ns = end - began if transfer is None else transfer.ns
            if kind is Kind.FORWARD or kind is Kind.BACKWARD:
                last_pass = at
            elif kind is Kind.ENCODE_BACKWARD and (carried := before_ns(team * domain.team, op)):
                carries[at] = carried
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
            elif what == REDUCE and at and ops[at - 1].kind in BACKWARDS:
                ns = before_ns(team * domain.team, op)
                if ns or follows_llm(domain, ops[at - 1], op):
                    goes_behind[at] = ns
                ns = 0
        kinds.append(what)
        takes.append(ns)
        before += ns
        began = end
    return Moves(kinds, transfers, takes, issues, uses, receives, last_pass, together, goes_behind, carries)


def reduced_early(moves: Sequence[Moves], orders: Orders) -> Orders:
    """Return orders in which reductions that may go on behind a backward follow it at once, those of a team
    in one order as before.
    """
    return [_reduced_early(of, order) for of, order in zip(moves, orders, strict=True)]


def _reduced_early(moves: Moves, order: list[int]) -> list[int]:
    early = set[int]()
    for at in (at for at in order if moves.kinds[at] == REDUCE):
        if at not in moves.goes_behind:
            break
        early.add(at)
    rest = (at for at in order if at not in early)
    return [one for at in rest for one in ((at, at + 1) if at + 1 in early else (at,))]


def reduced_amid(moves: Sequence[Moves], orders: Orders) -> Orders | None:
    """Return orders in which reductions come once a team has nothing else to issue, behind the last compute
    that stands in its queue, and those of gradients that are not complete by then behind their own backward.
    None if the last compute in any team's queue carries no reductions.

    Reductions keep the pace of the slowest of these backwards, on all that take part, as layers wait in the
    queue for what goes behind layers before. So no compute may stand in a queue behind one: it would be late.
    """
    amid = [_reduced_amid(of, order) for of, order in zip(moves, orders, strict=True)]
    return None if None in amid else [order for order in amid if order is not None]


def _reduced_amid(moves: Moves, order: list[int]) -> list[int] | None:
    kinds = moves.kinds
    issued = max((number for number, at in enumerate(order) if kinds[at] in (ISSUE, RECEIVE)), default=-1)
    computes = [at for at in order[issued + 1 :] if kinds[at] == COMPUTE]
    if not computes:
        return order
    queued = [at for at in computes if moves.transfers[at] is not None]
    carrying = [at for at in queued[-1:] or computes if at in moves.carries]
    if queued and not carrying:
        return None
    out = [at for at in order if kinds[at] != REDUCE]
    first = out.index(computes[0])
    if carrying:
        first = out.index(max(carrying, key=moves.carries.__getitem__)) + 1
    last = next((number for number, at in enumerate(out) if kinds[at] == WAIT_REDUCED), len(out))
    place = 0
    for count, at in enumerate(at for at in order if kinds[at] == REDUCE):
        if at < computes[0]:
            place = max(place, first + count)
        elif at in moves.goes_behind:
            place = max(place, out.index(at - 1) + 1)
        else:
            place = max(place, last + count)
        out.insert(place, at)
        place += 1
    return out


def queue_ns(moves: Sequence[Moves], orders: Sequence[Sequence[int]], issue_ns: int = 0) -> int | None:
    """Return the simulated nanoseconds of lists in these orders with one queue a rank: what
    `pipeline.simulator.run` says of them with `single_fifo`, but for what is free: that takes 1 ns. None of
    lists that get stuck.
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
        self.goes_back = [False] * len(moves)  # whether the last of that was a backward
        self.first: dict[Transfer, int] = {}  # teams with the transfer at the head of their queue
        self.times: dict[Transfer, tuple[int, int]] = {}  # start and end of what is complete
        self.behind = [0] * len(moves)  # how long before its place the reduction at the head began
        self.complete: list[Transfer] = []

    def run(self) -> int | None:
        """Run to the end and return when that is, None if they get stuck."""
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
        if not all(map(int.__eq__, self.at, map(len, self.orders))):
            return None
        return max(self.now, default=0)

    def make(self, transfer: Transfer) -> None:
        """Complete a transfer that is at the head of all its queues, and go on with its teams."""
        start, end = 0, 0
        if transfer.behind is not None:
            start, end = self.times[transfer.behind]
        for team in transfer.teams:
            before = self.behind[team]
            start = max(start, self.now[team] - before, self.free[team] - before * self.goes_back[team])
        kind, ns = transfer.name[0], transfer.ns
        computes, goes_back = kind in COMPUTES, kind in BACKWARDS
        if not computes and kind is not Kind.REDUCE:
            ns = max(0, ns - 2 * self.issue_ns)
        end = max(start + ns, end)
        self.times[transfer] = start, end
        for team in transfer.teams:
            self.free[team], self.goes_back[team], self.behind[team] = end, goes_back, 0
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
                if kind == REDUCE:
                    self.behind[team] = _begun_before(of, order, at)
                self.at[team], self.now[team] = at + 1, now
                ready = self.first[transfer] = self.first.get(transfer, 0) + 1
                if ready == len(transfer.teams):
                    self.complete.append(transfer)
                return
        self.at[team], self.now[team] = len(order), now


def _begun_before(moves: Moves, order: Sequence[int], at: int) -> int:
    """How long before its place in an order a REDUCE began, behind what reductions follow at once there."""
    front = at - 1
    while front >= 0 and moves.kinds[order[front]] == REDUCE:
        front -= 1
    if front < 0:
        return 0
    own = order[at] == order[front] + 1
    return moves.goes_behind.get(order[at], 0) if own else moves.carries.get(order[front], 0)
