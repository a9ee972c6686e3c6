"""What one rank does in a step, in numbers: the common ground of the memory and the byte model.

From a plan and the statements of work of the job's parts; nothing is built.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from omni.config import ConfigError
from omni.models.llm import NAME as LLM
from omni.training.job import Job
from ops.device import dtype_of
from parallel.work import Load, Part, Weight
from pipeline.loads import chunk_load, pass_load
from pipeline.plan import DomainPlan, StepPlan


@dataclass(frozen=True)
class RankWork:
    """What rank `rank`, `position` of `domain`, does in a step.

    `llm` is its part of the LLM, None beside it, and `passes` are its loads by microbatch; `encoders` are the
    parts of encoders that it holds and `encodings` its loads by chunk. `rows_in` and `rows_out` count rows of
    each microbatch that arrive here and that leave; `trained` names the components that learn.
    """

    rank: int
    position: int
    domain: DomainPlan
    llm: Part | None
    encoders: Mapping[str, Part]
    passes: tuple[Load, ...]
    encodings: Mapping[int, Load]
    rows_in: tuple[int, ...]
    rows_out: tuple[int, ...]
    trained: tuple[str, ...]
    row_bytes: int
    element: int

    def components(self) -> Iterator[tuple[str, Part]]:
        """Yield the parts that this rank holds, by component."""
        if self.llm is not None:
            yield LLM, self.llm
        yield from self.encoders.items()

    def weights(self) -> dict[str, tuple[Weight, ...]]:
        """Parameters by component."""
        return {name: part.weights() for name, part in self.components()}


def rank_work(job: Job, plan: StepPlan, rank: int) -> RankWork:
    """Describe the work of `rank` in `plan`, that of its domain.

    Raises:
        ConfigError: for several parts of the LLM on a rank, which there is no arithmetic of yet.
    """
    arrangement, domain = job.arrangement, plan.domain
    if arrangement.llm.parts > 1:
        raise ConfigError(
            f"layout.llm.parts={arrangement.llm.parts}: there is no model of the memory of several parts yet"
        )
    position = arrangement.domain_ranks(plan.number).index(rank)
    element = dtype_of(job.config.train.precision).itemsize
    stage = domain.stage(position)
    llm = None if stage is None else job.work[f"{LLM}/{stage}"]
    microbatches = range(len(domain.microbatches))
    segments = [route.segments if route is not None else () for route in domain.routes]
    losses = domain.is_last(position)
    return RankWork(
        rank=rank,
        position=position,
        domain=domain,
        llm=llm,
        encoders={name: job.work[name] for name in job.encoders if rank in arrangement.encoder_meshes[name]},
        passes=tuple(pass_load(domain, m, position, llm, losses=losses) for m in microbatches) if llm else (),
        encodings={
            c: chunk_load(domain, chunk, position, job.work[chunk.component])
            for c, chunk in enumerate(domain.chunks)
            if position in chunk.ranks
        },
        rows_in=tuple(sum(s.length for s in of if s.destination == position) for of in segments),
        rows_out=tuple(sum(s.length for s in of if s.source == position) for of in segments),
        trained=tuple(name for name in plan.components if plan.train and name not in plan.frozen),
        row_bytes=job.config.model.llm.hidden * element,
        element=element,
    )
