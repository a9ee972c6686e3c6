"""An encoder as the engine sees it: a module attached to the LLM by name."""

from dataclasses import dataclass

import torch

from omni.training.inputs import ChunkInputs
from pipeline.anchor import ATTACH_EMBED


@dataclass(frozen=True)
class EncoderAnchor:
    """Encodes chunks with `module`; its rows enter at the LLM's embedding."""

    module: torch.nn.Module
    attach: str = ATTACH_EMBED

    def encode(self, inputs: ChunkInputs) -> torch.Tensor:
        """Packed items → rows [R, D]."""
        rows: torch.Tensor = self.module(inputs.values, inputs.positions, inputs.packed)
        return rows
