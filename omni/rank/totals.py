"""What all ranks learn of a step, in one reduction."""

import math
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist

from ops.device import to_device


@dataclass(frozen=True)
class StepTotals:
    """What all ranks learnt of a step: losses and targets by source, squared norm of the summed gradients by
    component, the load of experts in the step before (tokens of the busiest over the mean, summed over
    layers), whether any rank was asked to stop, and whether weights that are copies were found to differ.
    """

    losses: tuple[float, ...]
    targets: tuple[float, ...]
    squares: tuple[float, ...]
    expert_load: float
    stop: bool
    corrupted: bool = False

    @property
    def num_targets(self) -> float:
        """Target tokens of the step: what gradients are divided by."""
        return sum(self.targets)

    @property
    def loss(self) -> float:
        """Mean loss of a target token, nan if there was none."""
        return sum(self.losses) / self.num_targets if self.num_targets else math.nan


def reduce_totals(
    sums: torch.Tensor | None,
    num_sources: int,
    squares: torch.Tensor,
    expert_load: torch.Tensor,
    stop: bool,
    differing: torch.Tensor | None,
    group: dist.ProcessGroup,
) -> StepTotals:
    """Sum one step's figures over all ranks. `sums` is [2 · sources], None on ranks that compute no loss;
    `differing` [] counts copies of weights that differ, None if they were not compared.
    """
    if sums is None:
        sums = torch.zeros(2 * num_sources, dtype=torch.float64, device=squares.device)
    if differing is None:
        differing = torch.zeros_like(expert_load)
    slots = {
        "losses": sums[:num_sources],
        "targets": sums[num_sources:],
        "squares": squares,
        "expert_load": expert_load.double().reshape(1),
        "differing": differing.double().reshape(1),
    }
    asked = torch.tensor([stop], dtype=torch.float64)
    slots["stop"] = to_device(asked, squares.device)
    packed = torch.cat(list(slots.values()))
    dist.all_reduce(packed, group=group)
    values = iter(packed.tolist())
    found = {name: tuple(islice(values, len(slot))) for name, slot in slots.items()}
    return StepTotals(
        losses=found["losses"],
        targets=found["targets"],
        squares=found["squares"],
        expert_load=found["expert_load"][0],
        stop=found["stop"][0] > 0,
        corrupted=found["differing"][0] > 0,
    )
