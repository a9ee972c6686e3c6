"""An encoder as the engine sees it: a module attached to the LLM by name."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from omni.training.inputs import ChunkInputs
from parallel.slots import own_rows
from pipeline.anchor import ATTACH_EMBED


@dataclass(frozen=True)
class EncoderAnchor:
    """Encodes chunks with `module`, shared by the ranks of `tp`; its rows enter at the LLM's embedding."""

    module: torch.nn.Module
    tp: dist.ProcessGroup
    attach: str = ATTACH_EMBED

    def encode(self, inputs: ChunkInputs) -> torch.Tensor:
        """Packed items → this rank's share of their rows [r, D]."""
        rows: torch.Tensor = self.module(inputs.values, inputs.positions, inputs.packed)
        # What an empty tail put out, after all the rows of items, goes nowhere.
        return own_rows(rows[: sum(inputs.row_counts)], inputs.row_counts, self.tp)
