"""The tokens of a microbatch as the layers of the LLM see them: who sees whom, and their rotation."""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial

import torch

from omni.llm_config import LLMConfig
from omni.models.delta import delta_heads
from ops.rotary import Scaling
from parallel.packed import PackedTokens, Sharding, pack_tokens


def pack_llm(
    config: LLMConfig,
    sharding: Sharding,
    positions: torch.Tensor,
    seen: Sequence[int] = (),
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> PackedTokens:
    """Describe the tokens of a pack, which stand at integer `positions` of their sequences:
    [T], or [T, 3] for a model with `rotary.sections`. `seen` is as in `pack_tokens`.
    """
    pack = partial(
        pack_tokens,
        sharding,
        positions,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_size,
        seen=seen,
        causal=True,
        dtype=dtype,
        device=device,
    )
    scaling = scaling_of(config)
    packed = pack(rotary_base=config.rotary_base, scaling=scaling, delta=delta_heads(config))
    if config.window is None:
        return packed
    # A window of ours counts the token itself, one of attention those before it.
    reach, base = config.window - 1, config.rotary.window_base
    if base is None:
        windowed = pack(rotary_base=config.rotary_base, scaling=scaling, window=reach)
        return replace(packed, windowed=replace(windowed, rotary=packed.rotary))
    own = Scaling(share=scaling.share, sections=scaling.sections, interleaved=scaling.interleaved)
    return replace(packed, windowed=pack(rotary_base=base, scaling=own, window=reach))


def scaling_of(config: LLMConfig) -> Scaling:
    """How the frequencies of layers without a window are scaled."""
    keys = {key.name: getattr(config.rotary, key.name) for key in fields(Scaling)}
    return Scaling(**keys | {"sections": tuple(config.rotary.sections)})
