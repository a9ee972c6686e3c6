"""The metrics of a step, from what was planned and what was measured. Names and units: docs/metrics.md."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dataloader.loader import Loader
from infra.launch import AGENTS_BEFORE
from infra.timelines import Stay
from omni.models.registry import ItemArrays
from omni.planning.loads import imbalance, over_even, trained_flops
from omni.planning.optim_schedule import stage_at, stages_of
from omni.planning.plan_process import Predicted, reduces
from omni.planning.run_spec import RunSpec
from omni.rank.totals import StepSums, StepTotals
from omni.training.ahead import Prepared
from omni.training.choice_watch import OVER
from omni.training.idle import OfAllRanks
from omni.training.progression import Progression
from omni.training.vector import OfPlan
from ops.device import device_type
from parallel.costs import CostTable
from parallel.learning import Sample
from pipeline.costs import measured
from pipeline.engine import StepResult
from pipeline.laps import DATA
from pipeline.ops import COMPUTE
from pipeline.stopwatch import Timing


@dataclass(frozen=True)
class StepRun:
    """A step that has run and not updated yet: what was prepared, by which cost table, what the rank at
    `domain_rank` of its domain made of it, its figures summed over all ranks, what they told of its plan, and
    how many samples lost an item.
    """

    prepared: Prepared
    table: CostTable
    domain_rank: int
    result: StepResult
    sums: StepSums
    of_plan: OfPlan
    lost: int

    @cached_property
    def totals(self) -> StepTotals:
        """What all ranks learnt. The host waits for it: ask when the device has more to do."""
        return self.sums.read()

    @cached_property
    def passes(self) -> tuple[Sample, ...]:
        """What each pass of this rank took. A GPU counts collectives inside layers among it."""
        domain, talks = self.prepared.plan.domain, device_type() == "cuda"
        timings = ((timing.op, timing.busy_ns) for timing in self.result.timings)
        return tuple(measured(domain, self.table, self.domain_rank, timings, talks=talks))

    @cached_property
    def spans(self) -> tuple[Sample, ...]:
        """The same by the clock, so that on a CPU it counts when another process has the core. What several
        ranks run together counts as in `passes`: they wait in it for each other.
        """
        domain, talks = self.prepared.plan.domain, device_type() == "cuda"

        def took(timing: Timing) -> int:
            alone = (
                timing.op.kind in COMPUTE
                and len(domain.collective_group_of(timing.op, self.domain_rank)) == 1
            )
            return round((timing.end_s - timing.start_s) * 1e9) if alone else timing.busy_ns

        timings = ((timing.op, took(timing)) for timing in self.result.timings)
        return tuple(measured(domain, self.table, self.domain_rank, timings, talks=talks))


class Unsettled(NamedTuple):
    """A step of which the host has yet to learn: what ran, when it began by `time.perf_counter`, its `stays`
    at barriers where it is recorded, and who loaded it.
    """

    done: StepRun
    start_s: float
    stays: tuple[Stay, ...]
    loader: Loader[ItemArrays]


def restarts() -> int:
    """Return how often the ranks of this launch were restarted, by their agent or with a new one."""
    return sum(int(os.environ.get(name, "0")) for name in ("TORCHELASTIC_RESTART_COUNT", AGENTS_BEFORE))


def pass_errors(table: CostTable, passes: Iterable[Sample]) -> dict[str, float]:
    """Time that a table gives passes by what they took, minus 1, by part."""
    given, taken = Counter[str](), Counter[str]()
    for part, direction, tokens, squares, ns in passes:
        given[part] += table.parts[part].compute_ns(tokens, squares, direction)
        taken[part] += ns
    return {part: given[part] / ns - 1 for part, ns in taken.items() if ns > 0}


def predicted_error(predicted: Predicted, result: StepResult) -> float | None:
    """Simulated over measured time of this domain's ops, minus 1; None if it had none.

    Reduction is not part of either.
    """
    ran = [timing for timing in result.timings if not reduces(timing.op)]
    return predicted.ops_s / (ran[-1].end_s - ran[0].start_s) - 1 if ran else None


def metrics_of(
    spec: RunSpec,
    run: StepRun,
    norms: Mapping[str, float],
    rates: Mapping[str, float],
    progression: Progression,
    step_s: float,
) -> dict[str, float]:
    """The metrics of one training step that are known when it is done."""
    prepared, totals, plan, planned = run.prepared, run.totals, run.prepared.plan, run.of_plan.planned
    tokens, count = plan.taken.tokens, len(plan.components)
    of_plans = dict(zip(plan.components, planned, strict=False))
    flops = trained_flops(spec, plan, of_plans, round(totals.num_targets))
    peak = spec.cluster.flops * spec.arrangement.world * step_s
    capacity = planned[-1]
    metrics = {
        "progress/step": plan.step,
        "progress/tokens": progression.tokens,
        "loss/train": totals.loss,
        "optim/grad_norm": sum(n * n for n in norms.values()) ** 0.5,
        "perf/step_s": step_s,
        "perf/tokens_per_s": tokens / step_s,
        "data/pack_fill": tokens / capacity if capacity else 0.0,
        "data/skipped/too_long": progression.dropped,
        "data/skipped/bad_item": progression.bad_samples,
        "data/truncated": progression.truncated,
        "optim/skipped_steps": progression.skipped_steps,
        "health/restarts": restarts(),
        "plan/ms": prepared.plan_s * 1e3,
        "plan/cpu_ms": prepared.plan_cpu_s * 1e3,
        "perf/flops": sum(flops.values()),
    }
    metrics |= {f"perf/flops/{name}": value for name, value in flops.items()}
    for source, loss, targets in zip(spec.sources, totals.losses, totals.targets, strict=True):
        if targets:
            metrics[f"loss/train/{source}"] = loss / targets
    if spec.config.stages:
        stages = stages_of(spec.config.optim, spec.config.stages, spec.config.train.steps)
        metrics["progress/stage"] = 1 + stages.index(stage_at(stages, plan.step))
    metrics |= {f"optim/grad_norm/{name}": norm for name, norm in norms.items()}
    metrics |= {f"optim/lr/{name}": rate for name, rate in rates.items()}
    uneven = imbalance(spec, plan, run.of_plan.largest, planned[count:-1])
    metrics |= {f"balance/{ratio}": value for ratio, value in uneven.items()}
    if totals.expert_load and (moe := spec.config.model.llm.mixture) is not None:
        layers = spec.config.model.llm.layers - moe.dense_layers
        metrics["balance/max_over_mean/experts"] = totals.expert_load / layers
    on_gpu = device_type() == "cuda"
    if not (on_gpu and spec.config.cluster.device == "cpu"):  # figures of a CPU core say nothing about a GPU
        metrics["perf/mfu"] = sum(flops.values()) / peak
        metrics |= {f"perf/mfu/{name}": value / peak for name, value in flops.items()}
    metrics |= _predictions(run)
    idle = metrics.get("plan/idle_frac")
    if spec.config.choice.keys and idle is not None:
        metrics[OVER] = over_even(spec, run.of_plan.largest, planned[count:-1], idle)
    return metrics


def metrics_of_all(ranks: OfAllRanks, world: int) -> dict[str, float]:
    """The metrics of a step that all ranks together tell once it is done: what they idled for, and what they
    have held.
    """
    idle = ranks.idle
    return {
        "perf/idle_frac": sum(idle.values()),
        "data/wait_frac": idle[DATA],
        **{f"perf/idle_frac/{cause}": share for cause, share in idle.items() if share},
        "mem/peak_gb": ranks.most_bytes / 1e9,
        "mem/peak_gb/mean": ranks.sum_bytes / world / 1e9,
        "mem/peak_gb/least": ranks.least_bytes / 1e9,
        "mem/fullest_rank": ranks.fullest,
    }


def _predictions(run: StepRun) -> dict[str, float]:
    """What the first domain's step was simulated to be like when it was planned, and how far that is from
    what this rank measured.
    """
    metrics: dict[str, float] = {"plan/cost_table": run.table.number}
    predicted = run.prepared.predicted
    if predicted is not None:
        metrics["plan/idle_frac"] = sum(predicted.idle.values())
        metrics |= {f"plan/idle_frac/{cause}": share for cause, share in predicted.idle.items() if share}
        error = predicted_error(predicted, run.result)
        if error is not None:
            metrics["plan/pred_error"] = error
    errors = pass_errors(run.table, run.passes)
    return metrics | {f"plan/pred_error/{part}": value for part, value in errors.items()}
