"""Sizes of transformer layers, as the configurations of LLM and encoders give them, and which fit together.

The modules are made elsewhere, so that checking and planning need not import megatron-core.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from omni.config import ConfigError, LLMConfig, MoEConfig, require
from omni.models.latent import Latent
from ops.norm import NORMS

RECOMPUTE = ("none", "selective", "full")
SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """`layers` transformer layers, all alike. Their module (`transformer_config`) and the statement of their
    work (`Stack`) are made from the same sizes.

    `bias` is that of all linears, `qkv_bias` that of queries, keys and values even without it; `gated` makes
    the feed-forward a SwiGLU instead of a GELU. A head has `head_size` numbers, hidden / heads if it is 0;
    `qk_norm` norms those of queries and keys. In `windowed` of the layers a token sees `window` tokens.
    `latent` takes the place of heads of queries, keys and values.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    gated: bool
    causal: bool
    bias: bool
    qkv_bias: bool
    norm: str
    recompute: str
    norm_eps: float = 1e-5
    head_size: int = 0
    qk_norm: bool = False
    window: int = 0
    windowed: int = 0
    latent: Latent | None = None


@dataclass
class TransformerEncoderConfig:
    """The keys of every transformer encoder; one of your own adds its keys in a dataclass derived from it.

    `taps` are layers after which tokens are merged and projected too (DeepStack; Meng et al., 2024): the rows
    of the first are added to what enters the LLM's second layer, and so on. `gated` makes the feed-forward a
    SwiGLU. A token sees `window` tokens, null for all of its item, but in the `full_layers`, counted from 0.
    """

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    ffn: int = 192
    rotary_base: float = 10000.0
    norm: str = "RMSNorm"
    recompute: str = "none"
    taps: list[int] = field(default_factory=list)
    gated: bool = False
    window: int | None = None
    full_layers: list[int] = field(default_factory=list)


def encoder_layers(config: Any) -> LayerSizes:
    """The layers of our encoders: biases, no gate, as many key/value heads as heads.

    `config` is an encoder's, with the keys that `check_transformer` reads.
    """
    return LayerSizes(
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.heads,
        ffn=config.ffn,
        gated=False,
        causal=False,
        bias=True,
        qkv_bias=True,
        norm=config.norm,
        recompute=config.recompute,
    )


def transformer_layers(config: TransformerEncoderConfig) -> LayerSizes:
    """The layers of a `TransformerEncoder`: `encoder_layers` with what it adds to them."""
    return replace(
        encoder_layers(config),
        gated=config.gated,
        window=config.window or 0,
        windowed=config.layers - len(config.full_layers) if config.window else 0,
    )


def llm_layers(config: LLMConfig) -> LayerSizes:
    """The layers of the LLM; where it has experts, those without them."""
    mla = config.latent
    return LayerSizes(
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        ffn=config.ffn,
        gated=config.gated,
        causal=True,
        bias=False,
        qkv_bias=config.qkv_bias,
        norm=config.norm,
        recompute=config.recompute,
        norm_eps=config.norm_eps,
        head_size=config.head_size,
        qk_norm=config.qk_norm,
        window=config.window or 0,
        windowed=windowed(config, range(config.layers)),
        latent=None if mla is None else Latent(config.hidden, config.heads, **vars(mla)),
    )


def windowed(config: LLMConfig, layers: range) -> int:
    """How many of these layers of the LLM have a window."""
    return 0 if config.window is None else sum(layer % config.window_every == 0 for layer in layers)


def check_divisible(section: str, config: Any, key: str, tp: int, *names: str) -> None:
    """Refuse a tensor-parallel size `tp`, set by `key`, that does not divide the sizes called `names`.

    Raises:
        ConfigError: naming both keys.
    """
    for name in names:
        if getattr(config, name) % tp:
            raise ConfigError(
                f"{key}={tp} does not divide {section}.{name}={getattr(config, name)}: choose a tp that does"
            )


def check_transformer(section: str, config: Any, rotary_axes: int, own_heads: bool = False) -> None:
    """Refuse sizes of a transformer that do not fit together; `config` has the keys that all of ours share.
    With `own_heads` their size is not hidden / heads.

    Raises:
        ConfigError: naming the key under `section`.
    """
    require(section, config, "layers", "hidden", "heads", "ffn")
    for key, known in (("norm", NORMS), ("recompute", RECOMPUTE)):
        if getattr(config, key) not in known:
            raise ConfigError(f"{section}.{key}={getattr(config, key)}: choose one of {', '.join(known)}")
    if not own_heads and config.hidden % (2 * rotary_axes * config.heads):
        raise ConfigError(
            f"{section}.heads={config.heads}: hidden={config.hidden} must divide into heads whose size is a "
            f"multiple of {2 * rotary_axes}, for rotation over {rotary_axes} axes"
        )


def check_moe(section: str, config: MoEConfig, *, layers: int, tp: int, ep: int) -> None:
    """Refuse sizes that fit neither each other nor the layout.

    Raises:
        ConfigError: naming the key under `section`.
    """
    require(section, config, "experts", "topk", "ffn")
    require(section, config, "shared_ffn", "dense_layers", "bias_update_rate", least=0)
    if config.score not in SCORES:
        raise ConfigError(f"{section}.score={config.score}: choose one of {', '.join(SCORES)}")
    if config.topk > config.experts:
        raise ConfigError(f"{section}.topk={config.topk}: must be at most experts={config.experts}")
    if config.dense_layers >= layers:
        raise ConfigError(
            f"{section}.dense_layers={config.dense_layers} leaves none of {layers} layers to experts: choose "
            f"at most {layers - 1}, or a model without experts"
        )
    if config.bias_update_rate and config.score == "softmax":
        raise ConfigError(
            f"{section}.bias_update_rate={config.bias_update_rate:g} needs score=sigmoid: a bias is added to "
            f"scores that do not depend on each other; set it to 0 for score=softmax"
        )
    if config.experts % ep:
        raise ConfigError(
            f"layout.llm.ep={ep} does not divide {section}.experts={config.experts}: choose an ep that does"
        )
    if config.shared_ffn % tp:
        raise ConfigError(
            f"{section}.shared_ffn={config.shared_ffn} does not divide among layout.llm.tp={tp}: choose a "
            f"multiple of {tp}"
        )


def check_window(section: str, window: int | None, recompute: str) -> None:
    """Refuse windows of no token, and their attention recomputed by itself.

    Raises:
        ConfigError: naming the key under `section`.
    """
    if window is not None and window < 1:
        raise ConfigError(f"{section}.window={window}: must be at least 1, or null for none")
    if window is not None and recompute == "selective":
        raise ConfigError(
            f"{section}.recompute=selective with window={window}: costs count attention that is made anew by "
            f"squared lengths, and that of windows has none; choose none or full"
        )
