"""The rank that holds most in a step, and the refusal of what its device cannot hold.

Nothing is refused where `cluster.memory_bytes` is null. What allocators, communicators and drivers take is
not modelled, and neither are plans of evaluation, which keep nothing for a backward.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

from omni.config import ConfigError
from omni.planning.host_memory import check_host, most_on_host, offloaded, on_host
from omni.planning.memory import by_kind, model_host, model_peak
from omni.planning.memory_advice import GIB, made_of, remedy
from omni.planning.optim_schedule import stages_of
from omni.planning.rank_work import RankWork, rank_work
from omni.planning.run_spec import RunSpec
from omni.planning.workload import Workload
from parallel.costs import CostTable
from parallel.work import Part
from pipeline.costs import plan_memory
from pipeline.ops import BACKWARDS, Kind
from pipeline.plan import StepPlan

LOADS = 1 << 12  # of a part that are remembered
CLEARLY = 0.97
"""Share of a device's memory up to which the teams that are likely the fullest speak for all."""


@dataclass(frozen=True)
class Peak:
    """The bytes that a rank of the world holds when it holds most, by kind and component: `domain_rank` of
    the domain of `plan`, while it runs the op `at`. Kinds are those of `memory.py`.
    """

    plan: StepPlan
    domain_rank: int
    rank: int
    parts: Mapping[tuple[str, str], int]
    at: str

    @property
    def held(self) -> dict[str, int]:
        """The bytes of each kind."""
        return by_kind(self.parts)

    @property
    def bytes(self) -> int:
        """All that it holds."""
        return sum(self.parts.values())


def fullest_rank(spec: Workload, plans: Iterable[StepPlan]) -> Peak:
    """Return the rank that holds most of the domains of `plans`.

    Ranks of a team run the same ops on the same layers: of each team its first rank is modelled, of the
    fullest team all.
    """
    found = max((fullest_team(spec, plan) for plan in plans), key=lambda peak: peak.bytes)
    return fullest_in_team(spec, found)


def fullest_team(spec: Workload, plan: StepPlan) -> Peak:
    """Return the first rank of the team that holds most of a plan's domain."""
    return _fullest(spec, plan, range(0, plan.domain.num_ranks, plan.domain.team))


def fullest_in_team(spec: Workload, first: Peak) -> Peak:
    """Return the rank that holds most of a team, of which `first` is the first."""
    return _fullest(spec, first.plan, range(first.domain_rank, first.domain_rank + first.plan.domain.team))


def _fullest(spec: Workload, plan: StepPlan, among: Iterable[int]) -> Peak:
    return max((_peak(spec, plan, work) for work in _works(spec, plan, among)), key=lambda peak: peak.bytes)


def _works(spec: Workload, plan: StepPlan, among: Iterable[int]) -> list[RankWork]:
    """What some domain ranks do."""
    ranks = spec.arrangement.global_ranks(plan.number)
    return [rank_work(spec, plan, ranks[at], messages=False) for at in among]


def _peak(spec: Workload, plan: StepPlan, work: RankWork) -> Peak:
    return Peak(plan, work.domain_rank, work.rank, *model_peak(spec, work))


def beyond(spec: Workload, table: CostTable, plan: StepPlan, closely: bool = True) -> int:
    """Return how many bytes the fullest rank of a plan's domain would hold beyond what its device can, or
    beyond its share of the host's memory, at most 0 if it fits; nothing where these are not known. Looked at
    `closely`, all ranks are asked where those that are likely the fullest have nearly that.
    """
    device, host = spec.cluster.memory_bytes, spec.cluster.host_bytes
    sends = host is not None and any(cost.copies for cost in table.parts.values())
    if device is None and not sends:
        return 0
    works = _works(spec, plan, _likely_fullest(table, plan))
    more = []
    if device is not None:
        peaks = (_peak(spec, plan, work).bytes for work in works)
        more.append(_over(device, max(peaks), closely, lambda: fullest_rank(spec, [plan]).bytes))
    if host is not None and sends:
        likely = max(map(model_host, works))
        more.append(_over(host, likely, closely, lambda: most_on_host(spec, table, plan)))
    return max(more)


def _over(most: int, likely: int, closely: bool, of_all: Callable[[], int]) -> int:
    return (of_all() if closely and CLEARLY * most < likely <= most else likely) - most


def likely_held(spec: Workload, table: CostTable, plan: StepPlan) -> int:
    """Return the most bytes that teams which are likely the fullest of a plan's domain hold: seldom a
    hundredth less than the fullest rank does.
    """
    works = _works(spec, plan, _likely_fullest(table, plan))
    return max(_peak(spec, plan, work).bytes for work in works)


