"""What a step takes on a cluster that nobody has yet: all domains, from their plans and the cost table.

No rank and no tensor: loads, simulated time and modelled memory of every domain, of which the slowest sets
the pace, since all of them reduce gradients together.
"""

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass

from dataloader.tokens import SampleMeta
from omni.planning.bound import Bound, step_bound
from omni.planning.fullest import Peak, fullest_in_team, fullest_team, remembering
from omni.planning.host_memory import most_on_host
from omni.planning.loads import largest, mean_loads, planned_sums, trained_flops
from omni.planning.rank_work import rank_work
from omni.planning.run_spec import RunSpec
from omni.rehearsal.footprint import NOTHING, Sent
from omni.rehearsal.traffic import traffic
from parallel.costs import CostTable
from pipeline.costs import SimulatedSpent, simulate, spent_on
from pipeline.plan import StepPlan
from pipeline.simulator import Timeline


@dataclass(frozen=True)
class Estimate:
    """A step of the whole world.

    `loads` are the most and the mean planned nanoseconds of forward passes by component, of a cp rank of a
    pool for the LLM and of a rank for an encoder; `flops` those of the step by component, all text counted
    as targets. `plan` is that of the slowest domain, `timeline` its simulation, `spent` the mean of its
    domain ranks. The rank of `fullest` holds more than any other of the world, and none keeps more than
    `host_bytes` on its host. No plan of these samples in this
    layout takes less than `bound`, and none less than `any_domain`, whatever its domains and sharing.
    """

    loads: Mapping[str, tuple[int, float]]
    flops: Mapping[str, float]
    plan: StepPlan
    timeline: Timeline
    spent: SimulatedSpent
    fullest: Peak
    bound: Bound
    any_domain: Bound
    host_bytes: int

    @property
    def over_best(self) -> float:
        """The step over the best possible one of any domains and sharing."""
        return self.timeline.makespan_ns / max(1, self.any_domain.ns)

    @property
    def step_s(self) -> float:
        """Simulated seconds of the step."""
        return self.timeline.makespan_ns / 1e9

    def tokens_per_s(self) -> float:
        """Simulated tokens of the LLM in a second, of all ranks."""
        return self.plan.taken.tokens / self.step_s

    def mfu(self, spec: RunSpec) -> float:
        """The share of the cluster's peak that the step's FLOPs are."""
        return sum(self.flops.values()) / (spec.cluster.flops * spec.arrangement.world * self.step_s)


def estimate(spec: RunSpec, plans: Iterable[StepPlan]) -> Estimate:
    """Estimate a step from the plans of all its domains, which are verified on the way.

    Raises:
        PlanRefusedError: for the first plan that breaks a rule.
    """
    slowest: tuple[StepPlan, Timeline] | None = None
    fullest: Peak | None = None
    host_bytes = 0
    most, sums, targets = [0] * len(spec.components), [0.0] * len(spec.components) * 2, 0
    samples: list[SampleMeta] = []
    for plan in plans:
        spec.planner.verify(plan)
        most = [max(pair) for pair in zip(most, largest(spec, plan).ranks, strict=True)]
        sums = [a + b for a, b in zip(sums, planned_sums(spec, plan, counts=True), strict=False)]
        metas = spec.planner.metas_of(plan.domain)
        samples += metas
        targets += sum(stop - start for sample in plan.domain.samples for start, stop in sample.targets)
        timeline = simulate(plan.domain, spec.table, spec.planner.domain.single_queue)
        if slowest is None or timeline.makespan_ns > slowest[1].makespan_ns:
            slowest = plan, timeline
        peak = fullest_team(spec, plan)
        if fullest is None or peak.bytes > fullest.bytes:
            fullest = peak
        host_bytes = max(host_bytes, most_on_host(spec, spec.table, plan))
    assert slowest is not None
    assert fullest is not None
    plan, timeline = slowest
    count = len(plan.components)
    means = mean_loads(spec, plan, sums[count:])
    planned = dict(zip(plan.components, sums[:count], strict=True))
    return Estimate(
        loads={name: (of, means[name]) for name, of in zip(plan.components, most, strict=True)},
        flops=trained_flops(spec, plan, planned, targets),
        plan=plan,
        timeline=timeline,
        spent=mean_spent(timeline, spec.table),
        fullest=fullest_in_team(spec, fullest),
        bound=step_bound(samples, spec.planner.domain, plan.frozen),
        any_domain=step_bound(samples, spec.planner.domain, plan.frozen, any_domain=True),
        host_bytes=host_bytes,
    )


def mean_spent(timeline: Timeline, table: CostTable) -> SimulatedSpent:
    """Return what the ranks of a simulated domain spend the step with, on average."""
    domain = timeline.domain
    each = [astuple(spent_on(timeline, table, rank)) for rank in range(0, domain.num_ranks, domain.team)]
    return SimulatedSpent(*(sum(of) // len(each) for of in zip(*each, strict=True)))


def sent_by_ranks(spec: RunSpec, plan: StepPlan) -> dict[int, Sent]:
    """Return what each rank of a plan's domain sends in the step, by its number in the world."""
    ranks, asked_once = spec.arrangement.global_ranks(plan.number), remembering(spec)
    works = (rank_work(asked_once, plan, rank) for rank in ranks)
    return {work.rank: sum(traffic(spec, work).values(), NOTHING) for work in works}
