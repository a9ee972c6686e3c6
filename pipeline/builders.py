"""Schedules: from a domain's work to the ordered ops of each of its ranks.

A builder orders compute; `expand` then inserts every communication and every wait by fixed rules, so that
a new schedule is only a new order of compute. Builders are pure and every rank runs them alike.

Sources: 1F1B after PipeDream-Flush (Narayanan et al., 2021, section 2); encode-first is the schedule in which
all ranks encode before the pipeline starts (LongCat-Flash-Omni report, section 5, among others).
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from parallel.policy import Policy
from pipeline.plan import DomainPlan, Kind, Op

Order = list[list[Op]]
Builder = Callable[[DomainPlan], Order]


def one_f_one_b(stages: int, microbatches: int, stage: int) -> list[Op]:
    """Order of forward and backward passes of one stage: at most `stages - stage` microbatches in flight."""
    warmup = min(stages - stage - 1, microbatches)
    ops = [Op(Kind.FORWARD, m) for m in range(warmup)]
    for m in range(microbatches - warmup):
        ops += [Op(Kind.FORWARD, warmup + m), Op(Kind.BACKWARD, m)]
    return ops + [Op(Kind.BACKWARD, m) for m in range(microbatches - warmup, microbatches)]


def build_one_f_one_b(domain: DomainPlan) -> Order:
    """1F1B with encoder work where the first stage needs it: just in time, at most a few microbatches ahead.

    Stage s runs s forwards behind the first stage, so it encodes microbatch m + s before its own forward of
    m, and finds the gradients of m - s ready after its own backward of m. Encoding its own microbatch would
    be too late: the first stage would wait for rows that a later stage encodes only after that stage itself
    waited for the first one. Ranks of several stages that encode together go back together, when the latest
    of these stages would: each at its own time would wait for the others in a circle.
    """
    order = []
    last = len(domain.microbatches) - 1

    def behind(chunk: int, backward: int) -> int:
        """The microbatch whose encoders go back after the backward pass of another."""
        latest = domain.stage(domain.chunks[chunk].ranks[-1])
        assert latest is not None, "a chunk is on ranks of the LLM, or beside it"
        return backward - latest

    for rank, mine in enumerate(_chunks_by_rank(domain)):
        stage = domain.stage(rank)
        if stage is None:
            order.append(_all(mine))
            continue
        ops: list[Op] = []
        for op in one_f_one_b(domain.num_stages, last + 1, stage):
            if op.kind is Kind.FORWARD:
                ahead = op.index + stage
                ops += [Op(Kind.ENCODE, c) for c, m in mine if m == ahead or (op.index == 0 and m < ahead)]
            ops.append(op)
            if op.kind is Kind.BACKWARD:
                ops += [
                    Op(Kind.ENCODE_BACKWARD, c)
                    for c, m in mine
                    if m == behind(c, op.index) or (op.index == last and m > behind(c, last))
                ]
        order.append(ops)
    return order


def build_encode_first(domain: DomainPlan) -> Order:
    """All encoder forwards, then 1F1B, then all encoder backwards."""
    order = []
    for rank, mine in enumerate(_chunks_by_rank(domain)):
        stage = domain.stage(rank)
        between = [] if stage is None else one_f_one_b(domain.num_stages, len(domain.microbatches), stage)
        order.append(_all(mine, between))
    return order


def build_forward_only(domain: DomainPlan) -> Order:
    """Evaluation: each microbatch's encoder work, then its forward; nothing goes back."""
    order = []
    for rank, mine in enumerate(_chunks_by_rank(domain)):
        ops = []
        for m in range(len(domain.microbatches)):
            ops += [Op(Kind.ENCODE, c) for c, of in mine if of == m]
            ops += [] if domain.stage(rank) is None else [Op(Kind.FORWARD, m)]
        order.append(ops)
    return order


def _chunks_by_rank(domain: DomainPlan) -> Iterator[list[tuple[int, int]]]:
    """Yield for each rank its chunks as (number, microbatch), earlier microbatches first: an order that ranks
    which encode together share, wherever they stand.
    """
    mine: list[list[tuple[int, int]]] = [[] for _ in range(domain.num_ranks)]
    for number, chunk in sorted(enumerate(domain.chunks), key=lambda entry: entry[1].microbatch):
        for rank in chunk.ranks:
            mine[rank].append((number, chunk.microbatch))
    yield from mine


def _all(mine: list[tuple[int, int]], between: list[Op] | None = None) -> list[Op]:
    backward = [Op(Kind.ENCODE_BACKWARD, c) for c, _ in mine]
    return [Op(Kind.ENCODE, c) for c, _ in mine] + (between or []) + backward


@dataclass(frozen=True)
class SchedulePolicy(Policy):
    """In which order the ranks of a domain run its chunks and microbatches in training.

    `decide(domain)` gives for each position its ops of compute in order: FORWARD and BACKWARD of every
    microbatch where it holds a part of the LLM, ENCODE and ENCODE_BACKWARD of every chunk it is in. Ranks
    that run an op together must have such ops in one order; what breaks rules R1 to R7 is refused before it
    runs.
    """

    group: ClassVar[str] = "omni.schedule"
    decide: Builder

    def __call__(self, domain: DomainPlan) -> Order:
        """Return the ops of each position."""
        order = self.decide(domain)
        self.require(len(order) == domain.num_ranks, f"{domain.num_ranks} positions have a list each")
        return order


