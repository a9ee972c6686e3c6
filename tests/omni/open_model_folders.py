"""Tiny random models of transformers: the referee of published weights."""

import copy
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers, the referee, is not installed")

PLAIN = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    # Large and of the model alone, so that a forgotten one shows.
    "rms_norm_eps": 0.02,
    "rope_parameters": {"rope_type": "default", "rope_theta": 30.0},
    "initializer_range": 0.1,
}
MOE = {"num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 48}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}
YARN = {"rope_type": "yarn", "rope_theta": 900.0, "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES = {
    "llama 3.1": {"rope_parameters": LLAMA3},
    "qwen2 yarn": {"rope_parameters": YARN},
    "qwen2 windows": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2},
    "gemma3_text": {
        **{"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 20, "sliding_window_pattern": 3},
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
        },
    },
    "llama biases": {"attention_bias": True},
    "llama all biases": {"attention_bias": True, "mlp_bias": True},
    "gpt_oss": {
        **{"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12},
        **{"swiglu_limit": 1.5, "rope_parameters": YARN | {"truncate": False}},
    },
    "olmo3": {
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 900.0},
        },
    },
    "smollm3": {"no_rope_layer_interval": 2, "pad_token_id": 0},
    "qwen2_moe": {
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
        **{"shared_expert_intermediate_size": 64},
    },
    "qwen3_moe plain": {**MOE, "head_dim": 16, "norm_topk_prob": False},
    "mistral windows": {"sliding_window": 24},
    "llama": {"tie_word_embeddings": False},
    "llama tied": {"tie_word_embeddings": True},
    "llama odd": {"vocab_size": 273},
    "qwen2 odd": {"vocab_size": 273, "tie_word_embeddings": True},
    "mistral": {"head_dim": 16, "sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**MOE, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0]},
}
DELTA = {
    **{"layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 16},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 3},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 12},
    "rope_parameters": {"rope_type": "default", "rope_theta": 30.0, "partial_rotary_factor": 0.25},
}
SPARSE = {
    **{"num_experts_per_tok": 2, "num_experts": 4},
    **{"moe_intermediate_size": 48, "shared_expert_intermediate_size": 32},
}
# Models with gated delta nets.
DELTAS = {
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **SPARSE},
    "qwen3_5_moe_text fused": {**DELTA, **SPARSE},
    "qwen3_next": {**DELTA, **SPARSE},
}


def make(family: str, folder: Path, dtype: torch.dtype = torch.float32, **more: object) -> torch.nn.Module:
    """Draw a model, save it in a few files with a tokenizer's beside them, and return it in fp32; of a family
    that is "fused" all experts of a layer as one tensor, as they are in memory.
    """
    config = transformers.AutoConfig.for_model(
        family.split()[0], **{**PLAIN, **(FAMILIES | DELTAS)[family], **more}
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.sub_(4)  # decays as models have them: stronger ones leave no gradient but rounding
    model.is_fused = "fused" in family or family == "gpt_oss"
    model.to(dtype).save_pretrained(folder, max_shard_size="100KB", save_original_format=not model.is_fused)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_own.py").write_text("raise SystemExit('code of a folder was run')")
    return model.float().eval()


class _Double(ModuleType):
    """torch for a module of transformers, where it is double that values are cast to."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_double(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """A copy of a model that computes in fp64 from end to end, its casts to fp32 among it, so that what a
    comparison finds is our rounding and none of its own.
    """
    exact = copy.deepcopy(model).double()
    exact.config._experts_implementation = "eager"  # torch's grouped products know no doubles
    module = sys.modules[type(model).__module__]
    with (
        patch.object(module, "torch", _Double("torch")),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield exact


def changed(folder: Path, **values: object) -> None:
    """Change keys of a config.json; a value of `...` takes the key away."""
    config = json.loads((folder / "config.json").read_text()) | values
    kept = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
