"""The families whose layers the engine trains: what their files say."""

from collections.abc import Mapping, Sequence
from typing import Any

from omni.open_models.family import Family, Said
from omni.open_models.tensor_names import gpt_oss_rules, mixtral_rules, plain_rules

# What changes no loss and no gradient: ids and lengths that others decide, and how weights were drawn.
SKIPPED = (
    *("architectures", "model_type", "transformers_version", "_name_or_path", "dtype", "torch_dtype"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "initializer_range"),
    *("use_cache", "pretraining_tp", "router_aux_loss_coef", "_attn_implementation_autoset"),
)


def _common(said: Said, own_heads: bool = False, tied: bool = False) -> dict[str, Any]:
    """Keys that all these families have; with `own_heads` the size of heads must be said. `tied` is what it
    means to say nothing of that.
    """
    said.skip(*SKIPPED)
    said.must("attention_dropout", 0)
    hidden, heads = said.take("hidden_size"), said.take("num_attention_heads")
    head_dim = said.take("head_dim", **({} if own_heads else {"default": None}))
    return {
        "layers": said.take("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": said.take("num_key_value_heads"),
        "ffn": said.take("intermediate_size"),
        "head_dim": None if head_dim == hidden // heads else head_dim,
        "norm_eps": said.take("rms_norm_eps"),
        "tied": said.take("tie_word_embeddings", tied),
        "vocab": said.take("vocab_size"),
    }


# What the scaled kinds of rotation say beside their base, by our names.
_SCALED = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "trained_tokens": "original_max_position_embeddings",
        "slow": "low_freq_factor",
        "fast": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "trained_tokens": "original_max_position_embeddings",
        "slow": "beta_slow",
        "fast": "beta_fast",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
    },
}
_MUST = ("factor", "trained_tokens")


def rotation(said: Said, told: Mapping[str, Any] | None = None, whole: bool = True) -> dict[str, Any]:
    """Keys of rotation, as either generation of the format says it; other kinds are refused. `told` is what
    it says of layers without windows, where it tells them apart; layers that rotate `whole` heads refuse a
    part of them.
    """
    if told is None:
        told = {**said.take("rope_parameters", {}), **said.take("rope_scaling", {})}
    rest = {key: value for key, value in told.items() if value is not None}
    kinds = [rest.pop(key) for key in ("rope_type", "type") if key in rest]
    kind = kinds[0] if kinds else "default"
    if kind not in _SCALED:
        raise said.refused("rope_parameters", kind, f"frequencies are scaled by {', '.join(_SCALED)}")
    base = rest.pop("rope_theta", None)
    keys = {"rotary_base": float(said.take("rope_theta") if base is None else base)}
    said.skip("rope_theta")
    share = rest.pop("partial_rotary_factor", 1.0)
    if share != 1.0 and not whole:
        keys["rotary.share"] = share
    elif share != 1.0:
        raise said.refused("rope_parameters", dict(told), "layers of this family rotate whole heads")
    for ours, theirs in _SCALED[kind].items():
        value = rest.pop(theirs, None)
        if value is None and ours in _MUST:
            raise said.refused("rope_parameters", dict(told), f"{kind} needs {theirs}")
        if value is not None:
            keys[f"rotary.{ours}"] = value
    if kind == "llama3" and "rotary.fast" not in keys:
        raise said.refused("rope_parameters", dict(told), "llama3 needs high_freq_factor")
    if rest:
        raise said.refused("rope_parameters", rest, f"rotation of kind {kind} does not have these")
    return keys if kind == "default" else keys | {"rotary.scaling": kind}


_KINDS = {"full_attention": "full", "sliding_attention": "window"}


def _attention(said: Said, window: int | None, kinds: Sequence[str] | None = None) -> dict[str, Any]:
    """Keys of the kinds of attention: of each layer as `layer_types` lists them, or as `kinds` where that is
    not there; of `window` tokens, None for no window. All of one kind is a pattern of one.
    """
    listed = said.take("layer_types", kinds or [])
    if unknown := set(listed) - _KINDS.keys():
        raise said.refused("layer_types", sorted(unknown), f"layers are of {', '.join(_KINDS)}")
    ours = [_KINDS[kind] for kind in listed] or ["window" if window else "full"]
    if "window" not in ours:
        return {}
    if window is None:
        raise said.refused("sliding_window", None, "layers of sliding_attention need one")
    return {"window": window, "attention": _period(ours)}


def _period(of_layers: list[Any]) -> list[Any]:
    """The shortest pattern that, repeated, gives these."""
    lengths = range(1, len(of_layers) + 1)
    return of_layers[
        : next(n for n in lengths if all(x == of_layers[at % n] for at, x in enumerate(of_layers)))
    ]


