"""Ranks that interleave at random: an oracle for op lists that shares no code with the simulator.

Values are names instead of tensors. A rank may run whenever its next op can; a transfer may complete at any
time after all its ends were issued and everything before it on its communicator is complete. What ranks do
together, compute whose layers communicate and reductions, holds each of them until all have come and nothing
before it is left. Ops take out what they use, so whatever is used twice, too early or never is an error.

All domains reduce together. A domain that runs alone takes the others to be as late as they may: they reduce
nothing before all that comes before it in the order of its own plan. `RandomRanks.together` runs several.

A pass within which any of its ranks issues messages runs in parts, an op for each: `within` says where one
ends, 0 of the last one, which alone does anything.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from random import Random

from parallel.boundary import Route
from parallel.work import Grad
from pipeline.ops import Kind, Op
from pipeline.plan import StepPlan

ENCODER = (Kind.ENCODE, Kind.ENCODE_BACKWARD)
PASS = (Kind.FORWARD, Kind.BACKWARD)
# A message is called by the virtual stage that sends it.
SHIFT = {Kind.RECV_FORWARD: -1, Kind.RECV_BACKWARD: 1}


def is_part(op: Op) -> bool:
    """Whether it is a part of a pass that is not the last one."""
    return op.kind in PASS and op.within > 0


def pass_around(ops: tuple[Op, ...], at: int) -> Op:
    """The pass within which a message goes."""
    return next(op for op in reversed(ops[:at]) if not op.within)


def messages_of(ops: tuple[Op, ...], at: int) -> Iterator[Op]:
    """The messages that go within a pass."""
    return takewhile(lambda op: op.within, ops[at + 1 :])


class DeadlockError(Exception):
    """No rank can run and no transfer can complete."""


class DataError(Exception):
    """An op ran before what it uses was there, or something was left over."""


class _Rank:
    def __init__(self) -> None:
        self.at = 0
        self.values: set[tuple] = set()
        self.waited: set[tuple] = set()
        self.summed: set[tuple[int, int]] = set()
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

    def __init__(self, plan: StepPlan, seed: int, single_queue: bool = False) -> None:
        self.domain = domain = plan.domain
        self.plan = plan
        self.lists = [domain.ops[rank // domain.team] for rank in range(len(domain.holds) * domain.team)]
        self.random = Random(seed)
        self.single_queue = single_queue
        self.parted: dict[tuple, set[int]] = {}
        for rank, ops in enumerate(self.lists):
            for at, op in enumerate(ops):
                if op.within:
                    around = pass_around(ops, at)
                    ends = self.parted.setdefault((*self.line(around, rank), around), set())
                    ends.add(op.within)
        self.lists = [tuple(self.in_parts(ops, rank)) for rank, ops in enumerate(self.lists)]
        self.holds = [domain.holds[rank // domain.team] for rank in range(len(self.lists))]
        self.last = max(number for held in self.holds for number in held)
        taken = {0} | {point.virtual_stage for _, points in domain.feeds for point in points}
        self.with_rows = [[number for number in held if number in taken] for held in self.holds]
        self.ranks = [_Rank() for _ in self.lists]
        # Per communicator and end, what was issued there in order, and how many of them are complete.
        self.issued: dict[tuple, dict[int, list[Op]]] = {}
        self.complete: dict[tuple, int] = {}
        self.queues: list[list[tuple]] = [[] for _ in self.lists]
        self.returned = [{op.index for op in ops if op.kind is Kind.RETURN} for ops in self.lists]
        self.reduced: list[tuple[int, int]] = []
        self.world: list[RandomRanks] = []  # the other domains, if they run too
        self.done: list[tuple[int, Op]] = []

    def in_parts(self, ops: tuple[Op, ...], rank: int) -> Iterator[Op]:
        """The ops of a list, of passes with messages the parts."""
        for at, op in enumerate(ops):
            if op.within:
                continue
            ends = self.parted.get((*self.line(op, rank), op), set()) if op.kind in PASS else set()
            for end in sorted(ends):
                yield replace(op, within=end)
                yield from (each for each in messages_of(ops, at) if each.within == end)
            yield op

    @classmethod
    def together(cls, plans: list[StepPlan], seed: int, single_queue: bool = False) -> None:
        """Run all domains of a world, which reduce gradients together."""
        domains = [cls(plan, seed, single_queue) for plan in plans]
        for domain in domains:
            domain.world = [other for other in domains if other is not domain]
        random = Random(seed)
        while running := [(domain, moves) for domain in domains if (moves := domain.moves())]:
            domain, moves = random.choice(running)
            domain.move(moves)
        for domain in domains:
            domain.finish()

    def run(self) -> list[tuple[int, Op]]:
        """Return (rank, op) in the order in which they ran."""
        while moves := self.moves():
            self.move(moves)
        self.finish()
        return self.done

    def moves(self) -> list[tuple]:
        """What may happen next."""
        lines = [("deliver", line) for line in self.issued if self.can_deliver(line)]
        return [("step", rank) for rank in range(len(self.ranks)) if self.can_run(rank)] + lines

    def move(self, moves: list[tuple]) -> None:
        """Let any of them happen."""
        what, where = self.random.choice(moves)
        if what == "deliver":
            self.deliver(where)
            return
        op = self.next(where)
        if self.step(where) and not is_part(op):
            self.done.append((where, op))

    def finish(self) -> None:
        """Nothing can happen any more, so nothing may be left."""
        left = [str(self.next(rank)) for rank in range(len(self.ranks)) if self.next(rank)]
        if left:
            raise DeadlockError(f"ranks stand at {left}")
        for number, rank in enumerate(self.ranks):
            if rank.values:
                raise DataError(f"rank {number} ends with {sorted(map(str, rank.values))}")
            if rank.waited:
                raise DataError(f"rank {number} never waited for {sorted(map(str, rank.waited))}")
        if any(self.queues):
            raise DataError("something was issued that nobody else took part in")

    def next(self, rank: int) -> Op | None:
        ops, at = self.lists[rank], self.ranks[rank].at
        return ops[at] if at < len(ops) else None

    def holder(self, virtual_stage: int, rank: int) -> int:
        """The domain rank that holds a virtual stage, at the same place among its holders."""
        own = [r for r, held in enumerate(self.holds) if held == self.holds[rank]]
        return [r for r, held in enumerate(self.holds) if virtual_stage in held][own.index(rank)]

    # Communication.

    def line(self, op: Op, rank: int) -> tuple:
        """The communicator of an op, with the ranks at its ends."""
        kind = op.kind
        if kind in (Kind.SHIP, Kind.RETURN):
            return (kind, *range(len(self.ranks)))
        if kind in ENCODER:
            return ("together", *self.domain.encoder_batches[op.index].ranks)
        if kind in PASS:
            low = rank // self.domain.collective_group * self.domain.collective_group
            return ("together", *range(low, low + self.domain.collective_group))
        if kind is Kind.REDUCE:
            home = range(*self.domain.homes[op.index])
            llm = op.index == self.domain.llm
            return ("reduce", *(r for r in home if not llm or op.virtual_stage in self.holds[r]))
        if kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD):
            other = self.holder(op.virtual_stage + 1, rank)
        else:
            other = self.holder(op.virtual_stage - 1, rank)
        sends = kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
        ends = (rank, other) if sends else (other, rank)
        forward = kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
        return ("forward" if forward else "backward", *ends)

    def meets(self, op: Op, rank: int) -> bool:
        """Whether other ranks take part in this op while it runs."""
        return op.kind in (*ENCODER, *PASS) and len(self.line(op, rank)) > 2

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
        if not all(len(self.issued[line].get(rank, [])) > number for rank in line[1:]):
            return False
        if line[0] != "reduce":
            return True
        pair = self.reduces(line)
        if self.world:
            return all(other.came_to(pair) for other in self.world)
        order = self.domain.reductions
        return pair in order and set(order[: order.index(pair)]) <= set(self.reduced)

    def reduces(self, line: tuple) -> tuple[int, int]:
        """What is to be summed next on a line of reductions."""
        op = self.issued[line][line[1]][self.complete.get(line, 0)]
        return op.index, op.virtual_stage

    def came_to(self, pair: tuple[int, int]) -> bool:
        """Whether all holders in this domain have come to a reduction."""
        if pair in self.reduced:
            return True
        line = self.line(Op(Kind.REDUCE, pair[0], virtual_stage=pair[1]), 0)
        number = self.complete.get(line, 0)
        ends = [self.issued.get(line, {}).get(rank, [])[number:] for rank in line[1:]]
        return all(ops and (ops[0].index, ops[0].virtual_stage) == pair for ops in ends)

    def deliver(self, line: tuple) -> None:
        ends = [self.issued[line][rank][self.complete.get(line, 0)] for rank in line[1:]]
        if line[0] == "reduce":
            self.reduced.append((ends[0].index, ends[0].virtual_stage))
        named = {(op.index, op.virtual_stage + SHIFT.get(op.kind, 0)) for op in ends}
        if len(named) != 1 or (line[0] == "together" and len(set(ends)) != 1):
            raise DataError(f"{line} mixes {[str(op) for op in ends]}")
        self.complete[line] = self.complete.get(line, 0) + 1
        for rank, op in zip(line[1:], ends, strict=True):
            self.queues[rank].remove(line)
            self.ranks[rank].waited.add((op.kind, op.index, op.virtual_stage))

    # Ops.

    def can_run(self, rank: int) -> bool:
        """Whether the next op of a rank need not wait."""
        op = self.next(rank)
        if op is None:
            return False
        waited = self.ranks[rank].waited
        if op.kind is Kind.WAIT:
            return (op.on, op.index, op.virtual_stage) in waited
        return not self.ranks[rank].came or (op.kind, op.index, op.virtual_stage) in waited

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
            me.waited.remove((op.kind, op.index, op.virtual_stage))
        if not is_part(op):
            self.do(op, rank)
        me.at += 1
        if me.at == len(self.lists[rank]):
            self.forget_returns(me)
        return True

    def do(self, op: Op, rank: int) -> None:  # noqa: C901  one branch for each kind of op
        me, encoder_batches = self.ranks[rank], self.domain.encoder_batches
        m, virtual_stage = op.index, op.virtual_stage
        own = self.holds[rank]
        if op.kind is Kind.ENCODE:
            for batch in encoder_batches[m].microbatches:
                me.put("encoded", m, batch)
            if self.plan.train and encoder_batches[m].component not in self.plan.frozen:
                me.put("graph", m)
        elif op.kind is Kind.SHIP:
            for c, encoder_batch in enumerate(encoder_batches):
                if m in encoder_batch.microbatches and rank in encoder_batch.ranks:
                    me.take(op, "encoded", c, m)
            self.issue(rank, op)
        elif op.kind is Kind.FORWARD:
            if virtual_stage:
                me.take(op, Kind.RECV_FORWARD, m, virtual_stage)
            if virtual_stage in self.with_rows[rank] and self.domain.routes[m] is not None:
                me.take(op, Kind.SHIP, m, virtual_stage)
            if virtual_stage < self.last:
                after = virtual_stage + 1
                me.put(*((Kind.RECV_FORWARD, m, after) if after in own else ("output", m, virtual_stage)))
            if self.plan.train:
                me.put("pass", m, virtual_stage)
        elif op.kind is Kind.BACKWARD and op.grad is Grad.WEIGHT:
            me.take(op, "weights", m, virtual_stage)
        elif op.kind is Kind.BACKWARD:
            me.take(op, "pass", m, virtual_stage)
            if op.grad is Grad.INPUT and self.plan.trains(self.plan.components[self.domain.llm]):
                me.put("weights", m, virtual_stage)
            if virtual_stage < self.last:
                me.take(op, Kind.RECV_BACKWARD, m, virtual_stage)
            if virtual_stage:
                before = virtual_stage - 1
                me.put(
                    *((Kind.RECV_BACKWARD, m, before) if before in own else ("gradient", m, virtual_stage))
                )
            if virtual_stage in self.with_rows[rank] and m in self.returned[rank]:
                me.put("row gradients", m, virtual_stage)
        elif op.kind is Kind.RETURN:
            for with_rows in self.with_rows[rank]:
                me.take(op, "row gradients", m, with_rows)
            self.issue(rank, op)
        elif op.kind is Kind.ENCODE_BACKWARD and op.grad is Grad.WEIGHT:
            me.take(op, "encoder weights", m)
        elif op.kind is Kind.ENCODE_BACKWARD:
            for batch in encoder_batches[m].microbatches:
                if (Kind.RETURN, batch, 0) not in me.values:
                    raise DataError(f"{op} runs before its gradients are there")
            me.take(op, "graph", m)
            if op.grad is Grad.INPUT:
                me.put("encoder weights", m)
        elif op.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            me.take(op, "output" if op.kind is Kind.SEND_FORWARD else "gradient", m, virtual_stage)
            self.issue(rank, op)
        elif op.kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD):
            self.issue(rank, op)
        elif op.kind is Kind.WAIT:
            self.wait(rank, op)
        else:
            assert op.kind is Kind.REDUCE
            me.summed.add((m, virtual_stage))
            self.issue(rank, op)
        if op.kind in (Kind.BACKWARD, Kind.ENCODE_BACKWARD) and op.grad is not Grad.INPUT:
            llm = op.kind is Kind.BACKWARD
            number = self.domain.llm if llm else self.plan.components.index(encoder_batches[m].component)
            if (number, virtual_stage) in me.summed:
                raise DataError(f"{op} adds to gradients that were reduced before")

    def issue(self, rank: int, op: Op) -> None:
        if self.is_local(op):
            self.ranks[rank].waited.add((op.kind, op.index, op.virtual_stage))
        else:
            line = self.line(op, rank)
            self.issued.setdefault(line, {}).setdefault(rank, []).append(op)
            self.queues[rank].append(line)

    def wait(self, rank: int, op: Op) -> None:
        me = self.ranks[rank]
        me.waited.remove((op.on, op.index, op.virtual_stage))
        if op.on is Kind.SHIP:
            for virtual_stage in self.with_rows[rank]:
                me.put(op.on, op.index, virtual_stage)
        elif op.on in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD, Kind.RETURN):
            me.put(op.on, op.index, op.virtual_stage)

    @staticmethod
    def forget_returns(me: _Rank) -> None:
        # Gradients of rows serve every encoder batch of their microbatch, and none where all are frozen.
        me.values = {value for value in me.values if value[0] is not Kind.RETURN}
