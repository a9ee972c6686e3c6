"""A model of what a rank sends in a step: bytes of every collective, by group and by link, from a plan.

Counted as `footprint.py` says. The collectives of layers follow from Megatron-LM's tensor and sequence
parallelism (Korthikanti et al., 2022, section 4.2.2): in front of a divided linear the tokens of all ranks
are gathered, behind it sums are scattered; the backward does the same the other way round, and gathers once
more for the gradient of the first weight.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from omni.models.llm import NAME as LLM
from omni.rehearsal.footprint import NOTHING, Sent, Traffic, ring, send
from omni.rehearsal.parts import buckets
from omni.rehearsal.rank_work import RankWork
from omni.rehearsal.sizes import FP32, Attended
from omni.training.job import Job
from parallel.boundary import Route
from parallel.transports import hops, node_map
from pipeline.plan import Kind, Op

Messages = Mapping[int, int]
Call = tuple[str, str, Messages]
"""Group, collective, bytes by receiving rank."""


def traffic(job: Job, work: RankWork) -> Traffic:
    """Count what `work.rank` sends in a step, update included."""
    nodes = node_map(range(job.arrangement.world), job.cluster.ranks_per_node)
    total: defaultdict[tuple[str, str], Sent] = defaultdict(lambda: NOTHING)
    for group, collective, messages in _calls(job, work):
        total[group, collective] += send(nodes, work.rank, messages)
    return dict(sorted(total.items()))


def _calls(job: Job, work: RankWork) -> Iterator[Call]:
    for op in work.domain.ops[work.position]:
        if op.kind in (Kind.ENCODE, Kind.ENCODE_BACKWARD):
            yield from _encoder_calls(job, work, op)
        elif op.kind in (Kind.FORWARD, Kind.BACKWARD):
            yield from _pass_calls(job, work, op)
        elif op.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            yield _hand_on(job, work, op)
        elif op.kind in (Kind.SHIP, Kind.RETURN):
            yield from _boundary_calls(job, work, op)
        elif op.kind is Kind.REDUCE:
            yield from _update_calls(job, work, op.index)


@dataclass(frozen=True)
class _Group:
    """A group of ranks as `rank` sends in it; where it is alone there is nothing to send."""

    label: str
    ranks: tuple[int, ...]
    rank: int

    def call(self, collective: str, size: int) -> Iterator[Call]:
        """One collective; `size` is the shard of a gather or scatter, else all of the tensor."""
        others = len(self.ranks) - 1
        if others:
            sent = 2 * others * size // len(self.ranks) if collective == "all_reduce" else others * size
            yield self.label, collective, {ring(self.ranks, self.rank): sent}


def _llm_group(job: Job, work: RankWork, carrier: str, *axes: str) -> _Group:
    ranks = sorted(job.arrangement.mesh.group(work.rank, *axes))
    return _Group(f"{LLM} {carrier}", tuple(ranks), work.rank)


def _encoder_group(job: Job, work: RankWork, name: str, carrier: str, axis: str) -> _Group:
    ranks = sorted(job.arrangement.encoder_meshes[name].group(work.rank, axis))
    return _Group(f"{name} {carrier}", tuple(ranks), work.rank)


# Layers.


def _pass_calls(job: Job, work: RankWork, op: Op) -> Iterator[Call]:
    assert work.stage is not None
    stage, stack, each = work.stage, work.stage.stack, work.passes[op.index]
    tp = _llm_group(job, work, "tp", "tp")
    shard = stack.between(each.seen.tokens) * work.row_bytes
    wanted = each.targets // stack.tp * work.row_bytes
    forward, recomputed = op.kind is Kind.FORWARD, stack.recompute == "full"
    for _ in range(stack.layers):
        if forward or recomputed:
            yield from _repeat(tp, shard, gathers=2, scatters=2)
        if forward or stack.recompute != "none":
            yield from _exchanges(work, f"{LLM} pool", each.seen, _pool(job, work), forward=True)
        if not forward:
            yield from _repeat(tp, shard, gathers=4, scatters=2)
            yield from _exchanges(work, f"{LLM} pool", each.seen, _pool(job, work), forward=False)
    if stage.first:
        yield from tp.call("reduce_scatter" if forward else "all_gather", shard)
    if stage.last:
        yield from tp.call("all_gather" if forward else "reduce_scatter", wanted)
        in_chunks = each.targets > stage.loss_chunk
        for start in range(0, each.targets, stage.loss_chunk) if forward or in_chunks else ():
            rows = min(stage.loss_chunk, each.targets - start)
            yield from tp.call("all_reduce", rows * FP32)  # the largest logits
            yield from tp.call("all_reduce", 2 * rows * FP32)  # the sums, and the targets' logits


def _repeat(group: _Group, shard: int, gathers: int, scatters: int) -> Iterator[Call]:
    for _ in range(gathers):
        yield from group.call("all_gather", shard)
    for _ in range(scatters):
        yield from group.call("reduce_scatter", shard)


def _exchanges(
    work: RankWork, label: str, seen: Attended, members: Sequence[int], forward: bool
) -> Iterator[Call]:
    """The two exchanges of a layer's attention, or their transposes."""
    for counts in (seen.into, seen.out) if forward else (seen.out_back, seen.into_back):
        if counts:
            messages = zip(members, counts, strict=True)
            yield label, "all_to_all", {to: count * work.element for to, count in messages}