def _switched_windows(said: Said) -> dict[str, Any]:
    """Windows of Qwen: only where `use_sliding_window` says so, from layer `max_window_layers` on."""
    window, first = said.take("sliding_window", None), said.take("max_window_layers", 28)
    if not said.take("use_sliding_window", False):
        return _attention(said, None)
    count = said.values.get("num_hidden_layers") or 0
    kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(count)]
    return _attention(said, window, kinds)


def _silu(said: Said, own_heads: bool = False) -> dict[str, Any]:
    """Keys of families with one rotation and a SwiGLU."""
    said.must("hidden_act", "silu")
    return rotation(said) | _common(said, own_heads)


def _llama(said: Said) -> dict[str, Any]:
    attention, feed_forward = said.take("attention_bias", False), said.take("mlp_bias", False)
    if feed_forward and not attention:
        raise said.refused("mlp_bias", True, "with attention_bias=False; both or none are trained")
    biases = {"qkv_bias": attention, "output_bias": attention, "ffn_bias": feed_forward}
    return _silu(said) | biases


def _mistral(said: Said) -> dict[str, Any]:
    # A file that does not say it means 4096.
    window = said.take("sliding_window", None) if "sliding_window" in said.values else 4096
    return _silu(said) | _attention(said, window)


def _qwen2(said: Said) -> dict[str, Any]:
    return _switched_windows(said) | _silu(said) | {"qkv_bias": True}


def _qwen3(said: Said) -> dict[str, Any]:
    biases = dict.fromkeys(("qkv_bias", "output_bias"), said.take("attention_bias", False))
    return _switched_windows(said) | _silu(said, own_heads=True) | biases | {"qk_norm": True}


def _mixtral(said: Said) -> dict[str, Any]:
    said.must("router_jitter_noise", 0)
    keys = _attention(said, said.take("sliding_window", None)) | _silu(said)
    return keys | _experts(said, said.take("num_local_experts"), keys["ffn"], normed=True)


def _qwen3_moe(said: Said) -> dict[str, Any]:
    keys = _qwen3(said)
    return keys | _sparse(said, keys, said.take("num_experts", None) or said.take("num_local_experts"))


