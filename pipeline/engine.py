"""Run a verified plan on real ranks.

The engine walks this rank's op list from front to back and does what each op says; it decides nothing and
knows no policy. Compute runs at once, communication is issued and waited for by separate ops, each direction
on a communicator of its own. Rows of encoders are detached where they leave: their gradients come back along
the transposed route, and the encoder's backward runs on the rank where its forward ran.

Shapes: T tokens of a microbatch, R rows, D width of the LLM.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist

from ops.rows import gather_rows, scatter_rows
from parallel.collectives import Handle
from parallel.groups import Groups
from parallel.lane import Lane
from parallel.shipping import Ends, Shipment, ship
from parallel.waiting import is_communication, stall
from parallel.work import Grad
from pipeline.anchor import Anchor, PutOff, Stage, StepInputs
from pipeline.behind import Behind, Reduction, Within
from pipeline.domain_plan import EMBEDDING
from pipeline.laps import HOST, WEIGHTS
from pipeline.ops import BACKWARDS, COLLECTIVE, FORWARDS, Kind, Op, issued_within
from pipeline.plan import StepPlan
from pipeline.reductions import closing, in_front, made_by
from pipeline.stopwatch import Stopwatch, Timing, timings_of


@dataclass
class StepResult:
    """What a step leaves behind on this rank.

    `sums` are the last stage's reported sums ([2 · sources], None elsewhere); `outputs` are the last stage's
    outputs of a forward-only plan by microbatch; `watch` times this rank's ops.
    """

    watch: Stopwatch
    sums: torch.Tensor | None = None
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def timings(self) -> list[Timing]:
        """What this rank's ops took. On a GPU the host waits for them: ask once it has the step's totals."""
        return timings_of(self.watch.laps())


class Engine:
    """Runs the op lists of one rank of one domain.

    `ranks` are the global ranks of the domain by domain rank, and `domain_rank` is this rank's. `stage` is
    None on a rank beside the LLM; `width` and `dtype` are those of the LLM's activations. `reductions` are by
    number of the component and virtual stage. `arrivals`, by the same numbers, wait for the updated weights
    that a forward begins with, and say whether any were still on their way. `on_op` hears of every op before
    it runs, and of a pass again behind each message within it: a watchdog can say where a rank stands.
    """

    def __init__(
        self,
        *,
        domain_rank: int,
        ranks: Sequence[int],
        stage: Stage | None,
        width: int,
        dtype: torch.dtype,
        anchors: Mapping[str, Anchor],
        groups: Groups,
        device: torch.device,
        reductions: Mapping[tuple[int, int], Reduction],
        arrivals: Mapping[tuple[int, int], Callable[[], bool]],
        timeout_s: float,
        on_op: Callable[[Op], None],
    ) -> None:
        self.domain_rank = domain_rank
        self.ranks = tuple(ranks)
        self.stage = stage
        self.width = width
        self.dtype = dtype
        self.anchors = anchors
        self.groups = groups
        self.device = device
        self.reductions = reductions
        self.arrivals = arrivals
        self.timeout_s = timeout_s
        self.lanes = {Kind.SHIP: Lane(device), Kind.RETURN: Lane(device)}
        self.on_op = on_op

    def run(self, plan: StepPlan, inputs: StepInputs, watch: Stopwatch | None = None) -> StepResult:
        """Run this rank's ops of the plan's domain. The plan must have been verified and agreed on.

        The ops become laps of `watch`, or of a stopwatch of their own.

        Raises:
            StallError: if a peer does not answer within the timeout.
        """
        watch = watch or Stopwatch(self.device)
        inputs.arrive()
        step = _RunningStep(self, plan, inputs, StepResult(watch))
        watch.done(HOST)
        with torch.set_grad_enabled(plan.train):
            ops = plan.domain.ops_of(self.domain_rank)
            for at, op in enumerate(ops):
                if not op.within:  # else it went within the pass before
                    self.on_op(op)
                    if op.kind in FORWARDS and self.arrivals[step.held(op)]():
                        watch.done(WEIGHTS)
                    step.do(op, issued_within(ops, at))
                watch.done(op)
        step.assert_nothing_left()
        return step.result


class _RunningStep:
    """The tensors that live during one step, each from the op that makes it to the op that uses it last."""

    def __init__(self, engine: Engine, plan: StepPlan, inputs: StepInputs, result: StepResult) -> None:
        self.engine = engine
        self.plan = plan
        self.domain = domain = plan.domain
        self.inputs = inputs
        self.domain_rank = engine.domain_rank
        self.with_rows = domain.virtual_stages_with_rows(engine.domain_rank)
        fronts = partial(in_front, domain, plan.components)
        self.closing = closing(domain, engine.domain_rank // domain.team, fronts)
        self.llm_learns = plan.trains(plan.components[domain.llm])
        ops = domain.ops_of(engine.domain_rank)
        # Microbatches whose rows take gradients back to a component that trains.
        self.returned = {op.index for op in ops if op.kind is Kind.RETURN}
        self.result = result
        # By encoder batch: rows with their graph, their gradients, and microbatches that are yet to ship.
        self.encoded: dict[int, torch.Tensor] = {}
        self.row_grads: dict[int, torch.Tensor] = {}
        self.unshipped: dict[int, int] = {}
        # By microbatch: rows that arrived, with the number of virtual stages that they have yet to pass.
        self.shipped: dict[int, tuple[torch.Tensor, int]] = {}
        # By kind, microbatch and virtual stage.
        self.inbox: dict[tuple[Kind, int, int], torch.Tensor] = {}
        self.outbox: dict[tuple[Kind, int, int], torch.Tensor] = {}
        self.flights: dict[tuple[Kind, int, int], Any] = {}
        self.passes: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self.pending: dict[tuple[Kind, int, int], PutOff] = {}
        self.handlers: Mapping[Kind, Callable[[Op], None]] = {
            Kind.ENCODE: self.encode,
            Kind.ENCODE_BACKWARD: self.encode_backward,
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.SHIP: self.ship,
            Kind.RETURN: self.return_,
            Kind.SEND_FORWARD: self.send,
            Kind.SEND_BACKWARD: self.send,
            Kind.RECV_FORWARD: self.receive,
            Kind.RECV_BACKWARD: self.receive,
            Kind.WAIT: self.wait,
            Kind.REDUCE: self.reduce,
        }

    def held(self, op: Op) -> tuple[int, int]:
        """The numbers of the component and of the virtual stage whose weights a forward takes."""
        if op.kind is Kind.FORWARD:
            return self.domain.llm, op.virtual_stage
        return self.plan.components.index(self.domain.encoder_batches[op.index].component), 0

    def do(self, op: Op, messages: Sequence[Op] = ()) -> None:
        """Run an op, and of a pass the messages that go within it."""
        if not messages:
            self.do_alone(op)
            return
        on_op, stage = self.engine.on_op, self.engine.stage
        assert stage is not None

        def issue(message: Op) -> None:
            on_op(message)
            self.do_alone(message)
            on_op(op)

        within = Within(op, messages, issue)
        with stage.following(op.virtual_stage, within):
            self.do_alone(op)
        within.passed()

    def do_alone(self, op: Op) -> None:
        if op.grad is Grad.WEIGHT and op.kind in BACKWARDS:
            with self.closes(op):
                self.pending.pop((op.kind, op.index, op.virtual_stage)).run()
        else:
            self.handlers[op.kind](op)
        if op.kind is Kind.BACKWARD:
            assert self.engine.stage is not None
            self.engine.stage.settle()

    # Encoders.

    def encode(self, op: Op) -> None:
        planned = self.domain.encoder_batches[op.index]
        component = planned.component
        with torch.set_grad_enabled(self.plan.trains(component)):
            rows = self.engine.anchors[component].encode(self.inputs.encoder_batches[op.index])
        expected = (planned.rows_of(self.domain_rank), self.engine.width)
        assert rows.shape == expected, f"{component} put out {tuple(rows.shape)}, planned {expected}"
        # Ranks without rows take part in shipping with buffers of the LLM's type.
        dtype = self.engine.dtype
        assert rows.dtype == dtype, f"{component} put out {rows.dtype}, the LLM takes {dtype}"
        self.encoded[op.index] = rows
        self.unshipped[op.index] = len(planned.microbatches)

    def encode_backward(self, op: Op) -> None:
        rows, grads = self.encoded.pop(op.index), self.row_grads.pop(op.index)
        anchor = self.engine.anchors[self.domain.encoder_batches[op.index].component]
        with self.closes(op):
            self.go_back(op, anchor, rows, grads)

    def go_back(
        self, op: Op, module: Anchor | Stage, output: torch.Tensor, grad: torch.Tensor | None
    ) -> None:
        """Run a backward, of which the gradients of weights may be put off."""
        if not output.requires_grad:
            return  # a frozen first virtual stage that took in nothing that trains
        if op.grad is Grad.BOTH:
            torch.autograd.backward(output, grad)
        else:
            with module.weights_later() as pending:
                torch.autograd.backward(output, grad)
            if self.learns(op):
                self.pending[op.kind, op.index, op.virtual_stage] = pending

    def learns(self, op: Op) -> bool:
        """Whether what a backward goes through has weights that train, whose gradients a later op makes."""
        if op.kind is Kind.BACKWARD:
            return self.llm_learns
        return self.plan.trains(self.domain.encoder_batches[op.index].component)

    # The boundary.

    def ends(self, microbatch: int) -> Ends:
        ends = self.inputs.ends[microbatch]
        assert ends is not None, f"microbatch {microbatch} has no route"
        return ends

    def no_rows(self) -> torch.Tensor:
        engine = self.engine
        return torch.empty(0, engine.width, dtype=engine.dtype, device=engine.device)

    def ship(self, op: Op) -> None:
        encoder_batches = self.domain.joined(op.index, self.domain_rank)
        rows = [self.encoded[c].detach() for c in encoder_batches]
        for c in encoder_batches:
            self.unshipped[c] -= 1
            if not self.unshipped[c]:
                del self.unshipped[c]
                if not self.plan.trains(self.domain.encoder_batches[c].component):
                    del self.encoded[c]
        values = torch.cat(rows) if rows else self.no_rows()
        ends = self.ends(op.index)
        outgoing = gather_rows(values, ends.send)
        lane = self.engine.lanes[Kind.SHIP]
        self.flights[Kind.SHIP, op.index, 0] = ship(ends, outgoing, self.engine.groups.ship, lane)

    def return_(self, op: Op) -> None:
        # What a stage received, it sends back in the order of arrival.
        grads = self.no_rows()
        if self.with_rows:
            rows, left = self.shipped.pop(op.index)
            assert not left, f"{left} virtual stages have not taken the rows of microbatch {op.index}"
            assert rows.grad is not None or not len(rows), "rows took no part in the loss"
            grads = rows.detach() if rows.grad is None else rows.grad
        ends, lane = self.ends(op.index).transpose(), self.engine.lanes[Kind.RETURN]
        self.flights[Kind.RETURN, op.index, 0] = ship(ends, grads, self.engine.groups.back, lane)

    def hand_back(self, microbatch: int, returned: torch.Tensor) -> None:
        """Add the gradients of a microbatch's rows to those of the encoder batches that put them out."""
        encoder_batches = self.domain.joined(microbatch, self.domain_rank)
        learning = {c for c in encoder_batches if self.plan.trains(self.domain.encoder_batches[c].component)}
        if not learning:
            return
        sizes = [self.domain.encoder_batches[c].rows_of(self.domain_rank) for c in encoder_batches]
        joined = returned.new_zeros(sum(sizes), returned.shape[1])
        joined.index_copy_(0, self.ends(microbatch).send, returned)
        for c, grads in zip(encoder_batches, joined.split(sizes), strict=True):
            if c in learning:
                before = self.row_grads.get(c)
                self.row_grads[c] = grads if before is None else before + grads

    # The pipeline of the LLM.

    def forward(self, op: Op) -> None:
        m, virtual_stage = op.index, op.virtual_stage
        stage, inputs = self.engine.stage, self.inputs.microbatches[m]
        assert stage is not None, "a rank beside the LLM runs no pass of it"
        received = None
        if virtual_stage == 0:
            hidden = stage.embed(inputs)
        else:
            received = self.inbox.pop((Kind.RECV_FORWARD, m, virtual_stage)).requires_grad_(self.plan.train)
            hidden = received
        entering: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        if virtual_stage in self.with_rows and m in self.shipped:
            hidden, entering = self.enter(m, virtual_stage, hidden)
        if virtual_stage == 0 and not hidden.requires_grad and (m in self.returned or self.llm_learns):
            # The embedding is frozen. The plan says that gradients come back to this pass, so every rank that
            # shares its layers or sequences goes back, also one whose own tokens took in no row. And layers
            # that are computed anew find the weights in them that learn only if their input has a gradient.
            hidden.requires_grad_()
        output = stage.forward(virtual_stage, inputs, hidden, entering)
        if virtual_stage < self.domain.num_virtual_stages - 1:
            self.hand_on(
                Kind.SEND_FORWARD, Kind.RECV_FORWARD, m, virtual_stage, virtual_stage + 1, output.detach()
            )
        elif not self.plan.train:
            self.result.outputs[m] = output
        else:
            self.inputs.before_loss(m, inputs)
            output, sums = stage.loss(inputs, output)
            self.result.sums = sums if self.result.sums is None else self.result.sums + sums
        if self.plan.train:
            self.passes[m, virtual_stage] = (received, output)

    def hand_on(
        self, send: Kind, receive: Kind, m: int, virtual_stage: int, other: int, tensor: torch.Tensor
    ) -> None:
        """Leave what one virtual stage made for another, on this rank or for the op that sends it."""
        if other in self.domain.virtual_stages(self.domain_rank):
            self.inbox[receive, m, other] = tensor
        else:
            self.outbox[send, m, virtual_stage] = tensor

    def enter(
        self, m: int, virtual_stage: int, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        """Put rows in the place of embeddings. Returns the result, and for each attach point further on the
        tokens and the rows that enter there.
        """
        rows, left = self.shipped[m]
        entering = {}
        rows.requires_grad_(m in self.returned)
        for number, select, tokens in self.ends(m).landings:
            point = self.domain.all_points[number]
            if point.virtual_stage != virtual_stage:
                continue
            own = rows if select is None else gather_rows(rows, select)
            if point == EMBEDDING:
                hidden = scatter_rows(hidden, tokens, own)
            else:
                entering[point.name] = tokens, own
        if left > 1 or m in self.returned:
            self.shipped[m] = rows, left - 1
        else:
            del self.shipped[m]
        return hidden, entering

    def backward(self, op: Op) -> None:
        m, virtual_stage, stage = op.index, op.virtual_stage, self.engine.stage
        assert stage is not None
        received, output = self.passes.pop((m, virtual_stage))
        is_last = virtual_stage == self.domain.num_virtual_stages - 1
        grad = None if is_last else self.inbox.pop((Kind.RECV_BACKWARD, m, virtual_stage))
        with self.closes(op):
            self.go_back(op, stage, output, grad)
        if received is not None:
            assert received.grad is not None
            self.hand_on(
                Kind.SEND_BACKWARD, Kind.RECV_BACKWARD, m, virtual_stage, virtual_stage - 1, received.grad
            )

    def closes(self, op: Op) -> AbstractContextManager[None]:
        """Around a backward behind which reductions begin."""
        begins = self.closing.get(op)
        if begins is None:
            return nullcontext()
        reductions = [self.engine.reductions[pair] for pair in begins]
        own = made_by(self.domain, self.plan.components, op)
        behind = Behind(reductions, last_grows=begins[-1] == own)
        if op.kind is Kind.ENCODE_BACKWARD:
            return self.engine.anchors[self.domain.encoder_batches[op.index].component].following(behind)
        assert self.engine.stage is not None
        return self.engine.stage.following(op.virtual_stage, behind)

    # Communication.

    def peer(self, op: Op) -> int:
        """The rank at the other end of a message."""
        source, destination = self.domain.sender(op, self.domain_rank)
        return self.engine.ranks[destination if source == self.domain_rank else source]

    def group(self, kind: Kind) -> dist.ProcessGroup:
        groups = self.engine.groups
        return groups.forward if kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD) else groups.backward

    def send(self, op: Op) -> None:
        key = (op.kind, op.index, op.virtual_stage)
        self.flights[key] = dist.isend(self.outbox[key], self.peer(op), group=self.group(op.kind))

    def receive(self, op: Op) -> None:
        engine, domain = self.engine, self.domain
        layout = domain.microbatches[op.index].layout
        tokens = layout.padded_tokens(domain.cp_rank(self.domain_rank), domain.tp) // domain.tp
        buffer = torch.empty(tokens, engine.width, dtype=engine.dtype, device=engine.device)
        key = (op.kind, op.index, op.virtual_stage)
        self.inbox[key] = buffer
        self.flights[key] = dist.irecv(buffer, self.peer(op), group=self.group(op.kind))

    def reduce(self, op: Op) -> None:
        begun = self.engine.reductions[op.index, op.virtual_stage].begin()
        self.flights[op.kind, op.index, op.virtual_stage] = begun

    def wait(self, op: Op) -> None:
        kind, m = op.on, op.index
        assert kind is not None
        flight = self.flights.pop((kind, m, op.virtual_stage))
        if kind is Kind.REDUCE:
            flight()
            return
        work = flight.work if isinstance(flight, Shipment) else flight
        if work is not None:
            self.wait_for(work, Op(kind, m, virtual_stage=op.virtual_stage))
        if kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            del self.outbox[kind, m, op.virtual_stage]
        elif kind is Kind.SHIP and self.with_rows:
            self.shipped[m] = flight.rows, len(self.with_rows)
        elif kind is Kind.RETURN:
            self.hand_back(m, flight.rows)

    def wait_for(self, work: Handle, op: Op) -> None:
        if self.engine.device.type == "cuda":
            work.wait()  # orders streams; the communicator's own timeout covers a missing peer
            return
        try:
            work.wait(timedelta(seconds=self.engine.timeout_s))
        except RuntimeError as error:
            if not is_communication(error):
                raise
            peers = self.engine.ranks if op.kind in COLLECTIVE else (self.peer(op),)
            where = f"{Op(Kind.WAIT, op.index, op.kind, op.virtual_stage)} of step {self.plan.step}"
            raise stall(where, peers, self.engine.ranks[self.domain_rank], error) from error

    def assert_nothing_left(self) -> None:
        """Whatever is still here was made and never used: a plan that the verifier should have refused."""
        names = (
            "encoded",
            "unshipped",
            "shipped",
            "row_grads",
            "inbox",
            "outbox",
            "passes",
            "flights",
            "pending",
        )
        for name in names:
            left = getattr(self, name)
            assert not left, f"step {self.plan.step} ended with {name} of {sorted(map(str, left))}"
