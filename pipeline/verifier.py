"""Refuse a plan that could hang, lose a row or hold too much, before any of it runs.

R1  every communicator sees one order of collectives on all its ranks
R2  sends and receives of each directed pair of stages are in the same order
R3  data order on a rank: encode < ship, wait(ship) < forward, backward < return,
    wait(return) < encode-backward, and the same for activations and their gradients
R4  every issued op is waited for exactly once, after it was issued
R5  each item is encoded once, and its backward runs once, on the same rank (never for a frozen encoder)
R6  microbatches in flight on a stage stay under the cap
R7  the abstract machine runs the lists to the end (`pipeline/simulator.py`)
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from pipeline.plan import ISSUED, Kind, Op, ReplicaPlan, StepPlan
from pipeline.routes import plan_route
from pipeline.simulator import StuckError, run


class PlanRefusedError(RuntimeError):
    """A plan broke a rule; nothing of it has run. The message lists the rules and where they broke."""


def verify(plan: StepPlan, max_in_flight: int, single_fifo: bool = False, replica: int | None = None) -> None:
    """Check all rules on every replica of a plan, or on one of them: its ranks need not check the others.

    `max_in_flight` caps the microbatches whose activations a stage may hold (R6); the last stages hold
    fewer. With `single_fifo` the lists must also run with one communication queue a rank.

    Raises:
        PlanRefusedError: with the first violations of each replica.
    """
    problems = list(_replica_order(plan))
    for number, planned in enumerate(plan.replicas):
        if replica not in (None, number):
            continue
        found = list(violations(planned, plan, max_in_flight, single_fifo))
        problems += [f"replica {number}: {text}" for text in found[:10]]
    if problems:
        lines = "\n  ".join(problems)
        raise PlanRefusedError(f"the plan of step {plan.step} is refused:\n  {lines}")


def violations(
    replica: ReplicaPlan, plan: StepPlan, max_in_flight: int, single_fifo: bool = False
) -> Iterator[str]:
    """Yield every broken rule of one replica as text; nothing if the plan is safe."""
    if unknown := list(_unknown_indices(replica, plan)):
        yield from unknown
        return
    static = [
        *_collective_order(replica),
        *_pair_order(replica),
        *_data_order(replica),
        *_waits(replica),
        *_items(replica, plan),
        *_routes(replica),
        *_in_flight(replica, max_in_flight),
    ]
    yield from static
    for fifo in (False, True) if single_fifo else (False,):
        try:
            run(replica.ops, replica.routes, lambda rank, op: 1, lambda op: 1, single_fifo=fifo)
        except StuckError as error:
            name = "R7 with a single queue a rank" if fifo else "R7"
            yield f"{name}: {error}"


def _indices(ops: Sequence[Op], kind: Kind) -> list[int]:
    return [op.index for op in ops if op.kind is kind]


def _unknown_indices(replica: ReplicaPlan, plan: StepPlan) -> Iterator[str]:
    """Ops of chunks, components or microbatches that the plan does not have: nothing else can be checked."""
    sizes = {
        Kind.ENCODE: len(replica.chunks),
        Kind.ENCODE_BACKWARD: len(replica.chunks),
        Kind.REDUCE: len(plan.components),
    }
    for rank, ops in enumerate(replica.ops):
        for op in ops:
            if not 0 <= op.index < sizes.get(op.kind, len(replica.microbatches)):
                yield f"R5: rank {rank} runs {op}, which is not in the plan"


def _collective_order(replica: ReplicaPlan) -> Iterator[str]:
    def seen(ops: Sequence[Op], kind: Kind) -> list[int]:
        indices = _indices(ops, kind)
        if kind is Kind.REDUCE:
            return indices
        # A route that never leaves its ranks is no collective.
        routes = ((m, replica.routes[m]) for m in indices)
        return [m for m, route in routes if route is None or not route.is_local]

    for kind in (Kind.SHIP, Kind.RETURN, Kind.REDUCE):
        expected = seen(replica.ops[0], kind)
        for rank, ops in enumerate(replica.ops[1:], start=1):
            if seen(ops, kind) != expected:
                yield f"R1: rank {rank} issues {kind} in order {seen(ops, kind)}, rank 0 {expected}"


def _replica_order(plan: StepPlan) -> Iterator[str]:
    """Reductions are collectives of all replicas."""
    for number, replica in enumerate(plan.replicas[1:], start=1):
        orders = [_indices(r.ops[0], Kind.REDUCE) if r.ops else [] for r in (plan.replicas[0], replica)]
        if orders[0] != orders[1]:
            yield f"R1: replica {number} reduces in order {orders[1]}, replica 0 {orders[0]}"


def _pair_order(replica: ReplicaPlan) -> Iterator[str]:
    for low in range(len(replica.ops) - 1):
        high = low + 1
        for sender, receiver, send, receive in (
            (low, high, Kind.SEND_FORWARD, Kind.RECV_FORWARD),
            (high, low, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD),
        ):
            sent = _indices(replica.ops[sender], send)
            received = _indices(replica.ops[receiver], receive)
            if sent != received:
                yield f"R2: rank {sender} sends {send} {sent}, rank {receiver} receives {received}"


def _data_order(replica: ReplicaPlan) -> Iterator[str]:
    for rank, ops in enumerate(replica.ops):
        place = {op: position for position, op in enumerate(ops)}
        if len(place) != len(ops):
            twice = next(op for op, count in Counter(ops).items() if count > 1)
            yield f"R3: rank {rank} runs {twice} more than once"
        for op in ops:
            for earlier in _must_precede(op, rank, replica, place):
                if place.get(earlier, len(ops)) > place[op]:
                    yield f"R3: rank {rank} must run {earlier} before {op}"


def _must_precede(op: Op, rank: int, replica: ReplicaPlan, place: dict[Op, int]) -> Iterator[Op]:
    """The ops of this rank whose result `op` uses."""
    last = len(replica.ops) - 1
    m = op.index
    if op.kind is Kind.FORWARD:
        if rank > 0:
            yield Op(Kind.WAIT, m, Kind.RECV_FORWARD)
        elif replica.routes[m] is not None:
            yield Op(Kind.WAIT, m, Kind.SHIP)
    elif op.kind is Kind.BACKWARD:
        yield Op(Kind.FORWARD, m)
        if rank < last:
            yield Op(Kind.WAIT, m, Kind.RECV_BACKWARD)
    elif op.kind is Kind.SEND_FORWARD:
        yield Op(Kind.FORWARD, m)
    elif op.kind is Kind.SEND_BACKWARD or (op.kind is Kind.RETURN and rank == 0):
        yield Op(Kind.BACKWARD, m)
    elif op.kind is Kind.SHIP:
        for c, chunk in enumerate(replica.chunks):
            if (chunk.microbatch, chunk.rank) == (m, rank):
                yield Op(Kind.ENCODE, c)
    elif op.kind is Kind.ENCODE_BACKWARD:
        yield Op(Kind.ENCODE, m)
        yield Op(Kind.WAIT, replica.chunks[m].microbatch, Kind.RETURN)
    elif op.kind is Kind.REDUCE:
        yield from (other for other in place if other.kind in (Kind.BACKWARD, Kind.ENCODE_BACKWARD))


def _waits(replica: ReplicaPlan) -> Iterator[str]:
    for rank, ops in enumerate(replica.ops):
        open_: set[tuple[Kind, int]] = set()
        for op in ops:
            if op.kind in ISSUED:
                open_.add((op.kind, op.index))
            elif op.kind is Kind.WAIT:
                assert op.on is not None
                if (op.on, op.index) not in open_:
                    yield f"R4: rank {rank} waits for {op.on}({op.index}) that is not in flight"
                open_.discard((op.on, op.index))
        for kind, index in sorted(open_):
            yield f"R4: rank {rank} never waits for {kind}({index})"


def _items(replica: ReplicaPlan, plan: StepPlan) -> Iterator[str]:
    encoded: dict[int, list[int]] = {i: [] for i in range(len(replica.items))}
    backward: dict[int, list[int]] = {i: [] for i in range(len(replica.items))}
    for rank, ops in enumerate(replica.ops):
        for kind, where in ((Kind.ENCODE, encoded), (Kind.ENCODE_BACKWARD, backward)):
            for c in _indices(ops, kind):
                for number in replica.chunks[c].items:
                    where[number].append(rank)
    for number, item in enumerate(replica.items):
        trains = plan.train and item.component not in plan.frozen
        expected = encoded[number] if trains else []
        if len(encoded[number]) != 1 or backward[number] != expected:
            yield (
                f"R5: item {number} is encoded on ranks {encoded[number]} "
                f"and runs backward on ranks {backward[number]}"
            )
    counts = [Counter(ops) for ops in replica.ops]
    for number, component in enumerate(plan.components):
        times = 1 if plan.train and component not in plan.frozen else 0
        for rank, count in enumerate(counts):
            if count[Op(Kind.REDUCE, number)] != times:
                yield f"R5: rank {rank} does not reduce {component} {times} times"
    for m in range(len(replica.microbatches)):
        for rank, count in enumerate(counts):
            expected_passes = (1, 1 if plan.train else 0)
            passes = (count[Op(Kind.FORWARD, m)], count[Op(Kind.BACKWARD, m)])
            if passes != expected_passes:
                yield f"R5: rank {rank} runs microbatch {m} forward and backward {passes} times"


def _routes(replica: ReplicaPlan) -> Iterator[str]:
    """Every row leaves the rank that encoded it once, and arrives where its item stands, once."""
    for m, (batch, route) in enumerate(zip(replica.microbatches, replica.routes, strict=True)):
        if route is None:
            for rank, ops in enumerate(replica.ops):
                if Op(Kind.SHIP, m) in ops or Op(Kind.RETURN, m) in ops:
                    yield f"R5: rank {rank} ships microbatch {m}, which has no route"
        try:
            expected = plan_route(m, batch.layout, replica.items, replica.chunks)
        except AssertionError as error:
            yield f"R5: microbatch {m}: {error}"
            continue
        if route != expected:
            yield f"R5: the route of microbatch {m} does not bring each row to the place of its item"


def _in_flight(replica: ReplicaPlan, cap: int) -> Iterator[str]:
    for rank, ops in enumerate(replica.ops):
        if not any(op.kind is Kind.BACKWARD for op in ops):
            continue  # forward only: activations die at once
        live = 0
        for op in ops:
            live += (op.kind is Kind.FORWARD) - (op.kind is Kind.BACKWARD)
            if live > cap:
                yield f"R6: rank {rank} holds {live} microbatches at {op}, more than {cap}"
                break