ONE_F_ONE_B = SchedulePolicy("one_f_one_b", build_one_f_one_b)
ENCODE_FIRST = SchedulePolicy("encode_first", build_encode_first)


def without_encoder_backward(order: Order, domain: DomainPlan, frozen: frozenset[str]) -> Order:
    """Drop the backward of chunks whose component is frozen this step."""
    idle = {number for number, chunk in enumerate(domain.chunks) if chunk.component in frozen}
    return [
        [op for op in ops if op.kind is not Kind.ENCODE_BACKWARD or op.index not in idle] for ops in order
    ]


def expand(order: Order, domain: DomainPlan) -> list[list[Op]]:
    """Insert all communication into an order of compute, for every rank of a domain.

    - A receive is issued before the compute that precedes its use, so that it overlaps with that compute.
    - SHIP(m) follows the rank's last chunk of all microbatches up to m: one order on every rank (R1).
    - RETURN(m) is issued right after the rank's own backward of m, long before any rank waits for it: a
      return issued only where it is needed would make every chunk a barrier. A rank beside the LLM has no
      backward to wait for, so it issues all returns after its last ship.
    - A send is waited for before the next one of its direction, and at the end.
    """
    returned = {
        domain.chunks[op.index].microbatch for ops in order for op in ops if op.kind is Kind.ENCODE_BACKWARD
    }
    backward = [op.index for op in order[0] if op.kind is Kind.BACKWARD]
    returns = [m for m in backward if m in returned]
    return [_expand_rank(ops, rank, domain, returns) for rank, ops in enumerate(order)]


def _expand_rank(order: list[Op], rank: int, domain: DomainPlan, returns: list[int]) -> list[Op]:
    first, last = domain.is_first(rank), domain.is_last(rank)
    beside, takes_rows = domain.stage(rank) is None, bool(domain.points(rank))
    chunks = domain.chunks
    forwards = [op.index for op in order if op.kind is Kind.FORWARD]
    backwards = [op.index for op in order if op.kind is Kind.BACKWARD]
    unencoded: dict[int, int] = {}
    for op in order:
        if op.kind is Kind.ENCODE:
            microbatch = chunks[op.index].microbatch
            unencoded[microbatch] = unencoded.get(microbatch, 0) + 1
    ships = deque(m for m, route in enumerate(domain.routes) if route is not None)
    forward_receives = deque([] if first else forwards)
    backward_receives = deque([] if last else backwards)
    waiting: dict[Kind, int | None] = {Kind.SEND_FORWARD: None, Kind.SEND_BACKWARD: None}
    unwaited: set[tuple[Kind, int]] = set()
    out: list[Op] = []

    def issue(kind: Kind, index: int) -> None:
        out.append(Op(kind, index))
        unwaited.add((kind, index))

    def wait(kind: Kind, index: int) -> None:
        if (kind, index) in unwaited:
            unwaited.remove((kind, index))
            out.append(Op(Kind.WAIT, index, kind))

    def receive(queue: deque[int], kind: Kind) -> None:
        if queue:
            issue(kind, queue.popleft())

    def send(kind: Kind, index: int) -> None:
        before = waiting[kind]
        if before is not None:
            wait(kind, before)
        issue(kind, index)
        waiting[kind] = index

    def ship_ready() -> None:
        while ships and not any(unencoded.get(m) for m in unencoded if m <= ships[0]):
            issue(Kind.SHIP, ships.popleft())

    def give_back(m: int) -> None:
        wait(Kind.SHIP, m)
        issue(Kind.RETURN, m)

    receive(forward_receives, Kind.RECV_FORWARD)
    receive(backward_receives, Kind.RECV_BACKWARD)
    ship_ready()
    early = deque(returns if beside else [])
    for op in order:
        m = chunks[op.index].microbatch if op.kind in (Kind.ENCODE, Kind.ENCODE_BACKWARD) else op.index
        if op.kind is Kind.ENCODE:
            out.append(op)
            unencoded[m] -= 1
            ship_ready()
        elif op.kind is Kind.FORWARD:
            if takes_rows:
                wait(Kind.SHIP, m)
            if not first:
                wait(Kind.RECV_FORWARD, m)
                receive(forward_receives, Kind.RECV_FORWARD)
            out.append(op)
            if not last:
                send(Kind.SEND_FORWARD, m)
        elif op.kind is Kind.BACKWARD:
            if not last:
                wait(Kind.RECV_BACKWARD, m)
                receive(backward_receives, Kind.RECV_BACKWARD)
            out.append(op)
            if not first:
                send(Kind.SEND_BACKWARD, m)
            if m in returns:
                give_back(m)
        else:
            assert op.kind is Kind.ENCODE_BACKWARD, f"{op} is not compute"
            while early:
                give_back(early.popleft())
            wait(Kind.RETURN, m)
            out.append(op)
    while early:
        give_back(early.popleft())
    for kind, index in sorted(unwaited):
        out.append(Op(Kind.WAIT, index, kind))
    return out
