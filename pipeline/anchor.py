"""What the engine asks of the models it runs. It knows them by name and attach point, never by class."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from parallel.shipping import Ends
from pipeline.behind import Listener


class PutOff(Protocol):
    """Gradients of weights that a backward pass has put off."""

    def run(self) -> None:
        """Compute them all and add them to what the step has summed so far. It may communicate among the
        ranks that share the layers, which therefore run it together, as they do a pass.
        """
        ...


class Anchor(Protocol):
    """A component attached to the pipeline of the LLM: an encoder with its projectors."""

    def encode(self, inputs: Any) -> torch.Tensor:
        """Encode an encoder batch's items: this rank's share of the rows [R, D], differentiable in the
        weights.
        """
        ...

    def weights_later(self) -> AbstractContextManager[PutOff]:
        """Put off the gradients of weights of the one backward pass inside the block, as far as they can
        wait: the others are computed in the pass, and these may be all.
        """
        ...

    def following(self, listener: Listener) -> AbstractContextManager[None]:
        """A pass, or the gradients of weights that a backward put off, run inside the block: where the
        component knows its layers, the listener hears which these have come to or left.
        """
        ...


class Stage(Protocol):
    """The virtual stages of the LLM on this rank, by their number in the model."""

    def embed(self, inputs: Any) -> torch.Tensor:
        """With the first virtual stage: the embedding of this rank's tokens of a microbatch, [T, D]."""
        ...

    def forward(
        self,
        virtual_stage: int,
        inputs: Any,
        hidden: torch.Tensor,
        entering: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Hidden states [T, D] → [T, D], or with the last virtual stage what `inputs` asks for. `entering`
        holds, by attach point of this one other than the embedding, tokens [R] and the rows [R, D] added to
        theirs.
        """
        ...

    def loss(self, inputs: Any, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """With the last virtual stage: the summed loss to go backward from, and the sums to report in fp64,
        [2 · sources].
        """
        ...

    def weights_later(self) -> AbstractContextManager[PutOff]:
        """Put off the gradients of weights of the backward pass inside the block: see `Anchor`."""
        ...

    def following(self, virtual_stage: int, listener: Listener) -> AbstractContextManager[None]:
        """A pass through a virtual stage runs inside the block: see `Anchor`."""
        ...

    def settle(self) -> None:
        """Wait for what a backward pass, or gradients that it put off, may have left on its way."""
        ...


@dataclass(frozen=True)
class StepInputs:
    """The tensors of one step on one rank: for each microbatch, for each of this rank's encoder batches, and
    the rank's ends of each route. `before_loss` is called with each microbatch, by number, before its loss is
    computed from what it then holds; `arrive` once, before any of them is read: what a GPU runs from then on
    waits for them, and the host does not.
    """

    microbatches: tuple[Any, ...]
    encoder_batches: Mapping[int, Any]
    ends: tuple[Ends | None, ...]
    before_loss: Callable[[int, Any], None] = lambda number, inputs: None
    arrive: Callable[[], None] = lambda: None
