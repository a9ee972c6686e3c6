"""An encoder as the engine sees it: a module attached to the LLM by name."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from omni.training.inputs import ChunkInputs
from parallel.slots import own_rows


@dataclass(frozen=True)
class EncoderAnchor:
    """Encodes chunks with `module`, shared by the ranks of `tp`, for `num_points` attach points."""

    module: torch.nn.Module
    tp: dist.ProcessGroup
    num_points: int

    def encode(self, inputs: ChunkInputs) -> torch.Tensor:
        """Packed items → this rank's share of their rows [r, D], point after point."""
        rows: torch.Tensor = self.module(inputs.values, inputs.positions, inputs.packed)
        # What an empty tail put out, after the rows of items, goes nowhere.
        real = sum(inputs.row_counts) // self.num_points
        by_point = rows.reshape(self.num_points, len(rows) // self.num_points, -1)[:, :real]
        return own_rows(by_point.flatten(0, 1), inputs.row_counts, self.tp)