def remembering(spec: Workload) -> Workload:
    """Return a workload whose parts state once what a pass of a load takes: candidates of a schedule have the
    same passes, and so have stages.
    """
    kept: list[tuple[Part, Part]] = []
    work = {}
    for name, part in spec.work.items():
        found = next((again for other, again in kept if other == part), None)
        if found is None:
            found = cast(Part, _Remembering(part))
            kept.append((part, found))
        work[name] = found
    return replace(spec, work=work)


class _Remembering:
    """A part that is asked once for each load."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self.forward = lru_cache(LOADS)(part.forward)
        self.backward = lru_cache(LOADS)(part.backward)

    def __getattr__(self, name: str) -> object:
        return getattr(self._part, name)


def _likely_fullest(table: CostTable, plan: StepPlan) -> list[int]:
    """The first domain rank of the team of each stage, and of those beside the LLM, whose forwards keep most
    at once: what else a rank holds is about the same for all of a stage.
    """
    domain, kept = plan.domain, plan_memory(plan.domain, table)
    fullest: dict[tuple[int, ...], tuple[int, int]] = {}
    for team, ops in enumerate(domain.ops):
        domain_rank = team * domain.team
        held = most = 0
        for op in ops:
            if op.kind in (Kind.FORWARD, Kind.ENCODE):
                held += kept(domain_rank, op)
                most = max(most, held)
            elif op.kind in BACKWARDS and op.makes_weight:
                held -= kept(domain_rank, op)
        own = domain.holds[team]
        fullest[own] = max(fullest.get(own, (-1, 0)), (most, domain_rank))
    return [domain_rank for _, domain_rank in sorted(fullest.values(), reverse=True)]


def check_first_steps(spec: RunSpec, step: int, cursor: int) -> None:
    """Refuse a run of which some rank cannot hold one of the first two steps, from `step` on, which begins at
    `cursor` of the stream, or the first step of a later stage, in which other components learn, with the
    samples after them. All domains are planned for it, so this is for worlds of one machine.

    Raises:
        ConfigError: as `check_memory`, `check_host`, or `check_encoder_bytes`.
    """
    bounds = spec.cluster.memory_bytes, spec.cluster.host_bytes, spec.planner.domain.encoder_bytes
    if not any(bounds):
        return
    config = spec.config
    stages = stages_of(config.optim, config.stages, config.train.steps)
    later = [stage.first for stage in stages if stage.first > step + 1]
    for number in (*range(step, min(step + 1, config.train.steps) + 1), *later):
        plans = list(spec.planner.distinct_domains(number, cursor))
        for plan in plans:
            spec.planner.verify(plan)
            check_host(spec, plan, most_on_host(spec, spec.table, plan))
        check_memory(spec, fullest_rank(spec, plans))
        cursor = plans[0].taken.next_cursor


def check_rank(spec: RunSpec, rank: int, plan: StepPlan) -> None:
    """Refuse a plan that `rank`, which is of its domain, cannot hold. If each rank asks for itself, no plan
    that does not fit is run by anyone.

    Raises:
        ConfigError: as `check_memory`, or `check_host`.
    """
    if spec.cluster.host_bytes is not None and offloaded(spec.config.model):
        check_host(spec, plan, on_host(spec, plan, rank))
    if spec.cluster.memory_bytes is not None:
        domain_rank = spec.arrangement.global_ranks(plan.number).index(rank)
        check_memory(spec, _fullest(spec, plan, [domain_rank]))


def check_memory(spec: RunSpec, fullest: Peak) -> None:
    """Refuse a rank that holds more than a device of the cluster can. A cluster may not say what that is.

    Raises:
        ConfigError: naming the rank, what it holds, what that is made of, and the remedy.
    """
    most = spec.cluster.memory_bytes
    if most is None or fullest.bytes <= most:
        return
    policy, schedule = spec.policies["pipeline"], fullest.plan.domain.scheduled
    none = (
        f" No schedule of pipeline={policy.name} fits; {schedule} holds least." if policy.candidates else ""
    )
    raise ConfigError(
        f"rank {fullest.rank} ({place(spec, fullest.rank)}) would hold {fullest.bytes / GIB:.1f} GiB at "
        f"{fullest.at} of step {fullest.plan.step}, more than the {most / GIB:.1f} GiB of "
        f"cluster.memory_bytes={most} "
        f"({spec.cluster.name}): {made_of(fullest.parts)}.{none} {remedy(spec, fullest.parts, most)}"
    )


def place(spec: RunSpec, rank: int) -> str:
    """Return where a rank is, in words: its coordinates, or that it is beside the LLM."""
    if rank not in spec.arrangement.mesh:
        return "encoders only"
    at = spec.arrangement.mesh.coordinates(rank)
    return ", ".join(f"{axis} {at[axis]}" for axis in ("tp", "cp", "dp", "pp"))
