"""Run a verified plan on real ranks.

The engine walks this rank's op list from front to back and does what each op says; it decides nothing and
knows no policy. Compute runs at once, communication is issued and waited for by separate ops, each direction
on a communicator of its own. Rows of encoders are detached where they leave: their gradients come back along
the transposed route, and the encoder's backward runs on the rank where its forward ran.

Shapes: T tokens of a microbatch, R rows, D width of the LLM.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ops.rows import gather_rows, scatter_rows
from parallel.boundary import Ends, Shipment, ship
from parallel.groups import Groups
from parallel.transports import Lane, Work
from parallel.waiting import is_communication, stall
from pipeline.anchor import Anchor, Stage, StepInputs
from pipeline.plan import COLLECTIVE, EMBEDDING, DomainPlan, Kind, Op, StepPlan


@dataclass
class StepResult:
    """What a step leaves behind on this rank.

    `sums` are the last stage's reported sums ([2 · sources], None elsewhere); `outputs` are the last stage's
    outputs of a forward-only plan by microbatch; `timings` are (op, start, end) in seconds of this process's
    clock, of what the host did.
    """

    sums: torch.Tensor | None = None
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    timings: list[tuple[Op, float, float]] = field(default_factory=list)


class Engine:
    """Runs the op lists of one rank of one domain.

    `ranks` are the global ranks of the domain by position, and `position` this rank's place among them.
    `stage` is None on a rank beside the LLM; `width` and `dtype` are those of the LLM's activations.
    `reducers` are called for REDUCE ops, by number of the component and of the part. `on_op` hears of every
    op before it runs, so that a watchdog can say where a rank stands.
    """

    def __init__(
        self,
        *,
        position: int,
        ranks: Sequence[int],
        stage: Stage | None,
        width: int,
        dtype: torch.dtype,
        anchors: Mapping[str, Anchor],
        groups: Groups,
        device: torch.device,
        reducers: Mapping[tuple[int, int], Callable[[], None]],
        timeout_s: float,
        on_op: Callable[[Op], None],
    ) -> None:
        self.position = position
        self.ranks = tuple(ranks)
        self.stage = stage
        self.width = width
        self.dtype = dtype
        self.anchors = anchors
        self.groups = groups
        self.device = device
        self.reducers = reducers
        self.timeout_s = timeout_s
        self.lanes = {Kind.SHIP: Lane(device), Kind.RETURN: Lane(device)}
        self.on_op = on_op

    def run(self, plan: StepPlan, domain: DomainPlan, inputs: StepInputs) -> StepResult:
        """Run this rank's ops of `domain`. The plan must have been verified and agreed on.

        Raises:
            StallError: if a peer does not answer within the timeout.
        """
        step = _Step(self, plan, domain, inputs)
        with torch.set_grad_enabled(plan.train):
            for op in domain.ops[self.position]:
                self.on_op(op)
                start = time.perf_counter()
                step.do(op)
                step.result.timings.append((op, start, time.perf_counter()))
        step.assert_nothing_left()
        return step.result


class _Step:
    """The tensors that live during one step, each from the op that makes it to the op that uses it last."""

    def __init__(self, engine: Engine, plan: StepPlan, domain: DomainPlan, inputs: StepInputs) -> None:
        self.engine = engine
        self.plan = plan
        self.domain = domain
        self.inputs = inputs
        self.position = engine.position
        self.first = domain.is_first(engine.position)
        self.last = domain.is_last(engine.position)
        self.part = domain.stage(engine.position) or 0
        self.takes_rows = bool(domain.points(engine.position))
        # Microbatches whose rows take gradients back to a component that trains.
        self.returned = {op.index for op in domain.ops[engine.position] if op.kind is Kind.RETURN}
        self.result = StepResult()
        # By chunk: rows with their graph. By microbatch: the rest.
        self.encoded: dict[int, torch.Tensor] = {}
        self.shipped: dict[int, torch.Tensor] = {}
        self.row_grads: dict[int, torch.Tensor] = {}
        self.inbox: dict[tuple[Kind, int], torch.Tensor] = {}
        self.outbox: dict[tuple[Kind, int], torch.Tensor] = {}
        self.passes: dict[int, tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]] = {}
        self.flights: dict[tuple[Kind, int], Any] = {}
        self.handlers: Mapping[Kind, Callable[[int], None]] = {
            Kind.ENCODE: self.encode,
            Kind.ENCODE_BACKWARD: self.encode_backward,
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.SHIP: self.ship,
            Kind.RETURN: self.return_,
            Kind.SEND_FORWARD: lambda m: self.send(Kind.SEND_FORWARD, m),
            Kind.SEND_BACKWARD: lambda m: self.send(Kind.SEND_BACKWARD, m),
            Kind.RECV_FORWARD: lambda m: self.receive(Kind.RECV_FORWARD, m),
            Kind.RECV_BACKWARD: lambda m: self.receive(Kind.RECV_BACKWARD, m),
            Kind.REDUCE: self.reduce,
        }

    def reduce(self, component: int) -> None:
        # A rank has one part of any component.
        for (number, _), reducer in self.engine.reducers.items():
            if number == component:
                reducer()

    def do(self, op: Op) -> None:
        if op.kind is Kind.WAIT:
            assert op.on is not None
            self.wait(op.on, op.index)
        else:
            self.handlers[op.kind](op.index)

    # Encoders.

    def encode(self, chunk: int) -> None:
        planned = self.domain.chunks[chunk]
        component = planned.component
        with torch.set_grad_enabled(self.trains(component)):
            rows = self.engine.anchors[component].encode(self.inputs.chunks[chunk])
        expected = (planned.rows_of(self.position), self.engine.width)
        assert rows.shape == expected, f"{component} put out {tuple(rows.shape)}, planned {expected}"
        # Ranks without rows take part in shipping with buffers of the LLM's type.
        dtype = self.engine.dtype
        assert rows.dtype == dtype, f"{component} put out {rows.dtype}, the LLM takes {dtype}"
        self.encoded[chunk] = rows

    def encode_backward(self, chunk: int) -> None:
        planned = self.domain.chunks[chunk]
        rows = self.encoded.pop(chunk)
        start = 0
        for other in self.chunks_of(planned.microbatch):
            if other == chunk:
                break
            start += self.domain.chunks[other].rows_of(self.position)
        grads = self.row_grads[planned.microbatch]
        torch.autograd.backward(rows, grads[start : start + planned.rows_of(self.position)])
        if not any(c in self.encoded for c in self.chunks_of(planned.microbatch)):
            del self.row_grads[planned.microbatch]

    def trains(self, component: str) -> bool:
        return self.plan.train and component not in self.plan.frozen

    def chunks_of(self, microbatch: int) -> list[int]:
        """This rank's chunks of a microbatch, in the order in which their rows are counted."""
        return [
            c
            for c, chunk in enumerate(self.domain.chunks)
            if chunk.microbatch == microbatch and self.position in chunk.ranks
        ]

    # The boundary.

    def ends(self, microbatch: int) -> Ends:
        ends = self.inputs.ends[microbatch]
        assert ends is not None, f"microbatch {microbatch} has no route"
        return ends

    def no_rows(self) -> torch.Tensor:
        engine = self.engine
        return torch.empty(0, engine.width, dtype=engine.dtype, device=engine.device)

    def ship(self, m: int) -> None:
        chunks = self.chunks_of(m)
        rows = [self.encoded[c].detach() for c in chunks]
        for c in chunks:
            if not self.trains(self.domain.chunks[c].component):
                del self.encoded[c]
        values = torch.cat(rows) if rows else self.no_rows()
        ends = self.ends(m)
        outgoing = gather_rows(values, ends.send)
        self.flights[Kind.SHIP, m] = ship(
            ends, outgoing, self.engine.groups.ship, self.engine.lanes[Kind.SHIP]
        )

    def return_(self, m: int) -> None:
        # What a stage received, it sends back in the order of arrival.
        grads = self.row_grads.pop(m) if self.takes_rows else self.no_rows()
        ends, lane = self.ends(m).transpose(), self.engine.lanes[Kind.RETURN]
        self.flights[Kind.RETURN, m] = ship(ends, grads, self.engine.groups.back, lane)

    # The pipeline of the LLM.

    def forward(self, m: int) -> None:
        stage, inputs = self.engine.stage, self.inputs.microbatches[m]
        assert stage is not None, "a rank beside the LLM runs no pass of it"
        received = rows = None
        if self.first:
            hidden = stage.embed(inputs)
        else:
            hidden = received = self.inbox.pop((Kind.RECV_FORWARD, m)).requires_grad_(self.plan.train)
        if m in self.shipped:
            rows = self.shipped.pop(m).requires_grad_(m in self.returned)
            hidden = self.enter(m, hidden, rows)
        output = stage.forward(self.part, inputs, hidden)
        if not self.last:
            self.outbox[Kind.SEND_FORWARD, m] = output.detach()
        elif not self.plan.train:
            self.result.outputs[m] = output
        else:
            output, sums = stage.loss(inputs, output)
            self.result.sums = sums if self.result.sums is None else self.result.sums + sums
        if self.plan.train:
            self.passes[m] = (received, rows, output)

    def enter(self, m: int, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Put rows in the place of embeddings, and give the stage those that enter further on."""
        stage = self.engine.stage
        assert stage is not None
        for landing in self.inputs.landings[m]:
            own = rows if landing.select is None else gather_rows(rows, landing.select)
            if landing.name == EMBEDDING.name:
                hidden = scatter_rows(hidden, landing.tokens, own)
            else:
                stage.enter(self.part, self.inputs.microbatches[m], landing.name, landing.tokens, own)
        return hidden

    def backward(self, m: int) -> None:
        received, rows, output = self.passes.pop(m)
        grad = None if self.last else self.inbox.pop((Kind.RECV_BACKWARD, m))
        if output.requires_grad:  # not so on a frozen first stage that took in nothing that trains
            torch.autograd.backward(output, grad)
        if received is not None:
            assert received.grad is not None
            self.outbox[Kind.SEND_BACKWARD, m] = received.grad
        if m in self.returned and self.takes_rows:
            assert rows is not None
            assert rows.grad is not None
            self.row_grads[m] = rows.grad

    # Communication.

    def neighbour(self, kind: Kind) -> int:
        step = 1 if kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD) else -1
        return self.engine.ranks[self.position + step * self.domain.stage_size]

    def group(self, kind: Kind) -> dist.ProcessGroup:
        groups = self.engine.groups
        return groups.forward if kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD) else groups.backward

    def send(self, kind: Kind, m: int) -> None:
        work = dist.isend(self.outbox[kind, m], self.neighbour(kind), group=self.group(kind))
        self.flights[kind, m] = work

    def receive(self, kind: Kind, m: int) -> None:
        engine, domain = self.engine, self.domain
        layout = domain.microbatches[m].layout
        tokens = layout.padded_tokens(domain.member(self.position), domain.tp) // domain.tp
        buffer = torch.empty(tokens, engine.width, dtype=engine.dtype, device=engine.device)
        self.inbox[kind, m] = buffer
        self.flights[kind, m] = dist.irecv(buffer, self.neighbour(kind), group=self.group(kind))

    def wait(self, kind: Kind, m: int) -> None:
        flight = self.flights.pop((kind, m))
        work = flight.work if isinstance(flight, Shipment) else flight
        if work is not None:
            self.wait_for(work, kind, m)
        if kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            del self.outbox[kind, m]
        elif kind is Kind.SHIP and self.takes_rows:
            self.shipped[m] = flight.rows
        elif kind is Kind.RETURN and any(c in self.encoded for c in self.chunks_of(m)):
            grads = torch.empty_like(flight.rows)
            self.row_grads[m] = grads.index_copy_(0, self.ends(m).send, flight.rows)

    def wait_for(self, work: Work, kind: Kind, m: int) -> None:
        if self.engine.device.type == "cuda":
            work.wait()  # orders streams; the communicator's own timeout covers a missing peer
            return
        try:
            work.wait(timedelta(seconds=self.engine.timeout_s))
        except RuntimeError as error:
            if not is_communication(error):
                raise
            peers = self.engine.ranks if kind in COLLECTIVE else (self.neighbour(kind),)
            where = f"wait({kind} {m}) of step {self.plan.step}"
            raise stall(where, peers, self.engine.ranks[self.position], error) from error

    def assert_nothing_left(self) -> None:
        """Whatever is still here was made and never used: a plan that the verifier should have refused."""
        for name in ("encoded", "shipped", "row_grads", "inbox", "outbox", "passes", "flights"):
            left = getattr(self, name)
            assert not left, f"step {self.plan.step} ended with {name} of {sorted(map(str, left))}"
