"""What `omni plan` advises where ranks idle: the reason, and keys to change with what they would bring.

What a change would bring is simulated on one domain, the slowest of the step as it is: with another budget or
schedule the plan is made, verified and timed as any other. A change that gains less than a tenth, or that the
ranks of this domain could not hold, is not advised.
"""

from collections.abc import Iterator
from dataclasses import replace

from omni.planning.fullest import fits
from omni.planning.planner import Planner
from omni.planning.run_spec import RunSpec
from omni.rehearsal.estimate import Estimate
from parallel.policy import find
from pipeline.builders import SchedulePolicy
from pipeline.costs import simulate
from pipeline.verifier import PlanRefusedError

IDLE = 0.2  # share of the step from which on there is advice
FILLED = 8  # microbatches a stage at which the bubble of 1F1B is below an eighth
GAIN = 1.1
"""Times as many tokens a second that a change must bring to be advised."""


def advice(spec: RunSpec, found: Estimate, cursor: int) -> Iterator[str]:
    """Say in lines why ranks idle, and what to change, for a step that begins at `cursor` of the stream."""
    whole = found.timeline.makespan_ns
    idle = found.spent.idle_ns / whole if whole else 0.0
    if idle < IDLE:
        return
    yield f"\nranks idle for {idle:.0%} of the step"
    yield from _few(spec, found)
    best = found.tokens_per_s()
    for keys, planner in _changes(spec, found):
        tokens_per_s = _tried(spec, found, planner, cursor)
        if tokens_per_s is not None and tokens_per_s > GAIN * best:
            best = tokens_per_s
            yield (
                f"  advice: {' '.join(keys)} would bring {best:,.0f} tokens/s, "
                f"{best / found.tokens_per_s():.1f} times as many (simulated, domain {found.plan.number})"
            )
            if any(key.startswith("data.") for key in keys):
                yield "  a step of more tokens is a larger batch: choose optim.lr for it"


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
    """Yield keys to change, and a planner that has them changed: more microbatches, then encoder work in the
    gaps as well.
    """
    planner, keys = spec.planner, list[str]()
    wanted = FILLED * spec.arrangement.llm.pp
    times = -(-wanted // max(1, len(found.plan.domain.microbatches)))
    if times > 1:
        budget = planner.budget
        key = "step_tokens" if budget.step_tokens is not None else "step_samples"
        value = times * getattr(budget, key)
        keys = [f"data.{key}={value}"]
        planner = replace(planner, budget=replace(budget, **{key: value}))
        yield keys, planner
    if spec.arrangement.llm.pp > 1 and found.plan.domain.chunks and "joint" not in found.plan.domain.schedule:
        joint = find(SchedulePolicy, "joint", "pipeline.schedule")
        yield [*keys, "pipeline=joint"], replace(planner, policies=replace(planner.policies, schedule=joint))


def _tried(spec: RunSpec, found: Estimate, planner: Planner, cursor: int) -> float | None:
    """Tokens a second of the world if all domains take as long as this one; None if it does not go."""
    try:
        plan = planner.next_step(found.plan.step, cursor, found.plan.number)
        planner.verify(plan)
    except (ValueError, PlanRefusedError):
        return None
    if not fits(spec, plan):
        return None
    timeline = simulate(plan.domain, spec.table, planner.single_queue)
    return plan.taken.tokens / (timeline.makespan_ns / 1e9)
