"""What `omni plan` advises where a step wastes time: why, and keys to change with what they would bring.

What a change would bring is simulated on one domain, the slowest of the step as it is: with another budget,
schedule or sharing the plan is made, verified and timed as any other. A change that gains less than a tenth,
or that the ranks of this domain could not hold, is not advised. A step is far from the best possible one from
`FAR` times that on.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace

from omni.commands._plan_text import BOUNDS
from omni.planning.planner import Planner
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.rehearsal.estimate import Estimate
from parallel.policy import find
from pipeline.builders import SchedulePolicy
from pipeline.costs import simulate
from pipeline.ops import COMPUTE
from pipeline.verifier import PlanRefusedError

WASTED = 0.2  # share of the step from which on there is advice
UNEVEN = 0.1  # share of the step by which the busiest rank works longer than the mean one
TRAINED = 3  # times its forward pass that a component takes
FILLED = 8  # microbatches a stage at which the bubble of 1F1B is below an eighth
FAR = 1.15
SHARED = 8  # replicas of a domain that is tried where samples cannot be shared by enough ranks
GAIN = 1.1
"""Times as many tokens a second that a change must bring to be advised."""


def advice(spec: RunSpec, found: Estimate, cursor: int) -> Iterator[str]:
    """Say in lines why ranks idle, and what to change, for a step that begins at `cursor` of the stream."""
    whole = max(1, found.timeline.makespan_ns)
    idle, reducing, layers = (
        getattr(found.spent, key) / whole for key in ("idle_ns", "reducing_ns", "layers_ns")
    )
    yield from _uneven(found)
    if layers >= WASTED:
        llm = spec.arrangement.llm
        smaller = f"a smaller layout.llm.tp={llm.tp}" if llm.tp > 1 else f"a lower layout.llm.zero={llm.zero}"
        yield f"\ncollectives inside layers take {layers:.0%} of the step: try {smaller}"
    if found.over_best >= FAR:
        yield f"\nthe step takes {found.over_best:.2f} times the best possible one"
        yield from _why(spec, found)
    if max(idle, reducing) < WASTED and found.over_best < FAR:
        return
    if reducing >= WASTED:
        yield f"\nreducing gradients takes {reducing:.0%} of the step, however many tokens it has"
    if idle >= WASTED:
        yield f"\nranks idle for {idle:.0%} of the step"
    yield from _few(spec, found)
    now = found.tokens_per_s()
    for keys, planner in (*_sharing(spec, found), *_changes(spec, found)):
        tokens_per_s = _tried(spec, found, planner, cursor)
        if tokens_per_s is None:
            continue
        more = keys[0].startswith("data.")
        if tokens_per_s > GAIN * now:
            yield (
                f"  advice: {' '.join(keys)} would bring {tokens_per_s:,.0f} tokens/s, "
                f"{tokens_per_s / now:.1f} times as many (simulated, domain {found.plan.number})"
            )
            if more:
                yield "  a step of more tokens is a larger batch: choose optim.lr for it"
        if more:
            return


def _uneven(found: Estimate) -> Iterator[str]:
    """Say whose work is uneven between ranks, where that alone costs a share of the step."""
    for name, (most, mean) in found.loads.items():
        if mean and TRAINED * (most - mean) >= UNEVEN * found.timeline.makespan_ns:
            yield (
                f"\nwork of {name} is uneven: the busiest rank has {most / mean:.1f} times the mean; "
                "omni data balance compares what evens it out"
            )


def _why(spec: RunSpec, found: Estimate) -> Iterator[str]:
    """Say when ranks idle, and whether samples are too long for those that may share them."""
    whole, domain = max(1, found.timeline.makespan_ns), found.plan.domain
    before = between = after = 0
    for events in found.timeline.events:
        busy = [event for event in events if event.op.kind in COMPUTE]
        if busy:
            before, after = before + busy[0].start_ns, after + whole - busy[-1].end_ns
            spent = sum(event.end_ns - event.start_ns for event in busy)
            between += busy[-1].end_ns - busy[0].start_ns - spent
    shares = [ns / whole / len(domain.ops) for ns in (before, between, after)]
    when = "{:.0%} of it before their first pass, {:.0%} between passes, {:.0%} after".format(*shares)
    yield f"  ranks of its slowest domain stand still for {when}"
    if found.bound.ns > FAR * found.any_domain.ns:
        own = spec.planner.domain.sharing[spec.planner.domain.llm]
        ranks = own.pool.num_cp_ranks if own.policy.cuts else 1
        yield (
            f"  {found.bound.ns / 1e6:,.0f} ms of it are {BOUNDS[found.bound.reason]}: a sequence may be "
            f"shared by {ranks} of {spec.arrangement.llm.cp * spec.arrangement.llm.dp:,} members"
        )


def _sharing(spec: RunSpec, found: Estimate) -> Iterator[tuple[list[str], Planner]]:
    """Yield the keys that let domains share long sequences, where samples are what bounds the step."""
    dp = spec.arrangement.llm.dp
    domain = max(n for n in range(1, min(SHARED, dp) + 1) if dp % n == 0)
    if found.bound.ns <= FAR * found.any_domain.ns or domain <= spec.arrangement.replicas:
        return
    config = deepcopy(spec.config)
    config.layout.domain = domain
    config.llm_sp.policy = config.encoder_sp.policy = "dynamic"
    try:
        planner = prepare_run(config, spec.arrangement.world).planner
    except ValueError:
        return  # such domains do not go with the other keys
    keys = [f"layout.domain={domain}", "llm_sp=dynamic", "encoder_sp=dynamic"]
    yield keys, planner


def _few(spec: RunSpec, found: Estimate) -> Iterator[str]:
    """Say where there are too few samples or microbatches for the ranks."""
    world, samples = spec.arrangement, len(found.plan.taken)
    replicas, stages = world.llm.dp, world.llm.pp
    batches = len(found.plan.domain.microbatches)
    if samples < FILLED * replicas:
        yield (
            f"  {samples:,} samples are few for {world.world:,} ranks: {samples / replicas:.1f} for each of "
            f"{replicas:,} replicas"
        )
    if stages > 1 and batches < FILLED * stages:
        yield (
            f"  {batches} microbatches are few for {stages} stages (layout.llm.pp): a pipeline fills and "
            f"empties in the time of {stages - 1}"
        )


def _changes(spec: RunSpec, found: Estimate) -> Iterator[tuple[list[str], Planner]]:
    """Yield keys to change, and a planner that has them changed: encoder work in the gaps, or more tokens, as
    many as fill the pipeline, then half of that and so on; of these the first that fits should be taken.
    """
    domain, layout, planner = found.plan.domain, spec.arrangement.llm, spec.planner
    if layout.pp > 1 and domain.encoder_batches and "joint" not in domain.schedule:
        joint = find(SchedulePolicy, "joint", "pipeline.policy")
        yield ["pipeline=joint"], replace(planner, domain=replace(planner.domain, schedule=joint))
    times = -(-FILLED * layout.pp // max(1, len(domain.microbatches)))
    if found.spent.reducing_ns >= WASTED * found.timeline.makespan_ns:
        times = max(2, times)
    budget = planner.world.budget_at(found.plan.taken.cursor)
    key = "step_tokens" if budget.step_tokens is not None else "step_samples"
    while times > 1:
        value = times * getattr(budget, key)
        yield [f"data.{key}={value}"], planner.with_budget(replace(budget, **{key: value}))
        times //= 2


def _tried(spec: RunSpec, found: Estimate, planner: Planner, cursor: int) -> float | None:
    """Tokens a second of the world if all domains take as long as this one; None if it does not go."""
    try:
        replica = found.plan.number * spec.arrangement.replicas
        number = replica // planner.domain.arrangement.replicas
        plan = planner.next_step(found.plan.step, cursor, number)
        planner.verify(plan)
    except (ValueError, PlanRefusedError):
        return None
    if planner.beyond(plan) > 0:
        return None
    timeline = simulate(plan.domain, planner.domain.table, planner.domain.single_queue)
    return plan.taken.tokens / (timeline.makespan_ns / 1e9)