def _pool(job: Job, work: RankWork) -> tuple[int, ...]:
    """Global ranks that share sequences with this one, by member."""
    return _at(job, work, range(_first_of_pool(work), _last_of_stage(work), work.domain.tp))


def _first_of_pool(work: RankWork) -> int:
    return work.position - work.domain.member(work.position) * work.domain.tp


def _last_of_stage(work: RankWork) -> int:
    return (work.position // work.domain.stage_size + 1) * work.domain.stage_size


def _at(job: Job, work: RankWork, positions: Iterable[int]) -> tuple[int, ...]:
    """Global ranks at positions of this rank's domain."""
    ranks = job.arrangement.domain_ranks(job.arrangement.domain(work.rank))
    return tuple(ranks[position] for position in positions)


def _encoder_calls(job: Job, work: RankWork, op: Op) -> Iterator[Call]:
    each, chunk = work.encodings[op.index], work.domain.chunks[op.index]
    part = work.encoders[each.component]
    stack, label = part.stack, f"{each.component} pool"
    tp = _encoder_group(job, work, each.component, "tp", "tp")
    hidden = each.seen.tokens * stack.hidden * stack.element
    members = _at(job, work, chunk.ranks[chunk.ranks.index(work.position) % chunk.tp :: chunk.tp])
    forward = op.kind is Kind.ENCODE
    if not forward:
        yield from tp.call("all_gather", max(each.rows) * work.row_bytes)
    for _ in range(stack.layers):
        if forward or stack.recompute == "full":
            for _ in range(2):
                yield from tp.call("all_reduce", hidden)
        if forward or stack.recompute != "none":
            yield from _exchanges(work, label, each.seen, members, forward=True)
        if not forward:
            for _ in range(2):
                yield from tp.call("all_reduce", hidden)
            yield from _exchanges(work, label, each.seen, members, forward=False)


# Between stages, and from encoders to the LLM.


def _hand_on(job: Job, work: RankWork, op: Op) -> Call:
    assert work.stage is not None
    forward = op.kind is Kind.SEND_FORWARD
    step = work.domain.stage_size if forward else -work.domain.stage_size
    (to,) = _at(job, work, [work.position + step])
    size = work.stage.stack.between(work.passes[op.index].seen.tokens) * work.row_bytes
    return "forward" if forward else "backward", "send", {to: size}


def _boundary_calls(job: Job, work: RankWork, op: Op) -> Iterator[Call]:
    route = work.domain.routes[op.index]
    assert route is not None
    label = "ship" if op.kind is Kind.SHIP else "back"
    route = route if op.kind is Kind.SHIP else route.transpose()
    ranks = _at(job, work, range(route.num_ranks))
    if route.is_local:
        return
    if route.transport in ("reduce_scatter", "all_gather"):
        yield from _Group(label, ranks, work.rank).call(route.transport, _block(route) * work.row_bytes)
        return
    for hop in hops(route.transport, route.traffic(), route.nodes):
        sent = {ranks[to]: rows * work.row_bytes for (by, to), rows in hop.items() if by == work.position}
        yield label, "all_to_all", sent


def _block(route: Route) -> int:
    """Rows of each rank's share of the buffer of a reduce-scatter or all-gather."""
    rows: Counter[int] = Counter()
    for segment in route.segments:
        rows[segment.source if route.transport == "all_gather" else segment.destination] += segment.length
    return max(rows.values(), default=0)


# Gradients and weights.


def _update_calls(job: Job, work: RankWork, number: int) -> Iterator[Call]:
    name = job.components[number]
    if name == LLM:
        stage = work.stage
        assert stage is not None
        replicas = _llm_group(job, work, "dp_cp", "cp", "dp")
        laid = buckets(stage.weights(), stage.reduced_alone(), len(replicas.ranks))
        if stage.stack.splits_tokens:
            norms = sum(stage.stack.norm_weights) * (2 * stage.stack.layers + stage.last)
            yield from _llm_group(job, work, "tp", "tp").call("all_reduce", norms * FP32)
        if stage.reduced_alone() is not None:
            stages = job.arrangement.mesh.group(work.rank, "pp")
            ends = _Group(f"{LLM} embd", (stages[0], stages[-1]), work.rank)
            yield from ends.call("all_reduce", stage.weights()[stage.reduced_alone() or 0] * FP32)
    else:
        replicas = _encoder_group(job, work, name, "dp_cp", "dp")
        laid = buckets(work.encoders[name].weights(), None, len(replicas.ranks))
    for size in laid.sizes:
        yield from replicas.call("reduce_scatter", size // len(replicas.ranks) * FP32)
        yield from replicas.call("all_gather", size // len(replicas.ranks) * work.element)
