"""Lists that ran with a queue for each communicator, as columns: what orders for one queue are made from and
timed by.

A move is an op, or a part of a pass whose layers communicate: between parts messages may go, and those of
neighbours need not wait for the whole pass. An order gives for each team the numbers of its moves, in the
order in which it shall make them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.channels import Transfer
from pipeline.ops import BACKWARDS, PARTS, PASSES, Kind
from pipeline.ops import COMPUTE as COMPUTES
from pipeline.reductions import follows_llm
from pipeline.simulator import ComputeCost, Timeline, nothing, part_ns

# What an op is here; a wait for a reduction is the last one.
COMPUTE, ISSUE, RECEIVE, REDUCE, WAIT, WAIT_REDUCED = range(6)
_OTHER = {Kind.RECV_FORWARD: RECEIVE, Kind.RECV_BACKWARD: RECEIVE, Kind.REDUCE: REDUCE, Kind.WAIT: WAIT}
Orders = list[list[int]]

A_PASS = 2  # parts of the usual pass at least, and so many more of a longer one


@dataclass(slots=True)
class Moves:
    """The moves of a team: what each is, the transfer that it takes part in, if any, and, of compute, its
    nanoseconds; the place of its op in the list, and which of the `PARTS` of a pass it ends with, all of them
    but for parts. By transfer, `issues` and `uses` say how much compute of the team stands before it comes to
    it and before it waits for it; a receive needs no data, so it may come at once. Receives are also listed
    by number. `last_pass` is the last move of the last pass of the LLM, or -1. `computes_together` says
    whether some of its compute is a transfer as well.
    `goes_behind` has by number the reductions that follow a backward at once: if they do so in an order,
    they begin behind it, so many nanoseconds before it ends. `carries` has the backwards that other
    reductions may begin behind, if they follow at once in an order.
    """

    kinds: list[int]
    transfers: list[Transfer | None]
    takes: list[int]
    places: list[int]
    stops: list[int]
    issues: dict[Transfer, int]
    uses: dict[Transfer, int]
    receives: list[int]
    last_pass: int
    computes_together: bool
    goes_behind: dict[int, int]
    carries: dict[int, int]


def moves_of(timeline: Timeline, before_ns: ComputeCost = nothing, *, in_parts: bool = False) -> list[Moves]:
    """Return the moves of every team of a timeline, which ran with a queue for each communicator. A REDUCE
    begins behind a backward that it follows at once, `before_ns` before that ends: that of the REDUCE if it
    is of the same part, else that of the backward. Passes whose layers communicate come `in_parts`, if so.
    """
    counts, parts = _counts(timeline) if in_parts else {}, dict[tuple[Transfer, int], Transfer]()
    return [_moves(timeline, team, before_ns, counts, parts) for team in range(len(timeline.ends_ns))]


def _counts(timeline: Timeline) -> dict[Transfer, int]:
    """In how many parts passes come whose layers communicate: as few as leave none that takes longer than
    half of the usual pass, a power of two.
    """
    passes, whole = dict[Transfer, None](), set[Transfer]()
    for ops, transfers in zip(timeline.domain.ops, timeline.transfers, strict=True):
        for op, transfer, behind in zip(ops, transfers, (*ops[1:], None), strict=False):
            if transfer is not None and op.kind in PASSES:
                passes[transfer] = None
                if behind is not None and behind.kind is Kind.REDUCE:
                    # What begins behind a backward waits for ranks of other domains, too.
                    whole.add(transfer)
    usual_ns = sorted(each.ns for each in passes)[len(passes) // 2] if passes else 0
    counts = {}
    for each in passes:
        count = 1
        while count < PARTS and each not in whole and A_PASS * each.ns > count * usual_ns:
            count *= 2
        counts[each] = count
    return counts


def _moves(
    timeline: Timeline,
    team: int,
    before_ns: ComputeCost,
    counts: Mapping[Transfer, int],
    parts: dict[tuple[Transfer, int], Transfer],
) -> Moves:
    own = Moves([], [], [], [], [], {}, {}, [], -1, False, {}, {})
    before = began = 0
    domain, ops = timeline.domain, timeline.domain.ops[team]
    columns = ops, timeline.transfers[team], timeline.ends_ns[team]
    for at, (op, transfer, end) in enumerate(zip(*columns, strict=True)):
        kind, ns, count = op.kind, 0, 1
        what = COMPUTE if kind in COMPUTES else _OTHER.get(kind, ISSUE)
        if what == COMPUTE:
            own.computes_together = own.computes_together or transfer is not None
            ns = end - began if transfer is None else transfer.ns
            if kind in PASSES:
                count = counts.get(transfer, 1) if transfer is not None else 1
                own.last_pass = len(own.kinds) + count - 1
            elif kind is Kind.ENCODE_BACKWARD and (carried := before_ns(team * domain.team, op)):
                own.carries[len(own.kinds)] = carried
        elif what == WAIT:
            if op.on is Kind.REDUCE:
                what = WAIT_REDUCED
            if transfer is not None:
                own.uses[transfer] = before
        elif transfer is not None:
            own.issues[transfer] = before
            if what == RECEIVE:
                own.issues[transfer] = 0
                own.receives.append(len(own.kinds))
            elif what == REDUCE and at and ops[at - 1].kind in BACKWARDS:
                begun = before_ns(team * domain.team, op)
                if begun or follows_llm(domain, ops[at - 1], op):
                    own.goes_behind[len(own.kinds)] = begun
        for number in range(count):
            first, stop = number * PARTS // count, (number + 1) * PARTS // count
            own.kinds.append(what)
            own.transfers.append(transfer if count == 1 else _part_of(transfer, first, stop, parts))
            own.takes.append(part_ns(ns, first, stop))
            own.places.append(at)
            own.stops.append(stop)
        before += ns
        began = end
    return own


def _part_of(
    whole: Transfer | None, first: int, stop: int, parts: dict[tuple[Transfer, int], Transfer]
) -> Transfer:
    """Some parts of a pass, one transfer for all that run it together."""
    assert whole is not None
    part = parts.get((whole, first))
    if part is None:
        part = Transfer((*whole.name, first), whole.teams, part_ns(whole.ns, first, stop))
        part.start = whole.start + part_ns(whole.ns, 0, first)
        parts[whole, first] = part
    return part


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
