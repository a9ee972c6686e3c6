"""An encoder as the engine sees it: a module attached to the LLM by name."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from omni.models.weight_gradients import Deferral, PendingProducts, put_off_in
from omni.rank.inputs import ChunkInputs
from parallel.slots import own_rows


@dataclass(frozen=True)
class EncoderAnchor:
    """Encodes chunks with `module`, shared by the ranks of `tp`, for `num_points` attach points."""

    module: torch.nn.Module
    tp: dist.ProcessGroup
    num_points: int
    deferral: Deferral = field(default_factory=Deferral)

    def __post_init__(self) -> None:
        put_off_in(self.module, self.deferral)

    def encode(self, inputs: ChunkInputs) -> torch.Tensor:
        """Packed items → this rank's share of their rows [r, D], point after point.

        Raises:
            ValueError: if the module puts out more or fewer rows than its `count` tells.
        """
        rows: torch.Tensor = self.module(inputs.values, inputs.positions, inputs.packed)
        planned = sum(inputs.row_counts)
        if planned == 0:
            rows = rows[:0]  # an empty tail stood in for items: what it put out goes nowhere
        if len(rows) != planned:
            more = f" and {len(inputs.samples) - 3} more" if len(inputs.samples) > 3 else ""
            raise ValueError(
                f"{'; '.join(inputs.samples[:3])}{more}: {type(self.module).__name__} put out {len(rows)} "
                f"rows, and by count() there are {planned} at {self.num_points} attach points: make count() "
                "and forward() agree"
            )
        return own_rows(rows, inputs.row_counts, self.tp)

    def weights_later(self) -> AbstractContextManager[PendingProducts]:
        """Put weight gradients of the linears off that can wait: those that megatron divides over ranks."""
        return self.deferral.weights_later()
