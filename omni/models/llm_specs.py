"""Each layer of the LLM as a specification for megatron-core: its kind of attention, and what follows it."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from omni.config import LLMConfig
from omni.models.layers import PackedCoreAttention
from omni.models.moe import experts_spec
from parallel.megatron import ModuleSpec


def layer_specs(
    plain: ModuleSpec, config: LLMConfig, layers: Iterable[int], device: torch.device
) -> list[ModuleSpec]:
    """Return the specs of `layers`, by their numbers in the model, out of that of a `plain` one."""
    return [_layer(plain, config, layer, device) for layer in layers]


def _layer(plain: ModuleSpec, config: LLMConfig, layer: int, device: torch.device) -> ModuleSpec:
    params = {"windowed": config.kind(layer) == "window", "rotated": config.rotates(layer)}
    attention = plain.submodules.self_attention
    core = ModuleSpec(module=PackedCoreAttention, params=params)
    parts = {
        "self_attention": replace(attention, submodules=replace(attention.submodules, core_attention=core))
    }
    if config.mixture is not None and layer >= config.mixture.dense_layers:
        parts["mlp"] = experts_spec(config.mixture, device)
    return replace(plain, submodules=replace(plain.submodules, **parts))
