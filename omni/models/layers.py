"""Transformer layers shared by the LLM and the encoders, as megatron-core specifies and configures them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from omni.models.attention import PackedCoreAttention, PackedSelfAttention
from omni.models.layer_sizes import RECOMPUTE, LayerSizes
from omni.models.packed_layer import PackedLayer
from ops.gates import FUNCTIONS
from ops.norm import Norm
from parallel.megatron import (
    AttnMaskType,
    ModuleSpec,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
)


def layer_submodules(
    num_layers: int,
    normalization: str,
    causal: bool,
    qk_norm: bool = False,
    specs: Callable[[ModuleSpec], list[ModuleSpec]] | None = None,
) -> TransformerBlockSubmodules:
    """Specify `num_layers` layers with packed attention and our norm, for any device.

    With `qk_norm` each head of queries and keys is normed. `specs` makes the layers out of the spec of one,
    where they are not all alike.
    """
    spec = get_gpt_layer_local_spec(normalization=normalization)
    spec.module = PackedLayer
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    attention = layer.self_attention
    attention.module = PackedSelfAttention
    attention.submodules.core_attention = PackedCoreAttention
    if qk_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = Norm
    # The default mask of the spec is causal, for encoders too.
    mask = AttnMaskType.causal if causal else AttnMaskType.no_mask
    attention.params = {**(attention.params or {}), "attn_mask_type": mask}
    layers = [spec] * num_layers if specs is None else specs(spec)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)


def transformer_config(
    sizes: LayerSizes,
    dtype: torch.dtype,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    stages: int = 1,
    more: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """Translate our sizes into megatron's configuration, with the settings that replace its globals.

    Layers are divided over `tp` ranks. With `sequence_parallel` these divide the tokens between attention and
    feed-forward as well; without it, every one of them sees all tokens. `more` are settings beyond ours.
    """
    assert sizes.recompute in RECOMPUTE, sizes.recompute
    full = sizes.recompute == "full"
    return TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.kv_heads,
        kv_channels=sizes.head_size or None,
        ffn_hidden_size=sizes.ffn,
        normalization=sizes.norm,
        layernorm_epsilon=sizes.norm_eps,
        gated_linear_unit=sizes.gated,
        activation_func=FUNCTIONS[sizes.activation or ("silu" if sizes.gated else "gelu")],
        activation_func_clamp_value=sizes.activation_clamp,
        glu_linear_offset=sizes.gate_offset,
        layernorm_zero_centered_gamma=sizes.norm_zero_centered,
        softmax_scale=sizes.attention_scale,
        attention_output_gate=sizes.output_gate,
        add_bias_linear=sizes.bias,
        add_qkv_bias=sizes.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel and tp > 1,
        pipeline_model_parallel_size=stages,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        recompute_granularity=None if sizes.recompute == "none" else sizes.recompute,
        recompute_method="uniform" if full else None,
        recompute_num_layers=1 if full else None,
        **_settings(dtype),
        **(more or {}),
    )


def bare_config(layers: int, hidden: int, heads: int, dtype: torch.dtype) -> TransformerConfig:
    """Return the `config` of a module whose layers are not megatron's: it says how gradients are reduced, and
    how deep the module is.
    """
    return TransformerConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, **_settings(dtype)
    )


def _settings(dtype: torch.dtype) -> dict[str, Any]:
    """Settings of every module."""
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Losses are sums, and gradients are divided once, at finalisation.
        "calculate_per_token_loss": True,
        "use_cpu_initialization": True,
        "perform_initialization": False,
    }
