"""Ranks that interleave at random: an oracle for op lists that shares no code with the simulator.

Values are names instead of tensors. A rank may run whenever its next op can; a transfer may complete at any
time after all its ends were issued and everything before it on its communicator is complete. What ranks do
together, compute whose layers communicate and reductions, holds each of them until all have come and nothing
before it is left. Ops take out what they use, so whatever is used twice, too early or never is an error.
"""

from random import Random

from parallel.boundary import Route
from pipeline.plan import DomainPlan, Kind, Op, StepPlan

ENCODER = (Kind.ENCODE, Kind.ENCODE_BACKWARD)
PASS = (Kind.FORWARD, Kind.BACKWARD)


class DeadlockError(Exception):
    """No rank can run and no transfer can complete."""


class DataError(Exception):
    """An op ran before what it uses was there, or something was left over."""


class _Rank:
    def __init__(self) -> None:
        self.at = 0
        self.values: set[tuple] = set()
        self.waited: set[tuple] = set()
        self.came = False  # to the op it stands at, which others take part in

    def take(self, op: Op, *value: object) -> None:
        if value not in self.values:
            raise DataError(f"{op} runs before {value} is there")
        self.values.remove(value)

    def put(self, *value: object) -> None:
        if value in self.values:
            raise DataError(f"{value} is made twice")
        self.values.add(value)


