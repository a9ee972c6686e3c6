"""Make op lists safe where all communication of a rank shares one queue.

A GPU may serve the communicators of a process one at a time, in the order of issue. Lists that are safe with
a queue for each communicator then hang as soon as two neighbours issue in different orders. The cure is one
order for all: transfers are numbered by when both ends would be ready in a simulation of the original lists,
each rank issues in the order of these numbers, and waits for a transfer only after issuing all before it.
A rank can always do so: what it issues after waiting for x is ready later than x, so its number is higher.
"""

from collections import deque
from collections.abc import Sequence

from parallel.boundary import Route
from pipeline.plan import COLLECTIVE, ISSUED, Kind, Op
from pipeline.simulator import ComputeCost, MessageCost, Transfer, run, transfer_of


def serialise(
    ops: Sequence[Sequence[Op]],
    routes: Sequence[Route | None],
    compute_ns: ComputeCost,
    message_ns: MessageCost,
) -> list[list[Op]]:
    """Reorder the issues of every rank's list; compute keeps its order.

    Raises:
        StuckError: if the lists cannot run to the end as they are.
    """
    timeline = run(ops, routes, compute_ns, lambda op: max(1, message_ns(op)))
    return [_in_order(of_rank, rank, routes, timeline.started_ns) for rank, of_rank in enumerate(ops)]


def _in_order(
    ops: Sequence[Op], rank: int, routes: Sequence[Route | None], started_ns: dict[Transfer, int]
) -> list[Op]:
    number = {
        op: (started_ns[transfer_of(op, rank)], transfer_of(op, rank))
        for op in ops
        if op.kind in ISSUED and not _is_local(op, routes)
    }
    queue = deque(sorted(number, key=lambda op: number[op]))
    reached: set[Op] = set()  # issues of the original list up to here that are still in the queue
    out: list[Op] = []

    def may_issue() -> bool:
        # A receive needs no data, so it may be issued before its place in the original list.
        return queue[0] in reached or queue[0].kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)

    for op in ops:
        if op in number:
            if op in queue:
                reached.add(op)
                while reached and may_issue():
                    reached.discard(queue[0])
                    out.append(queue.popleft())
            continue
        awaited = op.kind is Kind.WAIT and op.on is not None and Op(op.on, op.index)
        assert awaited not in queue, f"rank {rank}: {op} comes before {queue[0]} can be issued"
        out.append(op)
    return out


def _is_local(op: Op, routes: Sequence[Route | None]) -> bool:
    route = routes[op.index] if op.kind in COLLECTIVE else None
    return route is not None and route.is_local
