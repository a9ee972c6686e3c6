"""Recording a step: what this rank did in it, and by its domain's first rank what was simulated for it."""

import time

import torch
import torch.distributed as dist

from infra.run_folder import RunFolder
from infra.screen import going_on
from infra.timelines import DomainRecord, RankRecord, Stay, write_domain, write_rank
from omni.planning.run_spec import RunSpec
from omni.rank.build import Rank
from omni.rank.step import waiting_at
from omni.training.figures import StepRun
from parallel.control import Control
from pipeline.costs import simulate
from pipeline.drawing import rows_of, spans_of, team_names

_BARRIERS = 5


def meet(rank: Rank, step: int) -> tuple[Stay, ...]:
    """Pass barriers with all ranks, right before a step that is recorded, and note when.

    A GPU is through with earlier work then, so that its clock begins where the host's does.

    Raises:
        StallError: if a rank does not come in time.
    """
    own = None
    if rank.device.type == "cuda":
        torch.cuda.synchronize(rank.device)
        own = [rank.device.index]  # else torch guesses, and says so
    stays = []
    with waiting_at(rank, f"step {step}: meeting to compare clocks", rank.groups.world):
        for _ in range(_BARRIERS):
            enter = time.perf_counter_ns()
            dist.barrier(rank.groups.world, device_ids=own)
            stays.append((enter, time.perf_counter_ns()))
    return tuple(stays)


def record(
    folder: RunFolder, spec: RunSpec, rank: Rank, done: StepRun, stays: tuple[Stay, ...], control: Control
) -> None:
    """Write what this rank did in a step, and if it is its domain's first what was simulated. All ranks have
    written when it returns, or have said why not.

    Raises:
        StallError: if a rank does not come in time.
    """
    plan, watch = done.prepared.plan, done.result.watch
    spans = spans_of(watch.laps(), plan.domain, rank.domain_rank)
    with going_on(f"rank {rank.rank}: the timeline of step {plan.step}"):
        write_rank(folder, plan.step, rank.rank, RankRecord(stays, watch.made_ns, spans))
        if rank.domain_rank == 0:
            timeline = simulate(plan.domain, done.table, spec.planner.domain.single_queue)
            ranks = spec.arrangement.global_ranks(plan.number)
            simulated = rows_of(timeline, team_names(ranks, plan.domain.team))
            write_domain(folder, plan.step, plan.number, DomainRecord(ranks, tuple(simulated)))
    rank.note(f"step {plan.step}: writing timelines")
    control.barrier("timelines")
