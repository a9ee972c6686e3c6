"""Layers that say when a pass comes to them and when it has left them: weights arrive, and gradients leave,
layer by layer behind passes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from omni.models.weight_gradients import Deferral
from pipeline.behind import Behind


class Followed:
    """The parts of a component that a pass is followed through, and what begins behind it."""

    def __init__(self) -> None:
        # Hooks of layers hold this alone: whoever held more would keep it alive for good.
        self.behind = dict[int, Behind]()

    def follow(
        self,
        layers: Mapping[int, Sequence[torch.nn.Module]],
        deferral: Deferral,
        came: Callable[[int, int], object],
    ) -> None:
        """Have `came` called with a part and a layer of it, counted from the part's first, when a forward
        comes to the layer. What is `closing` the part hears when a backward, or the gradients of weights that
        it put off by `deferral`, have left the layers behind it.
        """
        leaves = dict[torch.nn.Parameter, Callable[[], None]]()
        for part, own in layers.items():
            for at, layer in enumerate(own):
                leave = partial(_leave, self.behind, part, at, len(own))
                leaves |= dict.fromkeys(layer.parameters(), leave)
                hook = partial(_come, partial(came, part, at), leave)
                layer.register_forward_pre_hook(hook, with_kwargs=True)
        deferral.comes_to = partial(_comes_to, leaves)

    @contextmanager
    def closing(self, part: int, behind: Behind) -> Iterator[None]:
        """What runs inside the block goes back through a part; reductions begin `behind` it."""
        self.behind[part] = behind
        try:
            yield
        finally:
            self.behind.clear()


def _come(
    came: Callable[[], object],
    leave: Callable[[], None],
    layer: torch.nn.Module,
    args: tuple[torch.Tensor, ...],
    kwargs: dict[str, Any],
) -> None:
    came()
    hidden = args[0] if args else kwargs["hidden_states"]
    if hidden.requires_grad:
        hidden.register_hook(lambda grad: leave())


def _leave(behind: Mapping[int, Behind], part: int, layer: int, layers: int) -> None:
    if part in behind:
        behind[part].left(layer, layers)


def _comes_to(leaves: Mapping[torch.nn.Parameter, Callable[[], None]], weight: torch.nn.Parameter) -> None:
    if weight in leaves:  # else it stands in front of all layers, or behind them
        leaves[weight]()
