"""Systems side by side: the same samples on the same ranks under each, simulated.

A system is a preset of policies (`hydra_conf/system`), composed with one model, layout, cluster and step. All
train on the same samples, cut at the same length, which `compare` asserts: `data.sample_tokens`, or
`data.microbatch_tokens` where that is null. Whoever cannot share a longer one gets microbatches that hold it.
Ranks beside the LLM that nobody gave are allocated, as for any run. `Figures.sets` says both.

What a system chooses or allocates once for a run may be for other samples than those of the step: what a run
has after its mixture jumped. What is chosen for each step, such as a schedule, is for the step all the same.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace

from dataloader.tokens import SampleMeta, length
from omni.config import Config
from omni.planning.choice import (
    AUTO,
    BESIDE,
    LONGEST,
    MICROBATCH,
    PLACEMENT,
    text_of,
    unchosen,
    with_keys,
)
from omni.planning.cut import cut_of
from omni.planning.layouts import planned_ranks
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.rehearsal.estimate import estimate, sent_by_ranks
from parallel.placements import PlacementPolicy
from parallel.policies import SharingPolicy
from parallel.policy import find
from pipeline.causes import causes_of, work_of
from pipeline.costs import simulate
from pipeline.plan import StepPlan, Taken
from pipeline.verifier import PlanRefusedError


@dataclass(frozen=True)
class MixedTrace:
    """The samples that a run's first step takes, in turn; none where the run's own sources count. Choices of
    the run are made for those `before`, unless there are none.
    """

    trace: Sequence[SampleMeta]
    before: Sequence[SampleMeta] = ()


@dataclass(frozen=True)
class Figures:
    """The first step under a system: simulated, but for the seconds of the CPU.

    `step_s` is that of the slowest domain. `causes` divide it by what takes it, `pipeline.causes`; `idle` and
    `exposed` are what its ranks wait for other ranks, and for communication, on average: all are shares of
    the step. `imbalance` is the largest over the mean planned load by component. `held_bytes` are those of
    the fullest rank, `fits` says whether its device has them; the rank of the slowest domain that sends most
    sends so many bytes inside its node and to others. `of_text` is the share that is kept of the throughput
    that the LLM has by itself, `_of_text`. `planning_s` is what a rank takes to plan the
    step, `preparing_s` what preparing the run takes, choosing included. `sets` are keys beside the system's.
    """

    step_s: float
    tokens_per_s: float
    mfu: float
    over_best: float
    imbalance: dict[str, float]
    idle: float
    exposed: float
    causes: dict[str, float]
    held_bytes: int
    fits: bool
    sent_inside_bytes: int
    sent_across_bytes: int
    of_text: float
    planning_s: float
    preparing_s: float
    layout: str
    schedule: str
    sets: str


@dataclass(frozen=True)
class Cell:
    """A system on a mixture, whose step has `samples`, in words: its figures, or why it is `refused`."""

    mixture: str
    system: str
    figures: Figures | None = None
    refused: str = ""
    samples: str = ""

    def as_json(self) -> dict[str, object]:
        """As plain values, figures labelled as simulated; what is refused has its reason alone."""
        values = asdict(self)
        values["simulated"] = values.pop("figures")
        return {key: value for key, value in values.items() if value not in (None, "")}


def compare(
    configs: Mapping[str, Config], mixtures: Mapping[str, MixedTrace], say: Callable[[str], None]
) -> Iterator[Cell]:
    """Simulate a step of each system on each mixture, by name: of the runs of `configs`, which differ in
    nothing but their system. `say` hears what is under way.
    """
    for mixture, samples_of in mixtures.items():
        same: tuple[object, ...] | None = None
        for system, config in configs.items():
            say(f"{system} on {mixture}")
            try:
                figures, samples, taken = _figures(config, samples_of)
            except (ValueError, PlanRefusedError) as error:
                yield Cell(mixture, system, refused=str(error))
                continue
            own = (taken.source, taken.ids, taken.lengths)
            assert same in (None, own), f"{system} trains on other samples than the systems before it"
            same = own
            yield Cell(mixture, system, figures, samples=samples)


def quickest(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of a mixture in the order of their steps: those that fit a device, those that do not, the
    refused.
    """

    def place(cell: Cell) -> tuple[bool, bool, float]:
        found = cell.figures
        return (found is None, found is not None and not found.fits, found.step_s if found else 0.0)

    return sorted(cells, key=place)


