"""R3: on every rank, what an op needs comes before it."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from parallel.work import Grad
from pipeline.ops import BACKWARDS, Kind, Op
from pipeline.plan import StepPlan
from pipeline.rules.lists import Fields, fields, who

_NEEDY = frozenset(Kind) - {Kind.WAIT, Kind.ENCODE, Kind.RECV_FORWARD, Kind.RECV_BACKWARD}


def data_order(
    plan: StepPlan, team: int, ops: Sequence[Fields], encoder_batches: Sequence[int]
) -> Iterator[str]:
    """Compare the list of a team, which should encode `encoder_batches`, with what each op needs."""
    place: dict[Fields, int] = {}
    for at, op in enumerate(ops):
        place.setdefault(op, at)
    needs = _Needs(plan, team, place, encoder_batches)
    for op, at in place.items():
        if op[0] in _NEEDY:
            for before in needs.of(op):
                if place.get(before, len(ops)) > at:
                    yield f"R3: {who(plan.domain, team)} must run {Op(*before)} before {Op(*op)}"


class _Needs:
    """What must come before an op in the list of its team, where `place` has the ops of the list, and
    `encoder_batches` are those that the team should encode.
    """

    def __init__(
        self, plan: StepPlan, team: int, place: dict[Fields, int], encoder_batches: Sequence[int]
    ) -> None:
        domain = plan.domain
        self.domain, self.components, self.place = domain, plan.components, place
        self.parts = domain.holds[team]
        self.with_rows = domain.parts_with_rows(team * domain.team)
        self.encodes: dict[int, list[Fields]] = defaultdict(list)  # of each microbatch
        self.gradients: dict[tuple[str, int], list[Fields]] = defaultdict(list)  # of each component and part
        llm = plan.components[domain.llm]
        for op in place:
            kind, index, _, part, _ = op
            if kind is Kind.ENCODE:
                for m in domain.encoder_batches[index].microbatches:
                    self.encodes[m].append(op)
            elif kind in BACKWARDS:
                component = llm if kind is Kind.BACKWARD else domain.encoder_batches[index].component
                self.gradients[component, part].append(op)
        for c in encoder_batches:
            if (encode := fields(Kind.ENCODE, c)) not in place:
                for m in domain.encoder_batches[c].microbatches:
                    self.encodes[m].append(encode)

    def of(self, op: Fields) -> Iterator[Fields]:
        kind, m, _, part, grad = op
        if kind is Kind.FORWARD:
            yield from self.before_forward(m, part)
        elif grad is Grad.WEIGHT:
            yield fields(kind, m, part, grad=Grad.INPUT)
        elif kind is Kind.BACKWARD:
            yield from self.before_backward(m, part)
        elif kind is Kind.SEND_FORWARD:
            yield fields(Kind.FORWARD, m, part)
        elif kind is Kind.SEND_BACKWARD:
            yield self.backward(m, part)
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
            yield from self.before_reduction(m, part)

    def before_forward(self, m: int, part: int) -> Iterator[Fields]:
        if part:
            near = part - 1 in self.parts
            yield fields(Kind.FORWARD, m, part - 1) if near else fields(Kind.WAIT, m, part, Kind.RECV_FORWARD)
        if part in self.with_rows and self.domain.routes[m] is not None:
            yield fields(Kind.WAIT, m, on=Kind.SHIP)

    def before_backward(self, m: int, part: int) -> Iterator[Fields]:
        yield fields(Kind.FORWARD, m, part)
        if part < self.domain.num_parts - 1:
            near = part + 1 in self.parts
            yield self.backward(m, part + 1) if near else fields(Kind.WAIT, m, part, Kind.RECV_BACKWARD)

    def before_reduction(self, number: int, part: int) -> Iterator[Fields]:
        component = self.components[number]
        yield from self.gradients[component, part]
        if number == self.domain.llm and part == 0 and self.domain.num_parts > 1:
            # Where the output is tied to the embedding of its own rank, the last part's passes make
            # gradients of the first part's weight. What is tied a plan does not say: it always waits.
            yield from self.gradients[component, self.domain.num_parts - 1]

    def backward(self, m: int, part: int) -> Fields:
        """The op of this team that makes the gradient of the input of a part."""
        split = fields(Kind.BACKWARD, m, part, grad=Grad.INPUT)
        return split if split in self.place else fields(Kind.BACKWARD, m, part)
