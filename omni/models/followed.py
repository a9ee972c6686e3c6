"""Layers that say when a pass comes to them and when it has left them: weights arrive, and gradients leave,
layer by layer behind passes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from omni.models.weight_gradients import Deferral


class Followed:
    """The parts of a component that a pass is followed through, and which of them is closing."""

    def __init__(self) -> None:
        # Hooks of layers hold this set alone: whoever held more would keep it alive for good.
        self.closed = set[int]()

    def follow(
        self,
        layers: Mapping[int, Sequence[torch.nn.Module]],
        deferral: Deferral,
        came: Callable[[int, int], object],
        left: Callable[[int, int], object],
    ) -> None:
        """Have `came` called with a part and a layer of it, counted from the part's first, when a forward
        comes to the layer, and `left` when a backward that is `closing` the part, or the gradients of weights
        that it put off by `deferral`, have left those behind it.
        """
        leaves = dict[torch.nn.Parameter, Callable[[], None]]()
        for part, own in layers.items():
            for at, layer in enumerate(own):
                leave = partial(_leave, self.closed, left, part, at)
                leaves |= dict.fromkeys(layer.parameters(), leave)
                hook = partial(_come, partial(came, part, at), leave)
                layer.register_forward_pre_hook(hook, with_kwargs=True)
        deferral.comes_to = partial(_comes_to, leaves)

    @contextmanager
    def closing(self, part: int) -> Iterator[None]:
        """What runs inside the block makes the last gradients of a part."""
        self.closed.add(part)
        try:
            yield
        finally:
            self.closed.clear()


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


def _leave(closed: set[int], left: Callable[[int, int], object], part: int, layer: int) -> None:
    if part in closed:
        left(part, layer)


def _comes_to(leaves: Mapping[torch.nn.Parameter, Callable[[], None]], weight: torch.nn.Parameter) -> None:
    if weight in leaves:  # else it stands in front of all layers, or behind them
        leaves[weight]()