def _sparse(said: Said, keys: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Keys of Qwen's mixtures."""
    said.must("decoder_sparse_step", 1)
    dense = said.take("mlp_only_layers", [])
    if dense != list(range(len(dense))):
        raise said.refused("mlp_only_layers", dense, "layers without experts come first in this engine")
    normed, width = said.take("norm_topk_prob", False), said.take("moe_intermediate_size")
    return _experts(said, number, width, normed) | {"moe.dense_layers": len(dense)}


_GEMMA_PERIOD = 6


def _gemma3(said: Said) -> dict[str, Any]:
    said.must("attention_bias", False)
    said.must("hidden_activation", "gelu_pytorch_tanh")
    said.must("use_bidirectional_attention", False)
    said.must("attn_logit_softcapping", None)
    said.must("final_logit_softcapping", None)
    said.skip("cache_implementation")
    keys = _common(said, own_heads=True, tied=True)
    earlier = said.take("sliding_window_pattern", _GEMMA_PERIOD)
    period = said.take("_sliding_window_pattern", earlier)
    kinds = ["sliding_attention" if at % period else "full_attention" for at in range(1, keys["layers"] + 1)]
    head = keys["head_dim"] or keys["hidden"] // keys["heads"]
    scalar = said.take("query_pre_attn_scalar", 256)
    return {
        **keys,
        **_attention(said, said.take("sliding_window"), kinds),
        **_two_rotations(said, 1e6, 10000.0),
        "attention_scale": None if scalar == head else scalar**-0.5,
        "qk_norm": True,
        "norms": "around",
        "norm_zero_centered": True,
        "activation": "gelu_tanh",
        "embedding_scale": keys["hidden"] ** 0.5,
    }


def _two_rotations(said: Said, base: float, local: float | None) -> dict[str, Any]:
    """Keys of rotation of a family whose layers with windows are rotated unscaled. To say nothing means
    `base`, and for windows `local`, or None for the same.
    """
    told = dict(said.take("rope_parameters", {}))
    said.values["rope_theta"] = said.values.get("rope_theta") or base
    if "full_attention" in told or "sliding_attention" in told:
        full, windows = told.pop("full_attention", {}), dict(told.pop("sliding_attention", {}))
        if told:
            raise said.refused("rope_parameters", told, "it tells full_attention and sliding_attention apart")
    else:
        full, windows = {**told, **said.take("rope_scaling", {})}, {}
    own = windows.pop("rope_theta", None) or said.take("rope_local_base_freq", None) or local
    kind = windows.pop("rope_type", "default")
    if kind != "default" or windows:
        raise said.refused("rope_parameters", windows | {"rope_type": kind}, "windows are rotated unscaled")
    keys = rotation(said, full)
    return keys | {"rotary.window_base": float(own or keys["rotary_base"])}


def _olmo3(said: Said) -> dict[str, Any]:
    said.must("hidden_act", "silu")
    said.must("attention_bias", False)
    keys = _common(said)
    kinds = ["full_attention" if at % 4 == 0 else "sliding_attention" for at in range(1, keys["layers"] + 1)]
    return {
        **keys,
        **_attention(said, said.take("sliding_window", 4096), kinds),
        **_two_rotations(said, 500000.0, None),
        "qk_norm": True,
        "qk_norm_over": "all",
        "norms": "after",
    }


def _smollm3(said: Said) -> dict[str, Any]:
    said.must("mlp_bias", False)
    biases = dict.fromkeys(("qkv_bias", "output_bias"), said.take("attention_bias", False))
    count = said.take("num_hidden_layers")
    said.values["num_hidden_layers"] = count
    every = said.take("no_rope_layer_interval", 4)
    rotated = said.take("no_rope_layers", [int(at % every != 0) for at in range(1, count + 1)])
    window = said.take("sliding_window", None)
    said.must("use_sliding_window", False) if window is None else None
    kinds = ["full_attention" if on or window is None else "sliding_attention" for on in rotated]
    windows = _attention(said, window if said.take("use_sliding_window", False) else None, kinds)
    return _silu(said) | windows | biases | {"rotary.layers": _period([bool(on) for on in rotated])}


def _qwen2_moe(said: Said) -> dict[str, Any]:
    said.must("use_sliding_window", False)
    said.skip("sliding_window", "max_window_layers")
    keys = _silu(said) | _attention(said, None)
    shared = said.take("shared_expert_intermediate_size")
    return {
        **keys,
        **_sparse(said, keys, said.take("num_experts")),
        "qkv_bias": said.take("qkv_bias", True),
        "moe.shared_ffn": shared,
        "moe.shared_gate": True,
    }


def _gpt_oss(said: Said) -> dict[str, Any]:
    said.must("swiglu_alpha", 1.702)
    said.skip("experts_per_token", "initial_context_length")
    limit = said.take("swiglu_limit", 7.0)
    biases = said.take("attention_bias", True)
    if not biases:
        raise said.refused("attention_bias", False, "its experts have biases, and so must it")
    keys = _silu(said, own_heads=True)
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(keys["layers"])]
    return {
        **keys,
        **_attention(said, said.take("sliding_window", None), kinds),
        **_experts(said, said.take("num_local_experts"), keys["ffn"], normed=True),
        **dict.fromkeys(("qkv_bias", "output_bias", "ffn_bias", "sinks"), True),
        "activation": "quick_gelu",
        "activation_clamp": limit,
        "gate_offset": 1.0,
    }


def _experts(said: Said, experts: int, width: int, normed: bool) -> dict[str, Any]:
    """Keys of the mixture. The softmax over all experts, divided by the sum of those chosen, is the softmax
    over these; of a single expert we do not divide.
    """
    said.must("output_router_logits", False)
    topk = said.take("num_experts_per_tok")
    if normed and topk == 1:
        why = "weights of several experts are divided by their sum, that of a single one is not"
        raise said.refused("num_experts_per_tok", topk, f"with norm_topk_prob={normed}; {why}")
    mixture = {"experts": experts, "topk": topk, "ffn": width, "score": "softmax", "bias_update_rate": 0.0}
    return {f"moe.{key}": value for key, value in mixture.items()} | {"moe.normalise": normed or topk == 1}


# Early conversions hold the frequencies of rotation.
LLAMA = Family(_llama, plain_rules, copied=("model.layers.*.self_attn.rotary_emb.inv_freq",))
MISTRAL = Family(_mistral, plain_rules)
GEMMA3 = Family(_gemma3, plain_rules)
GPT_OSS = Family(_gpt_oss, lambda keys: tuple(gpt_oss_rules(keys)))
OLMO3 = Family(_olmo3, plain_rules)
SMOLLM3 = Family(_smollm3, plain_rules)
QWEN2 = Family(_qwen2, plain_rules)
QWEN3 = Family(_qwen3, plain_rules)
MIXTRAL = Family(_mixtral, mixtral_rules)
QWEN3_MOE = Family(_qwen3_moe, plain_rules)
QWEN2_MOE = Family(_qwen2_moe, plain_rules)
