"""Each layer of the LLM as a specification for megatron-core: its kind of attention, and what follows it."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from omni.llm_config import LLMConfig
from omni.models.attention import PackedCoreAttention
from omni.models.delta import delta_heads
from omni.models.delta_module import GatedDeltaNet
from omni.models.moe import experts_spec
from omni.models.packed_layer import NormedLayer
from omni.models.wide_norm import WideNorm
from parallel.megatron import IdentityOp, ModuleSpec, ProcessGroupCollection, RowParallelLinear


class BiasedRowParallelLinear(RowParallelLinear):
    """megatron's, with a bias whatever the other linears of its model have."""

    def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, bias=True, **kwargs)


def layer_specs(
    plain: ModuleSpec,
    config: LLMConfig,
    layers: Iterable[int],
    groups: ProcessGroupCollection,
) -> list[ModuleSpec]:
    """Return the specs of `layers`, by their numbers in the model, out of that of a `plain` one, on a rank
    that has these `groups`.
    """
    return [_layer(plain, config, layer, groups) for layer in layers]


def _layer(plain: ModuleSpec, config: LLMConfig, layer: int, groups: ProcessGroupCollection) -> ModuleSpec:
    if config.kind(layer) == "delta":
        first = ModuleSpec(module=GatedDeltaNet, params={"heads": delta_heads(config)})
    else:
        first = _attention(plain, config, layer, groups)
    parts: dict[str, Any] = {"self_attention": first}
    if config.norms == "after":
        parts |= dict.fromkeys(("input_layernorm", "pre_mlp_layernorm"), IdentityOp)
    if config.mixture is not None and layer >= config.mixture.dense_layers:
        parts["mlp"] = experts_spec(config.mixture, groups)
    module = plain.module if config.norms == "before" else NormedLayer
    return replace(plain, module=module, submodules=replace(plain.submodules, **parts))


def _attention(
    plain: ModuleSpec, config: LLMConfig, layer: int, groups: ProcessGroupCollection
) -> ModuleSpec:
    params = {"windowed": config.kind(layer) == "window", "rotated": config.rotates(layer)}
    params["sinks"] = config.sinks
    attention = plain.submodules.self_attention
    inner: dict[str, Any] = {}
    if config.output_bias and not config.ffn_bias:  # which would be megatron's for all linears
        inner["linear_proj"] = BiasedRowParallelLinear
    if config.qk_norm and config.qk_norm_over == "all":
        for name, heads in (("q_layernorm", config.heads), ("k_layernorm", config.kv_heads)):
            inner[name] = ModuleSpec(module=WideNorm, params={"heads": heads, "group": groups.tp})
    core = ModuleSpec(module=PackedCoreAttention, params=params)
    return replace(attention, submodules=replace(attention.submodules, core_attention=core, **inner))
