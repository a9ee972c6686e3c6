"""What one rank does in a step, in numbers: the common ground of the memory and the byte model.

From a plan and the models' sizes; nothing is built.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from omni.config import ConfigError
from omni.models.encoders.vit import ViTEncoder
from omni.models.llm import llm_parts, padded_vocabulary
from omni.rehearsal.parts import StagePart, ViTPart, stage_part, vit_part
from omni.rehearsal.sizes import Attended, attended
from omni.training.job import Job
from ops.device import dtype_of
from parallel.packed import Sharding
from pipeline.plan import DomainPlan, Microbatch, StepPlan


@dataclass(frozen=True)
class Pass:
    """A microbatch on this rank: what it attends to, the positions that give losses (padded, over its
    tensor-parallel ranks), rows that arrive here and rows that leave, over all routes.
    """

    seen: Attended
    targets: int
    rows_in: int
    rows_out: int


@dataclass(frozen=True)
class Encoding:
    """A chunk on this rank: what its slot attends to, and the rows that each rank of the slot passes on."""

    component: str
    microbatch: int
    seen: Attended
    rows: tuple[int, ...]
    own_rows: int


@dataclass(frozen=True)
class RankWork:
    """What rank `rank`, `position` of `domain`, does in a step. `stage` is None beside the LLM; `passes` then
    have nothing to attend to. `trained` names the components that learn.
    """

    rank: int
    position: int
    domain: DomainPlan
    stage: StagePart | None
    encoders: Mapping[str, ViTPart]
    passes: tuple[Pass, ...]
    encodings: Mapping[int, Encoding]
    trained: tuple[str, ...]
    width: int
    element: int

    @property
    def row_bytes(self) -> int:
        """Bytes of an activation of the LLM's width."""
        return self.width * self.element


def rank_work(job: Job, plan: StepPlan, rank: int) -> RankWork:
    """Describe the work of `rank` in `plan`.

    Raises:
        ConfigError: for what there is no arithmetic of: experts, several parts of the LLM on a rank, and
            encoders other than the ViT.
    """
    config, arrangement = job.config, job.arrangement
    if config.model.llm.mixture is not None:
        raise ConfigError("model.llm.moe: there is no model of the memory of experts yet")
    if arrangement.llm.parts > 1:
        raise ConfigError(
            f"layout.llm.parts={arrangement.llm.parts}: there is no model of the memory of several parts yet"
        )
    number = arrangement.domain(rank)
    domain = plan.domains[number]
    position = arrangement.domain_ranks(number).index(rank)
    element = dtype_of(config.train.precision).itemsize
    encoders: dict[str, ViTPart] = {}
    for name, encoder in job.encoders.items():
        if not isinstance(encoder, ViTEncoder):
            raise ConfigError(
                f"model.encoders.{name}: there is no model of the memory of a {type(encoder).__name__} yet"
            )
        if rank in arrangement.encoder_meshes[name]:
            tp = arrangement.encoder_tp[name]
            encoders[name] = vit_part(encoder.config, config.model.llm.hidden, tp, element)
    stage = domain.stage(position)
    part = None
    if stage is not None:
        vocabulary = padded_vocabulary(job.tokenizer.vocab_size, config.model.llm.vocab_multiple)
        layers = llm_parts(config.model.llm, job.tokenizer.vocab_size, arrangement.llm)
        part = stage_part(config.model.llm, vocabulary, layers, stage, arrangement.llm.tp, element)
    return RankWork(
        rank=rank,
        position=position,
        domain=domain,
        stage=part,
        encoders=encoders,
        passes=tuple(_pass(domain, m, position, part) for m in range(len(domain.microbatches))),
        encodings={
            c: _encoding(domain, c, position, encoders)
            for c, chunk in enumerate(domain.chunks)
            if position in chunk.ranks
        },
        trained=tuple(name for name in plan.components if plan.train and name not in plan.frozen),
        width=config.model.llm.hidden,
        element=element,
    )


def _pass(domain: DomainPlan, m: int, position: int, part: StagePart | None) -> Pass:
    route, batch = domain.routes[m], domain.microbatches[m]
    segments = route.segments if route is not None else ()
    rows_in = sum(s.length for s in segments if s.destination == position)
    rows_out = sum(s.length for s in segments if s.source == position)
    if part is None:
        return Pass(Attended(0, 0, 0), 0, rows_in, rows_out)
    member, tp = domain.member(position), domain.tp
    tail = batch.layout.padded_tokens(member, tp) - batch.layout.local_tokens(member)
    seen = attended(Sharding(batch.layout, batch.tiles, member, tail, tp), part.stack)
    targets = _targets(domain, batch, m, member) if part.last else 0
    return Pass(seen, targets, rows_in, rows_out)


def _encoding(domain: DomainPlan, c: int, position: int, encoders: Mapping[str, ViTPart]) -> Encoding:
    chunk = domain.chunks[c]
    slot = chunk.slot(position)
    seen = attended(Sharding(chunk.layout, chunk.tiles, slot, tp=chunk.tp), encoders[chunk.component].stack)
    rows = chunk.rows[slot * chunk.tp : (slot + 1) * chunk.tp]
    return Encoding(chunk.component, chunk.microbatch, seen, rows, chunk.rows_of(position))


def _targets(domain: DomainPlan, batch: Microbatch, m: int, member: int) -> int:
    """Positions that give losses, padded to one number on every tensor-parallel rank and summed over them.

    As if all text were target text: a token counts unless a row of an item or the end of an item follows.
    """
    share = batch.layout.padded_tokens(member, domain.tp) // domain.tp
    counts = [0] * domain.tp
    blank = _without_target(domain, m)
    starts = [start for start, _ in blank]
    at, begin = 0, 0
    for shards, length in zip(batch.layout.shards, batch.layout.lengths, strict=True):
        for shard in shards:
            if shard.rank != member:
                continue
            first, last = begin + shard.start, begin + shard.start + shard.length
            _count(counts, share, at, shard.length, 1)
            for start, stop in blank[max(0, bisect_right(starts, first) - 1) :]:
                if start >= last:
                    break
                low, high = max(start, first), min(stop, last)
                _count(counts, share, at + low - first, high - low, -1)
            at += shard.length
        begin += length
    return max(counts) if domain.tp == 1 else domain.tp * max(1, *counts)


def _without_target(domain: DomainPlan, m: int) -> list[tuple[int, int]]:
    """Runs of the packed axis of microbatch `m` whose next token is of an item, in order."""
    items = sorted(item.start for item in domain.items if item.microbatch == m)
    rows = {item.start: item.rows for item in domain.items if item.microbatch == m}
    return [(start - 1, start + rows[start]) for start in items]


def _count(counts: list[int], share: int, start: int, length: int, sign: int) -> None:
    """Add a run of a member's tokens to the parts that hold it."""
    while length > 0:
        part, local = divmod(start, share)
        step = min(length, share - local)
        counts[part] += sign * step
        start, length = start + step, length - step