def _figures(config: Config, mixture: MixedTrace) -> tuple[Figures, str, Taken]:
    """The figures of a run's first step, its samples in words, and the samples."""
    ranks = planned_ranks(config.launch)
    sets = comparable(config)
    begin = time.process_time()
    spec = first = prepare_run(with_keys(config, sets), ranks, mixture.before or mixture.trace)
    if mixture.before:
        spec = prepare_run(first.config, ranks, mixture.trace)
    preparing_s, work = time.process_time() - begin, list[int]()

    def plans() -> Iterator[StepPlan]:
        for plan in spec.planner.distinct_domains(1, 0):
            work.extend(work_of(plan.domain, spec.table))
            yield plan

    found = estimate(spec, plans())
    begin = time.process_time()
    spec.planner.next_step(1, 0, found.plan.number)
    planning_s = time.process_time() - begin
    step_ns, most = found.timeline.makespan_ns, spec.cluster.memory_bytes
    single_queue = spec.planner.domain.single_queue
    causes = causes_of(found.plan.domain, spec.table, sum(work) / spec.arrangement.world, single_queue)
    spent = vars(found.spent)
    exposed = sum(ns for name, ns in spent.items() if name not in ("compute_ns", "idle_ns"))
    chosen = first.choice.keys if first.choice else {}
    sent = sent_by_ranks(spec, found.plan).values()
    busiest = max(sent, key=lambda of: of.total)
    figures = Figures(
        step_s=found.step_s,
        tokens_per_s=found.tokens_per_s(),
        mfu=found.mfu(spec),
        over_best=found.over_best,
        imbalance={name: most / mean if mean else 1.0 for name, (most, mean) in found.loads.items()},
        idle=found.spent.idle_ns / step_ns,
        exposed=exposed / step_ns,
        causes={name: ns / step_ns for name, ns in zip(vars(causes), astuple(causes), strict=True)},
        held_bytes=found.fullest.bytes,
        fits=most is None or found.fullest.bytes <= most,
        sent_inside_bytes=busiest.inside,
        sent_across_bytes=busiest.across,
        of_text=_of_text(spec, found.plan.taken, found.step_s),
        planning_s=planning_s,
        preparing_s=preparing_s,
        layout=spec.arrangement.describe(),
        schedule=found.plan.domain.schedule,
        sets=text_of({k: v for k, v in {**sets, **chosen}.items() if v is not None and k != LONGEST}),
    )
    taken = found.plan.taken
    return figures, f"{len(taken):,} samples, {taken.tokens:,} tokens; {cut_of(spec.planner, taken)}", taken


def _of_text(spec: RunSpec, taken: Taken, step_s: float) -> float:
    """The tokens/s of a rank, over those that a rank of the LLM has where all that encoders take and give is
    text: the same samples, as long as they are, under the same keys.
    """
    world, ranks = spec.planner.world, spec.arrangement
    metas = (world.meta_of(taken, number) for number in range(len(taken)))
    texts = [replace(of, items=(), text_tokens=length(of) - of.frame.bos) for of in metas]
    alone = prepare_run(spec.config, ranks.world, texts)
    queue = alone.planner.domain.single_queue
    plans = alone.planner.distinct_domains(1, 0)
    text_ns = max(simulate(plan.domain, alone.table, queue).makespan_ns for plan in plans)
    return text_ns / 1e9 / step_s * ranks.llm.world / ranks.world


def comparable(config: Config) -> dict[str, object]:
    """Keys under which a system can be compared: how long samples may be, microbatches that hold these, and
    no ranks beside the LLM where a placement takes none.
    """
    world, own, data = planned_ranks(config.launch), config.layout.llm, unchosen(config).data
    replica = own.tp * own.cp * own.pp
    longest = data.sample_tokens or data.pass_tokens
    keys: dict[str, object] = {LONGEST: longest}
    sharing = config.llm_sp.policy
    shared = sharing == AUTO or find(SharingPolicy, sharing, "llm_sp.policy").finds_room
    num_cp_ranks = own.cp * (config.layout.domain or own.dp or max(1, world // replica)) if shared else 1
    if longest > num_cp_ranks * data.pass_tokens:
        keys[MICROBATCH] = -(-longest // num_cp_ranks)
    if not find(PlacementPolicy, config.placement.policy, PLACEMENT).beside:
        keys[BESIDE] = None
    return keys
