"""Make op lists safe where all communication of a rank shares one queue.

A GPU may serve the communicators of a process one at a time, in the order of issue. Lists that are safe with
a queue for each communicator then hang as soon as two neighbours issue in different orders. The cure is one
order for all: transfers are numbered by when both ends would be ready in a simulation of the original lists,
each rank issues in the order of these numbers, and waits for a transfer only after issuing all before it.
What ranks run together counts as a transfer that is waited for where it stands.
A rank can always do so: what it issues after waiting for x is ready later than x, so its number is higher.
"""

from collections import deque

from pipeline.plan import COMPUTE, DomainPlan, Kind, Op
from pipeline.simulator import ComputeCost, MessageCost, Transfer, communicates, run, transfer_of


def serialise(domain: DomainPlan, compute_ns: ComputeCost, message_ns: MessageCost) -> list[list[Op]]:
    """Reorder the issues of every team's list; compute keeps its order.

    Raises:
        StuckError: if the lists cannot run to the end as they are.
    """
    # Nothing is free: what comes after an op must have a higher number than the op.
    timeline = run(domain, lambda rank, op: max(1, compute_ns(rank, op)), lambda op: max(1, message_ns(op)))
    place = {pair: number for number, pair in enumerate(domain.reductions)}
    return [_in_order(domain, team, timeline.started_ns, place) for team in range(len(domain.ops))]


def _in_order(
    domain: DomainPlan,
    team: int,
    started_ns: dict[Transfer, int],
    place: dict[tuple[int, int], int],
) -> list[Op]:
    ops = domain.ops[team]
    number: dict[Op, tuple[int, bool, int, Transfer]] = {}
    for op in ops:
        if communicates(op, team, domain):
            name, _, _ = transfer_of(op, team, domain)
            # At the same time a message goes first: behind compute it would wait for all of it.
            held = op.kind in COMPUTE or op.kind is Kind.REDUCE
            number[op] = started_ns[name], held, place.get((op.index, op.part), 0) * held, name
    queue = deque(sorted(number, key=lambda op: number[op]))
    queued = set(queue)
    reached: set[Op] = set()  # issues of the original list up to here that are still in the queue
    out: list[Op] = []

    def may_issue() -> bool:
        # A receive needs no data, so it may be issued before its place in the original list.
        return queue[0] in reached or queue[0].kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)

    for op in ops:
        if op in number:
            if op in queued:
                reached.add(op)
                while reached and may_issue():
                    reached.discard(queue[0])
                    queued.discard(queue[0])
                    out.append(queue.popleft())
            assert not number[op][1] or op not in queued, f"team {team}: {queue[0]} keeps {op} waiting"
            continue
        awaited = op.kind is Kind.WAIT and op.on is not None and Op(op.on, op.index, part=op.part)
        assert awaited not in queued, f"team {team}: {op} comes before {queue[0]} can be issued"
        out.append(op)
    return out
