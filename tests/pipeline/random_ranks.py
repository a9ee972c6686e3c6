"""Ranks that interleave at random: an oracle for op lists that shares no code with the simulator.

Values are names instead of tensors. A rank may run whenever its next op can; a transfer may complete at any
time after all its ends were issued and everything before it on its communicator is complete. Ops take out
what they use, so whatever is used twice, too early or never is an error.
"""

from random import Random

from parallel.boundary import Route
from pipeline.plan import Kind, Op, ReplicaPlan, StepPlan


class DeadlockError(Exception):
    """No rank can run and no transfer can complete."""


class DataError(Exception):
    """An op ran before what it uses was there, or something was left over."""


class _Rank:
    def __init__(self) -> None:
        self.at = 0
        self.values: set[tuple] = set()
        self.waited: set[tuple] = set()

    def take(self, op: Op, *value: object) -> None:
        if value not in self.values:
            raise DataError(f"{op} runs before {value} is there")
        self.values.remove(value)

    def put(self, *value: object) -> None:
        if value in self.values:
            raise DataError(f"{value} is made twice")
        self.values.add(value)


class RandomRanks:
    """One run of all ranks of a replica in an order that the seed chooses.

    With `single_queue` whatever a rank issues, on any communicator, completes in the order of issue.
    """

    def __init__(self, replica: ReplicaPlan, plan: StepPlan, seed: int, single_queue: bool = False) -> None:
        self.replica = replica
        self.plan = plan
        self.random = Random(seed)
        self.single_queue = single_queue
        self.last = len(replica.ops) - 1
        self.ranks = [_Rank() for _ in replica.ops]
        # Per communicator and end, what was issued there in order; and how many of them are complete.
        self.issued: dict[tuple, dict[int, list[Op]]] = {}
        self.complete: dict[tuple, int] = {}
        self.queues: list[list[tuple]] = [[] for _ in replica.ops]
        self.returned = [{op.index for op in ops if op.kind is Kind.RETURN} for ops in replica.ops]

    def run(self) -> list[tuple[int, Op]]:
        """Return (rank, op) in the order in which they ran."""
        done = []
        while True:
            moves = [(self.step, rank) for rank in range(len(self.ranks)) if self.can_run(rank)]
            moves += [(self.deliver, line) for line in sorted(self.issued, key=str) if self.can_deliver(line)]
            if not moves:
                break
            move, where = self.random.choice(moves)
            if move == self.step:
                done.append((where, self.next(where)))
            move(where)
        left = [str(self.next(rank)) for rank in range(len(self.ranks)) if self.next(rank)]
        if left:
            raise DeadlockError(f"ranks stand at {left}")
        for number, rank in enumerate(self.ranks):
            if rank.values:
                raise DataError(f"rank {number} ends with {sorted(map(str, rank.values))}")
        return done

    def next(self, rank: int) -> Op | None:
        ops, at = self.replica.ops[rank], self.ranks[rank].at
        return ops[at] if at < len(ops) else None

    # Communication.

    def line(self, kind: Kind, rank: int) -> tuple:
        """The communicator of an op, with the ranks at its ends."""
        if kind in (Kind.SHIP, Kind.RETURN):
            return (kind, *range(len(self.ranks)))
        up = {Kind.SEND_FORWARD: rank, Kind.RECV_FORWARD: rank - 1}
        down = {Kind.SEND_BACKWARD: rank - 1, Kind.RECV_BACKWARD: rank}
        low = {**up, **down}[kind]
        return ("forward" if kind in up else "backward", low, low + 1)

    def is_local(self, op: Op) -> bool:
        if op.kind not in (Kind.SHIP, Kind.RETURN):
            return False
        route: Route | None = self.replica.routes[op.index]
        if route is None:
            raise DataError(f"{op} has no route")
        return all(s.source == s.destination for s in route.segments)

    def can_deliver(self, line: tuple) -> bool:
        number = self.complete.get(line, 0)
        if self.single_queue and any(self.queues[rank][:1] != [line] for rank in line[1:]):
            return False
        return all(len(self.issued[line].get(rank, [])) > number for rank in line[1:])

    def deliver(self, line: tuple) -> None:
        ends = [self.issued[line][rank][self.complete.get(line, 0)] for rank in line[1:]]
        if len({op.index for op in ends}) != 1:
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
        return op.kind is not Kind.WAIT or (op.on, op.index) in self.ranks[rank].waited

    def step(self, rank: int) -> None:
        op = self.next(rank)
        assert op is not None
        me, chunks, m = self.ranks[rank], self.replica.chunks, op.index
        here = [c for c, chunk in enumerate(chunks) if (chunk.microbatch, chunk.rank) == (m, rank)]
        if op.kind is Kind.ENCODE:
            me.put("encoded", m)
        elif op.kind is Kind.SHIP:
            for c in here:
                me.take(op, "encoded", c)
                if self.plan.train and chunks[c].component not in self.plan.frozen:
                    me.put("graph", c)
            self.issue(rank, op)
        elif op.kind is Kind.FORWARD:
            if rank > 0:
                me.take(op, Kind.RECV_FORWARD, m)
            elif self.replica.routes[m] is not None:
                me.take(op, Kind.SHIP, m)
            if rank < self.last:
                me.put("output", m)
            if self.plan.train:
                me.put("pass", m)
        elif op.kind is Kind.BACKWARD:
            me.take(op, "pass", m)
            if rank < self.last:
                me.take(op, Kind.RECV_BACKWARD, m)
            if rank > 0:
                me.put("gradient", m)
            elif m in self.returned[rank]:
                me.put("row gradients", m)
        elif op.kind is Kind.RETURN:
            if rank == 0:
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
        me.at += 1
        if me.at == len(self.replica.ops[rank]):
            self.forget_returns(me)

    def issue(self, rank: int, op: Op) -> None:
        if self.is_local(op):
            self.ranks[rank].waited.add((op.kind, op.index))
        else:
            line = self.line(op.kind, rank)
            self.issued.setdefault(line, {}).setdefault(rank, []).append(op)
            self.queues[rank].append(line)

    def wait(self, rank: int, op: Op) -> None:
        me = self.ranks[rank]
        me.waited.remove((op.on, op.index))
        brings = op.on in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD, Kind.RETURN)
        if brings or (op.on is Kind.SHIP and rank == 0):
            me.put(op.on, op.index)

    @staticmethod
    def forget_returns(me: _Rank) -> None:
        # Gradients of rows serve every chunk of their microbatch, and none where all are frozen.
        me.values = {value for value in me.values if value[0] is not Kind.RETURN}
