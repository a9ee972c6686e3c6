"""Make op lists safe where all communication of a rank shares one queue.

A GPU may serve the communicators of a process one at a time, in the order of issue. Two neighbours that issue
in different orders then wait for each other forever, although their lists are safe where every communicator
has a queue of its own.

The cure is one order of transfers for all ranks. A simulation of the original lists tells when each transfer
starts, and that time is its number; reductions come after everything else, which they would keep waiting for
ranks that have yet to complete their gradients. Every rank issues its transfers by their numbers; before it
waits for one, it issues all that have lower numbers. Compute that several ranks run together is a transfer as
well, and they wait for it where it stands. There a message can go only between two ops of both its ends, or
between parts of their passes, and `rendezvous.py` finds an order. Reductions that may go on behind the last
backwards follow them at once, in front of everything else, or they go on behind the last backward of an
encoder, if every team runs its own by itself, if that runs to the end and takes less.

A rank can always follow this order: what it issues after it has waited for a transfer starts later than that
transfer, so it has a higher number.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

from pipeline.builders.one_queue.moves import (
    COMPUTE,
    Moves,
    Orders,
    moves_of,
    queue_ns,
    reduced_amid,
    reduced_early,
)
from pipeline.builders.one_queue.rendezvous import NEVER, meet
from pipeline.channels import Transfer
from pipeline.domain_plan import DomainPlan
from pipeline.ops import ISSUED, PARTS, Kind, Op
from pipeline.simulator import ComputeCost, MessageCost, Timeline, nothing, run

WITHIN, BETWEEN = 1, 2
"""Halves of a wait that count against a delay, where messages go within passes and where they go only between
two. In eleven domains of a tp2·pp4, before the jump, half waits within passes were better in seven.
"""


def serialise(
    domain: DomainPlan, compute_ns: ComputeCost, message_ns: MessageCost, before_ns: ComputeCost = nothing
) -> list[list[Op]]:
    """Reorder the issues of every team's list; compute keeps its order. A REDUCE begins behind a backward
    that it follows at once, `before_ns` before that ends.

    Raises:
        StuckError: if the lists cannot run to the end as they are.
    """
    return in_orders(domain, *ordered(run_freely(domain, compute_ns, message_ns), before_ns))


def run_freely(domain: DomainPlan, compute_ns: ComputeCost, message_ns: MessageCost) -> Timeline:
    """Run lists with a queue for each communicator. Nothing is free: what comes after an op must have a
    higher number than the op.

    Raises:
        StuckError: if the lists cannot run to the end.
    """
    return run(domain, lambda rank, op: compute_ns(rank, op) or 1, lambda op: message_ns(op) or 1)


def ordered(timeline: Timeline, before_ns: ComputeCost = nothing) -> tuple[Sequence[Moves], Orders]:
    """Return the moves of every team and their order, from a run with a queue for each communicator. A REDUCE
    begins behind a backward that it follows at once, `before_ns` before that ends.
    """
    # No rule of waiting or reducing is best for all lists: the fastest in simulation is kept. In the order of
    # one run, lists take far longer than that run where compute stands in the queue.
    whole = moves_of(timeline, before_ns)
    if any(of.computes_together for of in whole):
        parts = moves_of(timeline, before_ns, in_parts=True)
        tried = [(parts, meet(parts, WITHIN)), (whole, meet(whole, BETWEEN))]
    else:
        lists = zip(timeline.domain.ops, timeline.transfers, strict=True)
        tried = [(whole, [_in_order(team, *of) for team, of in enumerate(lists)])]
    carries, goes_behind = any(of.carries for of in whole), any(of.goes_behind for of in whole)
    if len(tried) == 1 and not (carries or goes_behind):
        return tried[0]
    timed = [(_takes(*each), each) for each in tried]
    _, (moves, orders) = min(timed, key=itemgetter(0))
    if carries and (amid := reduced_amid(moves, orders)) is not None:
        timed.append((_takes(moves, amid), (moves, amid)))
    if goes_behind:
        early = reduced_early(moves, orders)
        timed.append((_takes(moves, early), (moves, early)))
    return min(timed, key=itemgetter(0))[1]


def _takes(moves: Sequence[Moves], orders: Orders) -> int:
    """What lists take in these orders, NEVER if they get stuck."""
    ns = queue_ns(moves, orders)
    return NEVER if ns is None else ns


def in_orders(domain: DomainPlan, moves: Sequence[Moves], orders: Orders) -> list[list[Op]]:
    """Return the lists of a domain in other orders. What comes between parts of a pass stands behind it, as
    issued within it.
    """
    return [_list(*of) for of in zip(domain.ops, moves, orders, strict=True)]


def _list(ops: Sequence[Op], moves: Moves, order: Sequence[int]) -> list[Op]:
    out = list[Op]()
    within = 0
    for number in order:
        op = ops[moves.places[number]]
        if moves.kinds[number] != COMPUTE:
            out.append(replace(op, within=within) if within else op)
            continue
        out += [] if within else [op]
        within = moves.stops[number] % PARTS
    return out


def _in_order(team: int, ops: tuple[Op, ...], transfers: tuple[Transfer | None, ...]) -> list[int]:
    """Put a team's ops into the order of the transfers that they take part in. Ops go by their place."""
    numbered: list[tuple[bool, int, bool, tuple[object, ...], int]] = []
    issued: dict[tuple[Kind | None, int, int], int] = {}
    for at, (op, transfer) in enumerate(zip(ops, transfers, strict=True)):
        if op.kind is not Kind.WAIT and transfer is not None and transfer.start >= 0:
            issues = op.kind in ISSUED
            # At the same time a message goes first: behind compute it would wait for all of it.
            numbered.append((op.kind is Kind.REDUCE, transfer.start, not issues, transfer.name, at))
            if issues:
                issued[op.kind, op.index, op.virtual_stage] = at
    queue = deque(at for *_, at in sorted(numbered))
    queued = set(queue)
    numbers = frozenset(queue)
    reached: set[int] = set()  # issues of the original list up to here that are still in the queue
    out: list[int] = []

    def may_issue() -> bool:
        # A receive needs no data, so it may be issued before its place in the original list.
        return queue[0] in reached or ops[queue[0]].kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)

    for at, op in enumerate(ops):
        if at not in numbers:
            awaited = issued.get((op.on, op.index, op.virtual_stage)) if op.kind is Kind.WAIT else None
            assert awaited not in queued, f"team {team}: {op} comes before {ops[queue[0]]} can be issued"
            out.append(at)
            continue
        if at in queued:
            reached.add(at)
            while reached and may_issue():
                first = queue.popleft()
                reached.discard(first)
                queued.discard(first)
                out.append(first)
        assert op.kind in ISSUED or at not in queued, f"team {team}: {ops[queue[0]]} keeps {op} waiting"
    return out
