"""R3: on every rank, what an op needs comes before it."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from parallel.work import Grad
from pipeline.domain_plan import DomainPlan
from pipeline.ops import BACKWARDS, COLLECTIVE, PARTS, PASSES, POINT_TO_POINT, Kind, Op
from pipeline.plan import StepPlan
from pipeline.rules.lists import Fields, fields, who

_GOES_WITHIN = COLLECTIVE | POINT_TO_POINT
_NEEDY = frozenset(Kind) - {Kind.WAIT, Kind.ENCODE, Kind.RECV_FORWARD, Kind.RECV_BACKWARD}


def data_order(
    plan: StepPlan, team: int, ops: Sequence[Fields], encoder_batches: Sequence[int]
) -> Iterator[str]:
    """Compare the list of a team, which should encode `encoder_batches`, with what each op needs."""
    place: dict[Fields, int] = {}
    for at, op in enumerate(ops):
        place.setdefault(op, at)
    needs, passes = _Needs(plan, team, place, encoder_batches), _passes_around(plan.domain.ops[team])
    for op, at in place.items():
        if op[0] in _NEEDY:
            for before in needs.of(op):
                if place.get(before, len(ops)) >= passes.get(at, at):
                    yield f"R3: {who(plan.domain, team)} must run {Op(*before)} before {Op(*op)}"


def _passes_around(ops: Sequence[Op]) -> dict[int, int]:
    """By the place of a message that goes within a pass, that of the pass: all it needs comes before."""
    around: dict[int, int] = {}
    for at, op in enumerate(ops):
        if op.within:
            around[at] = around.get(at - 1, at - 1)
    return around


def within_passes(domain: DomainPlan) -> Iterator[str]:
    """R3: what goes within a pass stands behind it, what goes first at first."""
    for team, ops in enumerate(domain.ops):
        for before, op in pairwise((None, *ops)):
            if not op or not op.within:
                continue
            behind = before is not None and (before.kind in PASSES or 0 < before.within <= op.within)
            if not (behind and op.within < PARTS and op.kind in _GOES_WITHIN):
                yield f"R3: {who(domain, team)} cannot issue {op} behind {before}"


class _Needs:
    """What must come before an op in the list of its team, where `place` has the ops of the list, and
    `encoder_batches` are those that the team should encode.
    """

    def __init__(
        self, plan: StepPlan, team: int, place: dict[Fields, int], encoder_batches: Sequence[int]
    ) -> None:
        domain = plan.domain
        self.domain, self.components, self.place = domain, plan.components, place
        self.virtual_stages = domain.holds[team]
        self.with_rows = domain.virtual_stages_with_rows(team * domain.team)
        self.encodes: dict[int, list[Fields]] = defaultdict(list)  # of each microbatch
        # Of each component and virtual stage.
        self.gradients: dict[tuple[str, int], list[Fields]] = defaultdict(list)
        llm = plan.components[domain.llm]
        for op in place:
            kind, index, _, virtual_stage, _ = op
            if kind is Kind.ENCODE:
                for m in domain.encoder_batches[index].microbatches:
                    self.encodes[m].append(op)
            elif kind in BACKWARDS:
                component = llm if kind is Kind.BACKWARD else domain.encoder_batches[index].component
                self.gradients[component, virtual_stage].append(op)
        for c in encoder_batches:
            if (encode := fields(Kind.ENCODE, c)) not in place:
                for m in domain.encoder_batches[c].microbatches:
                    self.encodes[m].append(encode)

    def of(self, op: Fields) -> Iterator[Fields]:
        kind, m, _, virtual_stage, grad = op
        if kind is Kind.FORWARD:
            yield from self.before_forward(m, virtual_stage)
        elif grad is Grad.WEIGHT:
            yield fields(kind, m, virtual_stage, grad=Grad.INPUT)
        elif kind is Kind.BACKWARD:
            yield from self.before_backward(m, virtual_stage)
        elif kind is Kind.SEND_FORWARD:
            yield fields(Kind.FORWARD, m, virtual_stage)
        elif kind is Kind.SEND_BACKWARD:
            yield self.backward(m, virtual_stage)
        elif kind is Kind.SHIP:
            yield from self.encodes[m]
        elif kind is Kind.RETURN:
            yield fields(Kind.SHIP, m)
            for own in self.with_rows:
                yield self.backward(m, own)
        elif kind is Kind.ENCODE_BACKWARD:
            yield fields(Kind.ENCODE, m)
            for batch in self.domain.encoder_batches[m].microbatches:
                yield fields(Kind.WAIT, batch, on=Kind.RETURN)
        elif kind is Kind.REDUCE:
            yield from self.before_reduction(m, virtual_stage)

    def before_forward(self, m: int, virtual_stage: int) -> Iterator[Fields]:
        if virtual_stage:
            near = virtual_stage - 1 in self.virtual_stages
            received = fields(Kind.WAIT, m, virtual_stage, Kind.RECV_FORWARD)
            yield fields(Kind.FORWARD, m, virtual_stage - 1) if near else received
        if virtual_stage in self.with_rows and self.domain.routes[m] is not None:
            yield fields(Kind.WAIT, m, on=Kind.SHIP)

    def before_backward(self, m: int, virtual_stage: int) -> Iterator[Fields]:
        yield fields(Kind.FORWARD, m, virtual_stage)
        if virtual_stage < self.domain.num_virtual_stages - 1:
            near = virtual_stage + 1 in self.virtual_stages
            received = fields(Kind.WAIT, m, virtual_stage, Kind.RECV_BACKWARD)
            yield self.backward(m, virtual_stage + 1) if near else received

    def before_reduction(self, number: int, virtual_stage: int) -> Iterator[Fields]:
        component = self.components[number]
        yield from self.gradients[component, virtual_stage]
        if number == self.domain.llm and virtual_stage == 0 and self.domain.num_virtual_stages > 1:
            # Where the output is tied to the embedding of its own rank, the last virtual stage's passes make
            # gradients of the first one's weight. What is tied a plan does not say: it always waits.
            yield from self.gradients[component, self.domain.num_virtual_stages - 1]

    def backward(self, m: int, virtual_stage: int) -> Fields:
        """The op of this team that makes the gradient of the input of a virtual stage."""
        split = fields(Kind.BACKWARD, m, virtual_stage, grad=Grad.INPUT)
        return split if split in self.place else fields(Kind.BACKWARD, m, virtual_stage)
