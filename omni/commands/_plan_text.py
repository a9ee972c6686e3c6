"""What `omni plan` shows of a step, in lines of text."""

from collections.abc import Iterator, Mapping, Sequence

from omni.planning.choice import text_of
from omni.planning.cut import told
from omni.planning.fullest import place
from omni.planning.host_memory import offloaded
from omni.planning.memory_advice import GIB, whose
from omni.planning.run_spec import RunSpec
from omni.planning.update_time import update_ns
from omni.rehearsal.estimate import Estimate
from omni.rehearsal.footprint import Sent
from pipeline.domain_plan import DomainPlan, EncoderBatch, Microbatch
from pipeline.drawing import team_names
from pipeline.plan import StepPlan
from pipeline.simulator import Timeline

WIDTH = 72  # characters of a timeline
_LETTERS = {
    "encode": "e", "encode_backward": "E", "forward": "f", "backward": "B", "reduce": "r", "wait": "."
}  # fmt: skip
_SPENT = {
    "compute": "compute_ns",
    "collectives inside layers": "layers_ns",
    "waiting for updated weights": "weights_ns",
    "boundary": "boundary_ns",
    "messages between stages": "messages_ns",
    "reduction of gradients": "reducing_ns",
    "issuing communication": "issuing_ns",
    "idle": "idle_ns",
}

BOUNDS = {
    "work": "all work over all ranks",
    "sample": "the longest chain of one sample",
    "whole": "samples whole, on those that may share them",
    "pipeline": "work, and fill and drain of the pipeline",
}


def lines(
    spec: RunSpec, found: Estimate, plan: StepPlan, timeline: Timeline, sent: Mapping[int, Sent]
) -> Iterator[str]:
    """Say what a step takes, of the world first, then of the domain of `plan`, whose ranks send `sent`."""
    world, taken = spec.arrangement, plan.taken
    yield f"step {plan.step}: {told(spec.planner, taken)}"
    yield f"stream positions {taken.cursor} to {taken.next_cursor - 1}"
    yield f"{world.world:,} ranks, {world.describe()}, {spec.config.train.precision}"
    yield spec.policies.describe()
    yield from _time(spec, found)
    yield from _memory(spec, found)
    yield from _domain(spec, plan, sent)
    yield "\nsimulated timeline: e encode, f forward, B backward, E encode-backward, r reduce, . wait"
    names = team_names(spec.arrangement.global_ranks(plan.number), plan.domain.team)
    for number, name in enumerate(names):
        yield f"  {name:{max(map(len, names))}}  {draw(timeline, number)}"


def _time(spec: RunSpec, found: Estimate) -> Iterator[str]:
    domains = spec.arrangement.num_domains
    yield f"\n{f'planned forward ms, all {domains} domains':34} {'max':>10} {'mean':>10} {'max/mean':>10}"
    for name, (most, mean) in found.loads.items():
        yield f"  {name:32} {most / 1e6:10.1f} {mean / 1e6:10.1f} {most / mean if mean else 1:10.2f}"
    title = f"simulated on {spec.cluster.name}"
    yield f"\n{title:34} {'ms':>10} {'share':>10}   slowest domain: {found.plan.number}"
    whole = found.timeline.makespan_ns
    yield f"  {'step':32} {whole / 1e6:10.1f}"
    for name, key in _SPENT.items():
        ns = getattr(found.spent, key)
        yield f"    {name:30} {ns / 1e6:10.1f} {ns / whole if whole else 0:10.1%}"
    update = update_ns(spec, found.plan, found.fullest.rank)
    yield f"  {'update, which is not in the step':32} {update / 1e6:10.1f}"
    yield from _best(found)
    yield f"  {'tokens/s':32} {found.tokens_per_s():10,.0f}"
    yield f"  {'MFU':32} {found.mfu(spec):10.1%}"
    price = spec.config.cluster.price_per_hour
    if price is not None:
        of_step = price * spec.arrangement.world * found.step_s / 3600
        a_million = of_step / found.plan.taken.tokens * 1e6
        yield f"  {'price of a step':32} {of_step:10.4g}   {a_million:.4g} a million tokens"


def _best(found: Estimate) -> Iterator[str]:
    """The best possible steps: of these domains and their sharing, and of any. How far the plan is above."""
    whole = found.timeline.makespan_ns
    for name, bound in (("best possible", found.bound), ("best possible, any domains", found.any_domain)):
        if bound.ns:
            yield f"  {name:32} {bound.ns / 1e6:10.1f} {whole / bound.ns:9.2f}x   {BOUNDS[bound.reason]}"


