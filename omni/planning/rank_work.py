"""What one rank does in a step, in numbers: the common ground of the models of memory and bytes.

From a plan and the statements of work of the run's parts; nothing is built.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from omni.models.llm import NAME as LLM
from omni.planning.workload import Workload
from parallel.work import Grad, Load, Part, Work, virtual_stage_name
from pipeline.domain_plan import DomainPlan
from pipeline.loads import encoder_batch_load, pass_load
from pipeline.ops import Kind, Op
from pipeline.plan import StepPlan


@dataclass(frozen=True)
class RankWork:
    """What rank `rank`, `domain_rank` of `domain`, does in a step.

    `llm` are the virtual stages that it holds by number, none beside it, and `passes` its loads by
    microbatch and virtual stage; `encoders` are those that it holds, `encodings` its loads by encoder
    batch. `rows_in` and `rows_out` count rows of each microbatch that arrive here and that leave; `trained`
    names the components that learn, `learnt` those that do or have done so.
    """

    rank: int
    domain_rank: int
    domain: DomainPlan
    llm: Mapping[int, Part]
    encoders: Mapping[str, Part]
    passes: Mapping[tuple[int, int], Load]
    encodings: Mapping[int, Load]
    rows_in: tuple[int, ...]
    rows_out: tuple[int, ...]
    trained: tuple[str, ...]
    learnt: tuple[str, ...]
    row_bytes: int
    element: int

    @property
    def components(self) -> dict[str, Mapping[int, Part]]:
        """The parts that this rank holds, by component and number."""
        own: dict[str, Mapping[int, Part]] = {LLM: self.llm} if self.llm else {}
        return own | {name: {0: part} for name, part in self.encoders.items()}

    @cached_property
    def returned(self) -> frozenset[int]:
        """Microbatches whose rows' gradients go back."""
        return frozenset(op.index for op in self.domain.ops_of(self.domain_rank) if op.kind is Kind.RETURN)

    def forward(self, op: Op) -> Work:
        """What the forward pass of a compute op takes."""
        return self._work(op, None)

    def backward(self, op: Op, grad: Grad) -> Work:
        """What the backward pass of a compute op takes that makes `grad`."""
        return self._work(op, grad)

    def _work(self, op: Op, grad: Grad | None) -> Work:
        encodes = op.kind in (Kind.ENCODE, Kind.ENCODE_BACKWARD)
        key = encodes, op.index, op.virtual_stage, grad
        found = self._works.get(key)
        if found is None:
            _, part, load = self.of(op)
            found = self._works[key] = part.forward(load) if grad is None else part.backward(load, grad)
        return found

    @cached_property
    def _works(self) -> dict[tuple[bool, int, int, Grad | None], Work]:
        """What passes take, each asked for once."""
        return {}

    def of(self, op: Op) -> tuple[str, Part, Load]:
        """The component and part that a compute op runs, and its load."""
        if op.kind in (Kind.FORWARD, Kind.BACKWARD):
            return LLM, self.llm[op.virtual_stage], self.passes[op.index, op.virtual_stage]
        name = self.domain.encoder_batches[op.index].component
        return name, self.encoders[name], self.encodings[op.index]


def rank_work(spec: Workload, plan: StepPlan, rank: int, *, messages: bool = True) -> RankWork:
    """Describe the work of `rank` in the plan of its domain.

    Without `messages` loads leave out what exchanges of shared sequences send, and the model of memory the
    buffers of that: it takes a fraction of the time.
    """
    arrangement, domain = spec.arrangement, plan.domain
    number = arrangement.domain(rank)
    assert plan.number == number, f"a plan of domain {plan.number} for rank {rank} of domain {number}"
    domain_rank = arrangement.global_ranks(number).index(rank)
    held, last = domain.virtual_stages(domain_rank), domain.num_virtual_stages - 1
    llm = {number: spec.work[virtual_stage_name(LLM, number)] for number in held}
    rows_in = tuple(route.arriving[domain_rank] if route is not None else 0 for route in domain.routes)
    frozen = not plan.trains(LLM)
    return RankWork(
        rank=rank,
        domain_rank=domain_rank,
        domain=domain,
        llm=llm,
        encoders={
            name: spec.work[name] for name in spec.encoders if rank in arrangement.encoder_meshes[name]
        },
        passes={
            (m, number): replace(
                pass_load(domain, m, domain_rank, part, losses=number == last, messages=messages),
                frozen=frozen,
                rowless=frozen and number == 0 and not rows_in[m],
            )
            for m in range(len(domain.microbatches))
            for number, part in llm.items()
        },
        encodings={
            c: encoder_batch_load(
                batch, domain_rank, spec.work[name], spec.encoders[name].unit, messages=messages
            )
            for c, batch in enumerate(domain.encoder_batches)
            for name in [batch.component]
            if domain_rank in batch.ranks
        },
        rows_in=rows_in,
        rows_out=tuple(route.leaving[domain_rank] if route is not None else 0 for route in domain.routes),
        trained=tuple(name for name in plan.components if plan.trains(name)),
        learnt=tuple(
            name
            for name in plan.components
            if plan.trains(name) or spec.learns_from.get(name, plan.step) < plan.step
        ),
        row_bytes=spec.row_bytes,
        element=spec.element,
    )
