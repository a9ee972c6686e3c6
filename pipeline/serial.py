"""Make op lists safe where all communication of a rank shares one queue.

A GPU may serve the communicators of a process one at a time, in the order of issue. Lists that are safe with
a queue for each communicator then hang as soon as two neighbours issue in different orders. The cure is one
order for all: transfers are numbered by when both ends would be ready in a simulation of the original lists,
each rank issues in the order of these numbers, and waits for a transfer only after issuing all before it.
Compute that ranks run together counts as a transfer that is waited for where it stands.
A rank can always do so: what it issues after waiting for x is ready later than x, so its number is higher.
"""

from collections import deque

from pipeline.plan import COMPUTE, DomainPlan, Kind, Op
from pipeline.simulator import ComputeCost, MessageCost, Transfer, communicates, run, transfer_of


def serialise(domain: DomainPlan, compute_ns: ComputeCost, message_ns: MessageCost) -> list[list[Op]]:
    """Reorder the issues of every rank's list; compute keeps its order.

    Raises:
        StuckError: if the lists cannot run to the end as they are.
    """
    # Nothing is free: what comes after an op must have a higher number than the op.
    timeline = run(domain, lambda rank, op: max(1, compute_ns(rank, op)), lambda op: max(1, message_ns(op)))
    return [_in_order(domain, rank, timeline.started_ns) for rank in range(domain.num_ranks)]


def _in_order(domain: DomainPlan, rank: int, started_ns: dict[Transfer, int]) -> list[Op]:
    ops = domain.ops[rank]

    def numbered(op: Op) -> tuple[int, bool, Transfer]:
        # At the same time a message goes first: behind compute it would wait for all of it.
        transfer = transfer_of(op, rank, domain)
        return started_ns[transfer], op.kind in COMPUTE, transfer

    number = {op: numbered(op) for op in ops if communicates(op, rank, domain)}
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
            assert op.kind not in COMPUTE or op not in queued, f"rank {rank}: {queue[0]} keeps {op} waiting"
            continue
        awaited = op.kind is Kind.WAIT and op.on is not None and Op(op.on, op.index)
        assert awaited not in queued, f"rank {rank}: {op} comes before {queue[0]} can be issued"
        out.append(op)
    return out