class RandomRanks:
    """One run of all ranks of a domain in an order that the seed chooses.

    With `single_queue` whatever a rank issues, on any communicator, completes in the order of issue.
    """

    def __init__(self, domain: DomainPlan, plan: StepPlan, seed: int, single_queue: bool = False) -> None:
        self.domain = domain
        self.plan = plan
        self.random = Random(seed)
        self.single_queue = single_queue
        self.width = domain.pool * domain.tp
        self.llm = domain.num_stages * self.width
        taken = {0} | {point.stage for _, points in domain.feeds for point in points}
        self.takes_rows = [rank // self.width in taken and rank < self.llm for rank in range(len(domain.ops))]
        self.ranks = [_Rank() for _ in domain.ops]
        # Per communicator and end, what was issued there in order; and how many of them are complete.
        self.issued: dict[tuple, dict[int, list[Op]]] = {}
        self.complete: dict[tuple, int] = {}
        self.queues: list[list[tuple]] = [[] for _ in domain.ops]
        self.returned = [{op.index for op in ops if op.kind is Kind.RETURN} for ops in domain.ops]

    def run(self) -> list[tuple[int, Op]]:
        """Return (rank, op) in the order in which they ran."""
        done = []
        while True:
            moves = [(self.step, rank) for rank in range(len(self.ranks)) if self.can_run(rank)]
            moves += [(self.deliver, line) for line in sorted(self.issued, key=str) if self.can_deliver(line)]
            if not moves:
                break
            move, where = self.random.choice(moves)
            op = self.next(where) if move == self.step else None
            if move(where) is not False and op is not None:
                done.append((where, op))
        left = [str(self.next(rank)) for rank in range(len(self.ranks)) if self.next(rank)]
        if left:
            raise DeadlockError(f"ranks stand at {left}")
        for number, rank in enumerate(self.ranks):
            if rank.values:
                raise DataError(f"rank {number} ends with {sorted(map(str, rank.values))}")
        return done

    def next(self, rank: int) -> Op | None:
        ops, at = self.domain.ops[rank], self.ranks[rank].at
        return ops[at] if at < len(ops) else None

    def is_first(self, rank: int) -> bool:
        return rank < self.width

    def is_last(self, rank: int) -> bool:
        return self.llm - self.width <= rank < self.llm

    # Communication.

    def line(self, op: Op, rank: int) -> tuple:
        """The communicator of an op, with the ranks at its ends."""
        kind = op.kind
        if kind in (Kind.SHIP, Kind.RETURN):
            return (kind, *range(len(self.ranks)))
        if kind in ENCODER:
            return ("together", *self.domain.chunks[op.index].ranks)
        if kind in PASS:
            low = rank // self.domain.party * self.domain.party
            return ("together", *range(low, low + self.domain.party))
        if kind is Kind.REDUCE:
            return ("reduce", *range(*self.domain.homes[op.index]))
        up = {Kind.SEND_FORWARD: rank, Kind.RECV_FORWARD: rank - self.width}
        down = {Kind.SEND_BACKWARD: rank - self.width, Kind.RECV_BACKWARD: rank}
        low = {**up, **down}[kind]
        return ("forward" if kind in up else "backward", low, low + self.width)

    def meets(self, op: Op, rank: int) -> bool:
        """Whether other ranks take part in this op while it runs."""
        return op.kind in (*ENCODER, *PASS, Kind.REDUCE) and len(self.line(op, rank)) > 2

    def is_local(self, op: Op) -> bool:
        if op.kind not in (Kind.SHIP, Kind.RETURN):
            return False
        route: Route | None = self.domain.routes[op.index]
        if route is None:
            raise DataError(f"{op} has no route")
        return all(s.source == s.destination for s in route.segments)

    def can_deliver(self, line: tuple) -> bool:
        number = self.complete.get(line, 0)
        if any(not 0 <= rank < len(self.ranks) for rank in line[1:]):
            return False
        if self.single_queue and any(self.queues[rank][:1] != [line] for rank in line[1:]):
            return False
        return all(len(self.issued[line].get(rank, [])) > number for rank in line[1:])

    def deliver(self, line: tuple) -> None:
        ends = [self.issued[line][rank][self.complete.get(line, 0)] for rank in line[1:]]
        if len({op.index for op in ends}) != 1 or (line[0] == "together" and len(set(ends)) != 1):
            raise DataError(f"{line} mixes {[str(op) for op in ends]}")
        self.complete[line] = self.complete.get(line, 0) + 1
        for rank, op in zip(line[1:], ends, strict=True):
            self.queues[rank].remove(line)
            self.ranks[rank].waited.add((op.kind, op.index))

    # Ops.

    def can_run(self, rank: int) -> bool:
        op = self.next(rank)
        if op is None:
            return False
        if op.kind is Kind.WAIT:
            return (op.on, op.index) in self.ranks[rank].waited
        return not self.ranks[rank].came or (op.kind, op.index) in self.ranks[rank].waited

    def step(self, rank: int) -> bool:
        """Run a rank's next op; False if the rank has only come to where others must come too."""
        op = self.next(rank)
        assert op is not None
        me = self.ranks[rank]
        if self.meets(op, rank):
            if not me.came:
                me.came = True
                self.issue(rank, op)
                return False
            me.came = False
            me.waited.remove((op.kind, op.index))
        self.do(op, rank)
        me.at += 1
        if me.at == len(self.domain.ops[rank]):
            self.forget_returns(me)
        return True

    def do(self, op: Op, rank: int) -> None:
        me, chunks, m = self.ranks[rank], self.domain.chunks, op.index
        if op.kind is Kind.ENCODE:
            me.put("encoded", m)
        elif op.kind is Kind.SHIP:
            for c, chunk in enumerate(chunks):
                if chunk.microbatch == m and rank in chunk.ranks:
                    me.take(op, "encoded", c)
                    if self.plan.train and chunk.component not in self.plan.frozen:
                        me.put("graph", c)
            self.issue(rank, op)
        elif op.kind is Kind.FORWARD:
            if not self.is_first(rank):
                me.take(op, Kind.RECV_FORWARD, m)
            if self.takes_rows[rank] and self.domain.routes[m] is not None:
                me.take(op, Kind.SHIP, m)
            if not self.is_last(rank):
                me.put("output", m)
            if self.plan.train:
                me.put("pass", m)
        elif op.kind is Kind.BACKWARD:
            me.take(op, "pass", m)
            if not self.is_last(rank):
                me.take(op, Kind.RECV_BACKWARD, m)
            if not self.is_first(rank):
                me.put("gradient", m)
            if self.takes_rows[rank] and m in self.returned[rank]:
                me.put("row gradients", m)
        elif op.kind is Kind.RETURN:
            if self.takes_rows[rank]:
                me.take(op, "row gradients", m)
            self.issue(rank, op)
        elif op.kind is Kind.ENCODE_BACKWARD:
            if (Kind.RETURN, chunks[m].microbatch) not in me.values:
                raise DataError(f"{op} runs before its gradients are there")
            me.take(op, "graph", m)
        elif op.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            me.take(op, "output" if op.kind is Kind.SEND_FORWARD else "gradient", m)
            self.issue(rank, op)
        elif op.kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD):
            self.issue(rank, op)
        elif op.kind is Kind.WAIT:
            self.wait(rank, op)
        else:
            assert op.kind is Kind.REDUCE
            for value in me.values:
                if value[0] in ("pass", "graph"):
                    raise DataError(f"{op} runs before the backward of {value}")
            self.forget_returns(me)

    def issue(self, rank: int, op: Op) -> None:
        if self.is_local(op):
            self.ranks[rank].waited.add((op.kind, op.index))
        else:
            line = self.line(op, rank)
            self.issued.setdefault(line, {}).setdefault(rank, []).append(op)
            self.queues[rank].append(line)

    def wait(self, rank: int, op: Op) -> None:
        me = self.ranks[rank]
        me.waited.remove((op.on, op.index))
        brings = op.on in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD, Kind.RETURN)
        if brings or (op.on is Kind.SHIP and self.takes_rows[rank]):
            me.put(op.on, op.index)

    @staticmethod
    def forget_returns(me: _Rank) -> None:
        # Gradients of rows serve every chunk of their microbatch, and none where all are frozen.
        me.values = {value for value in me.values if value[0] is not Kind.RETURN}
