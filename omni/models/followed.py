"""Layers that say when a pass comes to them and when it has left them: weights arrive, gradients leave and
messages go, layer by layer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from omni.models.weight_gradients import Deferral
from pipeline.behind import Listener


class Followed:
    """The parts of a component that a pass is followed through, and who hears of it."""

    def __init__(self) -> None:
        # Hooks of layers hold this alone: whoever held more would keep it alive for good.
        self.listeners = dict[int, Listener]()

    def follow(
        self,
        layers: Mapping[int, Sequence[torch.nn.Module]],
        deferral: Deferral,
        came: Callable[[int, int], object],
    ) -> None:
        """Have `came` called with a part and a layer of it, counted from the part's first, when a forward
        comes to the layer. Who is `following` the part hears of this, too, and when a backward, or the
        gradients of weights that it put off by `deferral`, have left the layers behind it.
        """
        leaves = dict[torch.nn.Parameter, Callable[[], None]]()
        for part, own in layers.items():
            for at, layer in enumerate(own):
                leave = partial(_leave, self.listeners, part, at, len(own))
                come = partial(_come_to, self.listeners, part, at, len(own))
                leaves |= dict.fromkeys(layer.parameters(), leave)
                hook = partial(_come, partial(came, part, at), come, leave)
                layer.register_forward_pre_hook(hook, with_kwargs=True)
        deferral.comes_to = partial(_comes_to, leaves)

    @contextmanager
    def following(self, part: int, listener: Listener) -> Iterator[None]:
        """Have a listener hear of the pass through a part that runs inside the block."""
        self.listeners[part] = listener
        try:
            yield
        finally:
            self.listeners.clear()


def _come(
    came: Callable[[], object],
    come: Callable[[], None],
    leave: Callable[[], None],
    layer: torch.nn.Module,
    args: tuple[torch.Tensor, ...],
    kwargs: dict[str, Any],
) -> None:
    came()
    come()
    hidden = args[0] if args else kwargs["hidden_states"]
    if hidden.requires_grad:
        hidden.register_hook(lambda grad: leave())


def _come_to(listeners: Mapping[int, Listener], part: int, layer: int, layers: int) -> None:
    if part in listeners:
        listeners[part].came(layer, layers)


def _leave(listeners: Mapping[int, Listener], part: int, layer: int, layers: int) -> None:
    if part in listeners:
        listeners[part].left(layer, layers)


def _comes_to(leaves: Mapping[torch.nn.Parameter, Callable[[], None]], weight: torch.nn.Parameter) -> None:
    if weight in leaves:  # else it stands in front of all layers, or behind them
        leaves[weight]()
