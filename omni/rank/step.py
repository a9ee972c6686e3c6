"""What one rank does in a step: run the ops of a plan, sum its figures over all ranks, update.

Whoever steps goes through here, in this order, and adds what is its own: training agrees on the plan before
and reports after, parity collects gradients before the update, evaluation runs ops only. Where the rank
stands is noted before each wait, and a wait that fails names its peers.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from omni.models.llm import NAME as LLM
from omni.rank.anchors import evaluating
from omni.rank.build import Rank
from omni.rank.totals import StepSums, sum_totals
from parallel.waiting import waiting
from pipeline.anchor import StepInputs
from pipeline.engine import StepResult
from pipeline.plan import StepPlan
from pipeline.stopwatch import Stopwatch


@contextlib.contextmanager
def waiting_at(rank: Rank, where: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Note that the rank stands at `where`; a collective of `group` that fails inside the block says so."""
    rank.note(where)
    with waiting(where, group):
        yield


def execute(rank: Rank, plan: StepPlan, inputs: StepInputs, watch: Stopwatch | None = None) -> StepResult:
    """Run this rank's ops of a plan that is verified and agreed on, timed by `watch` if it is given.

    If the plan trains, gradients of the step before are cleared first, and afterwards every rank has all
    weights, and its shards of the summed gradients. If it does not, encoders are evaluated.

    Raises:
        StallError: if a peer does not answer in time.
    """
    if not plan.train:
        with evaluating(rank.anchors):
            return rank.engine.run(plan, inputs, watch)
    rank.optimizer.begin(plan.step)
    try:
        result = rank.engine.run(plan, inputs, watch)
    except Exception as error:
        error.add_note(f"rank {rank.rank} was in step {plan.step}")
        raise
    with waiting_at(rank, f"step {plan.step}: weights that no pass took", rank.groups.world):
        rank.optimizer.arrive()
    with waiting_at(rank, f"step {plan.step}: gradients of tied embeddings", rank.groups.world):
        rank.optimizer.tie()
    return result


def sum_step(
    rank: Rank,
    plan: StepPlan,
    result: StepResult,
    stop: bool = False,
    differing: torch.Tensor | None = None,
) -> StepSums:
    """Sum what a training step came to over all ranks, on the device.

    `stop` is this rank's wish, and `differing` what it found where copies of weights were compared.

    Raises:
        StallError: if a peer does not answer in time.
    """
    squares = rank.optimizer.squares()
    expert_load = torch.zeros((), device=rank.device) if rank.stage is None else rank.stage.expert_load
    with waiting_at(rank, f"step {plan.step}: totals", rank.groups.world):
        return sum_totals(
            result.sums,
            len(rank.assembler.sources),
            squares,
            expert_load,
            stop,
            differing,
            rank.groups.world,
        )


def update(rank: Rank, plan: StepPlan, sums: StepSums) -> None:
    """Update weights and the bias of experts, and start to gather the weights: whoever reads them before the
    next step lets them arrive. A bad norm changes nothing. The host waits for nothing of the device.

    Raises:
        StallError: if a peer does not answer in time.
    """
    with waiting_at(rank, f"step {plan.step}: update", rank.groups.world):
        learns = rank.optimizer.update(plan.step, sums)
    if rank.stage is not None:
        peers = rank.groups.components[LLM].tp_dp_cp
        with waiting_at(rank, f"step {plan.step}: the load of experts", peers):
            rank.stage.balance_experts(learns * (LLM not in rank.optimizer.frozen))
