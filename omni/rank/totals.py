"""What all ranks learn of a step, in one reduction.

The sums stay on the device, where the update takes what it divides and clips by. A copy is on its way to the
host at once, which reads it when the device has more to do: see `Trainer.settle`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist

from ops.device import to_host


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


@dataclass(frozen=True)
class StepSums:
    """The figures of a step, summed over all ranks, on the device: fp64, those of so many `sources` and
    `components`, in the order of `StepTotals`. `host` waits for their copy on the host.
    """

    summed: torch.Tensor
    sources: int
    components: int
    host: Callable[[], torch.Tensor]

    @property
    def num_targets(self) -> torch.Tensor:
        """Target tokens of the step, []."""
        return self.summed[self.sources : 2 * self.sources].sum()

    @property
    def squares(self) -> torch.Tensor:
        """Squared norms of the summed gradients, [components]."""
        return self.summed[2 * self.sources :][: self.components]

    def read(self) -> StepTotals:
        """Learn them: the host waits until they are summed, and not for what the device does behind that."""
        values = iter(self.host().tolist())
        losses, targets, squares = (
            tuple(islice(values, count)) for count in (self.sources, self.sources, self.components)
        )
        expert_load, differing, stop = values
        return StepTotals(losses, targets, squares, expert_load, stop > 0, differing > 0)


def sum_totals(
    sums: torch.Tensor | None,
    num_sources: int,
    squares: torch.Tensor,
    expert_load: torch.Tensor,
    stop: bool,
    differing: torch.Tensor | None,
    group: dist.ProcessGroup,
) -> StepSums:
    """Sum one step's figures over all ranks. `sums` is [2 · sources], None on ranks that compute no loss;
    `differing` [] counts copies of weights that differ, None if they were not compared.
    """
    if sums is None:
        sums = torch.zeros(2 * num_sources, dtype=torch.float64, device=squares.device)
    differing_and_stop = torch.zeros(2, dtype=torch.float64, device=squares.device)
    if differing is not None:
        differing_and_stop[0] = differing
    if stop:
        differing_and_stop[1] = 1.0
    summed = torch.cat((sums, squares, expert_load.double().reshape(1), differing_and_stop))
    dist.all_reduce(summed, group=group)
    return StepSums(summed, num_sources, len(squares), to_host(summed))
