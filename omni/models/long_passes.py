"""Passes whose layers are all computed anew, among passes whose layers keep more.

A block decides by its configuration what passes keep. Here each pass says it, in the descriptor of its tokens
(`PackedTokens.anew`). Megatron's block reads its configuration when a forward begins. Attention that is
computed anew by itself reads its own switch whenever it runs: also when its layer is computed anew, long
after the forward, between passes of the other kind. There it would be computed a third time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from parallel.megatron import TransformerBlock

_ALL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def heed_passes(block: TransformerBlock) -> None:
    """Have attention that is computed anew be so by itself only where its layer is not."""
    for layer in block.layers:
        if getattr(layer.self_attention, "checkpoint_core_attention", False):
            layer.register_forward_pre_hook(_heed, with_kwargs=True)


def _heed(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    layer.self_attention.checkpoint_core_attention = not kwargs["packed_seq_params"].anew


@contextmanager
def keeping_inputs(block: TransformerBlock, anew: bool) -> Iterator[None]:
    """A forward of a block inside keeps inputs of layers alone, if these are all computed `anew`."""
    before = {name: getattr(block.config, name) for name in _ALL}
    try:
        for name in _ALL if anew else ():
            setattr(block.config, name, _ALL[name])
        yield
    finally:
        for name, value in before.items():
            setattr(block.config, name, value)
