"""What the engine asks of the models it runs. It knows them by name and attach point, never by class."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from parallel.boundary import Ends

ATTACH_EMBED = "llm.embed"


class Anchor(Protocol):
    """A component attached to the pipeline of the LLM: an encoder with its projector.

    `attach` names the point of the LLM where its rows enter.
    """

    @property
    def attach(self) -> str:
        """Attach point."""
        ...

    def encode(self, inputs: Any) -> torch.Tensor:
        """Encode a chunk's items: this rank's share of the rows [R, D], differentiable in the weights."""
        ...


class Stage(Protocol):
    """This rank's stage of the LLM."""

    def embed(self, inputs: Any) -> torch.Tensor:
        """First stage: the embedding of this rank's tokens of a microbatch, [T, D]."""
        ...

    def forward(self, inputs: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, D] → [T, D], or on the last stage what `inputs` asks for."""
        ...

    def loss(self, inputs: Any, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Last stage: the summed loss to go backward from, and the sums to report, [2 · sources] in fp64."""
        ...


@dataclass(frozen=True)
class StepInputs:
    """The tensors of one step on one rank: for each microbatch, for each of this rank's chunks, and the
    rank's ends of each route.
    """

    microbatches: tuple[Any, ...]
    chunks: Mapping[int, Any]
    ends: tuple[Ends | None, ...]
