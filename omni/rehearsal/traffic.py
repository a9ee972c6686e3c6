"""A model of what a rank sends in a step: bytes of every collective, by group and by link, from a plan.

Collectives inside parts and of their gradients are the parts' statements; this file adds what goes between
parts, and says who receives. Counted as `footprint.py` says.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from omni.models.llm import NAME as LLM
from omni.planning.rank_work import RankWork
from omni.planning.run_spec import RunSpec
from omni.rehearsal.footprint import NOTHING, Sent, Traffic, ring, send
from parallel.axes import group_of
from parallel.buckets import ENDS, EXPERT_REPLICAS, PARTITION_REPLICAS, REPLICAS
from parallel.transports import hops, node_map
from parallel.work import Collective
from pipeline.ops import COMPUTE, Kind, Op

Messages = Mapping[int, int]
Call = tuple[str, str, Messages, int]
"""Group, collective, bytes by receiving rank, number of calls."""


def traffic(spec: RunSpec, work: RankWork) -> Traffic:
    """Count what `work.rank` sends in a step, update included."""
    nodes = node_map(range(spec.arrangement.world), spec.cluster.ranks_per_node)
    total: defaultdict[tuple[str, str], Sent] = defaultdict(lambda: NOTHING)
    for group, collective, messages, calls in _calls(spec, work):
        total[group, collective] += send(nodes, work.rank, messages).times(calls)
    return dict(sorted(total.items()))


def _calls(spec: RunSpec, work: RankWork) -> Iterator[Call]:
    for op in work.domain.ops_of(work.domain_rank):
        if op.kind in COMPUTE:
            component, part, load = work.of(op)
            grad = work.domain.made_by(op)
            done = part.backward(load, grad) if grad else part.forward(load)
            yield from _of_part(spec, work, component, done.collectives)
        elif op.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            yield _hand_on(spec, work, op)
        elif op.kind in (Kind.SHIP, Kind.RETURN):
            yield from _boundary_calls(spec, work, op)
        elif op.kind is Kind.REDUCE:
            yield from _update_calls(spec, work, spec.components[op.index], op.virtual_stage)


def _of_part(
    spec: RunSpec, work: RankWork, component: str, collectives: Iterable[Collective]
) -> Iterator[Call]:
    """Say who receives what a part states that it sends."""
    encoder = None if component == LLM else component
    for one in collectives:
        ranks = group_of(spec.arrangement, encoder, one.axis, work.rank)
        yield (
            f"{component} {_carrier(spec, encoder, one.axis, work.rank)}",
            one.kind,
            _messages(one, ranks, work.rank),
            one.calls,
        )


def _messages(one: Collective, ranks: Sequence[int], rank: int) -> Messages:
    """Bytes by receiving rank of a collective over `ranks`."""
    if one.to:
        return dict(zip(ranks, one.to, strict=True))
    if one.kind == "all_to_all":
        return {to: one.bytes // (len(ranks) - 1) for to in ranks if to != rank}
    return {ring(ranks, rank): one.bytes}


def _carrier(spec: RunSpec, encoder: str | None, axis: str, rank: int) -> str:
    """The name of a group in footprints: that of the first axis which connects the same ranks."""
    if axis != "tp_dp_cp":
        return axis.replace("expt", "expert")
    own = group_of(spec.arrangement, encoder, axis, rank)
    return next(a for a in ("tp", REPLICAS, axis) if group_of(spec.arrangement, encoder, a, rank) == own)


def _update_calls(spec: RunSpec, work: RankWork, component: str, number: int) -> Iterator[Call]:
    encoder = None if component == LLM else component
    of_llm = (EXPERT_REPLICAS, PARTITION_REPLICAS, "partition", ENDS, "tp_dp_cp")
    axes = ("tp", REPLICAS, *(() if encoder else of_llm))
    ranks = {axis: len(group_of(spec.arrangement, encoder, axis, work.rank)) for axis in axes}
    yield from _of_part(spec, work, component, work.components[component][number].reduction(ranks, spec.sent))


# Between parts.


def _at(spec: RunSpec, work: RankWork, numbers: Iterable[int]) -> tuple[int, ...]:
    """Global ranks of some domain ranks, by number."""
    ranks = spec.arrangement.global_ranks(spec.arrangement.domain(work.rank))
    return tuple(ranks[number] for number in numbers)


def _hand_on(spec: RunSpec, work: RankWork, op: Op) -> Call:
    (to,) = _at(spec, work, [work.domain.sender(op, work.domain_rank)[1]])
    size = work.passes[op.index, op.virtual_stage].tokens // work.llm[op.virtual_stage].tp * work.row_bytes
    return "forward" if op.kind is Kind.SEND_FORWARD else "backward", "send", {to: size}, 1


def _boundary_calls(spec: RunSpec, work: RankWork, op: Op) -> Iterator[Call]:
    route = work.domain.routes[op.index]
    assert route is not None
    label = "ship" if op.kind is Kind.SHIP else "back"
    route = route if op.kind is Kind.SHIP else route.transpose()
    ranks = _at(spec, work, range(route.num_ranks))
    if route.is_local:
        return
    if route.transport in ("reduce_scatter", "all_gather"):
        size = (len(ranks) - 1) * route.block * work.row_bytes
        yield label, route.transport, {ring(ranks, work.rank): size}, 1
        return
    for hop in hops(route.transport, route.traffic(), route.nodes):
        sent = {ranks[to]: rows * work.row_bytes for (by, to), rows in hop.items() if by == work.domain_rank}
        yield label, "all_to_all", sent, 1