def _memory(spec: RunSpec, found: Estimate) -> Iterator[str]:
    most, peak = spec.cluster.memory_bytes, found.fullest
    of = f" of {most / GIB:.1f} (cluster.memory_bytes)" if most else "; cluster.memory_bytes is not set"
    yield f"\nGiB held by the fullest rank, {peak.rank} ({place(spec, peak.rank)}), at {peak.at}"
    yield f"  {'all':32} {peak.bytes / GIB:10.1f}{of}"
    for kind, size in peak.held.items():
        yield f"    {kind:30} {size / GIB:10.1f}{whose(peak.parts, kind)}"
    if found.host_bytes:
        ranks = min(spec.config.cluster.ranks_per_node, spec.arrangement.world)
        keys, share = offloaded(spec.config.model), spec.cluster.host_bytes
        of = f" of {share / GIB:.1f} (cluster.host_memory_bytes)" if share else ""
        yield f"\nGiB of layers' inputs on the host ({text_of(keys)})"
        yield f"  {'of a rank, at most':32} {found.host_bytes / GIB:10.1f}{of}"
        yield f"  {f'of a node of {ranks} ranks, at most':32} {ranks * found.host_bytes / GIB:10.1f}"


def _domain(spec: RunSpec, plan: StepPlan, sent: Mapping[int, Sent]) -> Iterator[str]:
    domain = plan.domain
    yield f"\n{f'GiB a rank of domain {plan.number} sends':34} {'max':>10} {'mean':>10}"
    for title, tier in (("inside its node", "inside"), ("to other nodes", "across")):
        sizes = {rank: getattr(of, tier) for rank, of in sent.items()}
        most = max(sizes, key=lambda rank: sizes[rank])
        mean = sum(sizes.values()) / len(sizes)
        yield f"  {title:32} {sizes[most] / GIB:10.2f} {mean / GIB:10.2f}   most: rank {most}"
    rows = sum(item.rows for item in domain.items)
    moved = sum(route.moved_rows() for route in domain.routes if route is not None)
    yield f"\nplan of domain {plan.number} (the verifier accepted those of all domains, rules R1 to R7)"
    for key, value in (
        ("schedule", domain.scheduled),
        ("digests", " ".join(f"{name} {digest:016x}" for name, _, digest, _ in plan.levels)),
        ("tokens of microbatches", [sum(batch.layout.lengths) for batch in domain.microbatches]),
        *_computed_anew(spec, domain),
        ("items, encoder batches", f"{len(domain.items)}, {len(domain.encoder_batches)}"),
        ("sequences, items shared", f"{shared(domain.microbatches)}, {shared(domain.encoder_batches)}"),
        ("rows, of them shipped", f"{rows}, {moved}"),
    ):
        yield f"  {key:25} {value}"


def _computed_anew(spec: RunSpec, domain: DomainPlan) -> Iterator[tuple[str, str]]:
    """How many microbatches have all layers computed anew, where that is not one and the same for all."""
    if spec.config.model.llm.recompute_long:
        anew = sum(batch.anew for batch in domain.microbatches)
        but = ", but for attention" if spec.config.model.llm.keep_attention else ""
        yield "all layers computed anew", f"in {anew} of {len(domain.microbatches)} microbatches{but}"


def shared(parts: Sequence[Microbatch | EncoderBatch]) -> int:
    """Sequences of microbatches or encoder batches that several ranks hold parts of."""
    return sum(len(shards) > 1 for part in parts for shards in part.layout.shards)


def draw(timeline: Timeline, team: int) -> str:
    """One character for each slice of the simulated step: what the ranks of a team do for most of it."""
    total = max(1, timeline.makespan_ns)
    cells = [dict.fromkeys(_LETTERS, 0) for _ in range(WIDTH)]
    for event in timeline.events[team]:
        if event.op.kind not in _LETTERS:
            continue
        first, last = event.start_ns * WIDTH // total, min(WIDTH - 1, event.end_ns * WIDTH // total)
        for cell in range(first, last + 1):
            low, high = cell * total // WIDTH, (cell + 1) * total // WIDTH
            cells[cell][event.op.kind] += max(0, min(high, event.end_ns) - max(low, event.start_ns))
    best = [max(cell, key=lambda kind: cell[kind]) for cell in cells]
    return "".join(_LETTERS[kind] if cell[kind] else " " for kind, cell in zip(best, cells, strict=True))
