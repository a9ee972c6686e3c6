"""Layers that are computed anew, followed: a listener hears the input of each, and when a pass keeps it."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from parallel.megatron import TransformerBlock


def follow_inputs(
    block: TransformerBlock,
    comes: Callable[[int, torch.Tensor], None],
    passing: Callable[[], AbstractContextManager[None]],
) -> None:
    """Have `comes(number, hidden)` called ahead of each layer of a block, counted from its first, with the
    input of the layer; and have each forward that keeps inputs of layers run inside `passing()`. To be called
    before other hooks change what layers take in.
    """
    for number, layer in enumerate(block.layers):
        layer.register_forward_pre_hook(partial(_come, comes, number), with_kwargs=True)
    # By a weak reference: a block that held itself would outlive the run.
    block._checkpointed_forward = partial(_forward, passing, weakref.ref(block))


def heed_gradients(block: TransformerBlock) -> None:
    """Have nothing kept of what attention puts out in layers to which no gradient goes back."""
    for layer in block.layers:
        layer.register_forward_pre_hook(_heed_gradient, with_kwargs=True)


def _heed_gradient(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    kept = kwargs["packed_seq_params"].kept
    if kept is not None:
        kept.goes_back = kwargs["hidden_states"].requires_grad


def _come(
    comes: Callable[[int, torch.Tensor], None], number: int, layer: Any, args: Any, kwargs: dict[str, Any]
) -> None:
    comes(number, kwargs["hidden_states"])


def _forward(
    passing: Callable[[], AbstractContextManager[None]],
    block: "weakref.ref[TransformerBlock]",
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    own = block()
    assert own is not None
    with passing():
        output: torch.Tensor = TransformerBlock._checkpointed_forward(own, *args, **kwargs)
    return output
