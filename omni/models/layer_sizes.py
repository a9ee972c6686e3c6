"""Sizes of transformer layers, as the configurations of LLM and encoders give them, and which fit together.

The modules are made elsewhere, so that checking and planning need not import megatron-core.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from omni.config import ConfigError
from omni.keys import Rule, Rules, at_least, one_of
from omni.llm_config import RECOMPUTE, WINDOWS_STAY, LLMConfig
from omni.llm_sections import LoraConfig, MoEConfig
from omni.models.adapters import Lora
from omni.models.delta import Delta
from omni.models.latent import Latent
from ops.names import NORMS
from parallel.layout import nearest_divisor


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """`layers` transformer layers, all alike. Their module (`transformer_config`) and the statement of their
    work (`Stack`) are made from the same sizes.

    `bias` is that of all linears, `qkv_bias` and `output_bias` those of attention even without it; `gated`
    makes the feed-forward a SwiGLU instead of a GELU. A head has `head_size` numbers, hidden / heads if it is
    0; `qk_norm` norms those of queries and keys. In `windowed` of the layers a token sees `window` tokens.
    `latent` takes the place of heads of queries, keys and values, `delta` that of attention. With `lora` only
    adapters of linears learn. The other sizes are as `LLMConfig` calls them.
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
    output_bias: bool = False
    qk_norm_over: str = "head"
    attention_scale: float | None = None
    sinks: bool = False
    norms: str = "before"
    norm_zero_centered: bool = False
    activation: str | None = None
    activation_clamp: float | None = None
    gate_offset: float = 0.0
    latent: Latent | None = None
    delta: Delta | None = None
    output_gate: bool = False
    lora: Lora | None = None

    def divides_inputs(self, tp: int, splits_tokens: bool = False) -> bool:
        """Whether `tp` ranks divide what layers take in until they are computed anew: where each takes in all
        tokens, and their numbers divide by the ranks.
        """
        return tp > 1 and self.recompute == "full" and not splits_tokens and self.hidden % tp == 0


INPUTS_ALONE = Rule(
    "offload",
    lambda own: not own.offload or own.recompute == "full",
    "with recompute={recompute}: inputs of layers that are made anew go to the host, nothing else; set "
    "recompute=full, or this to 0",
)
ANEW_ALONE = Rule(
    "keep_attention",
    lambda own: not own.keep_attention or own.recompute == "full",
    "with recompute={recompute}: it says what is kept of layers that are made anew: set recompute=full, or "
    "this to false",
)


@dataclass
class TransformerEncoderConfig:
    """The keys of every transformer encoder; one of your own adds its keys in a dataclass derived from it.

    `taps` are layers after which tokens are merged and projected too (DeepStack; Meng et al., 2024): the rows
    of the first are added to what enters the LLM's second layer, and so on. `gated` makes the feed-forward a
    SwiGLU. A token sees `window` tokens, null for all of its item, but in the `full_layers`, counted from 0.
    With `lora` adapters of linears of its layers learn, and nothing else of it. With `recompute=full` the
    inputs of up to `offload` layers behind the first, and behind each tap's, are on the host from their
    forward to their backward; null: none, unless it is chosen with what the LLM recomputes. With
    `keep_attention` they keep what attention puts out, and do not attend again; null: not, unless chosen.
    """

    layers: int = at_least(1, 2)
    hidden: int = at_least(1, 64)
    heads: int = at_least(1, 4)
    ffn: int = at_least(1, 192)
    rotary_base: float = at_least(1, 10000.0)
    norm: str = one_of(NORMS, "RMSNorm")
    recompute: str = one_of(RECOMPUTE, "none")
    offload: int | None = at_least(0, None)
    keep_attention: bool | None = None
    taps: list[int] = field(default_factory=list)
    gated: bool = False
    window: int | None = at_least(1, None)
    full_layers: list[int] = field(default_factory=list)
    lora: LoraConfig = field(default_factory=LoraConfig)

    rules: ClassVar[Rules] = (
        WINDOWS_STAY,
        INPUTS_ALONE,
        ANEW_ALONE,
        Rule(
            "full_layers",
            lambda own: is_ascending(own.full_layers, range(own.layers)),
            "must be layers between 0 and the last of {layers}, in order",
        ),
        Rule(
            "taps",
            lambda own: is_ascending(own.taps, range(1, own.layers)),
            "must be layers between 1 and the last of {layers}, in order",
        ),
    )


def is_ascending(numbers: list[int], within: range) -> bool:
    """Whether numbers lie in a range, each once and in order."""
    return numbers == sorted(set(numbers)) and set(numbers) <= set(within)


def encoder_layers(config: Any) -> LayerSizes:
    """The layers of our encoders: biases, no gate, as many key/value heads as heads.

    `config` is an encoder's, with the keys of `TransformerEncoderConfig`.
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
        lora=Lora.of(config.lora),
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
        bias=config.ffn_bias,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        norm=config.norm,
        recompute=config.recompute,
        norm_eps=config.norm_eps,
        head_size=config.head_size,
        qk_norm=config.qk_norm,
        qk_norm_over=config.qk_norm_over,
        attention_scale=config.attention_scale,
        sinks=config.sinks,
        norms=config.norms,
        norm_zero_centered=config.norm_zero_centered,
        activation=config.activation,
        activation_clamp=config.activation_clamp,
        gate_offset=config.gate_offset,
        window=config.window or 0,
        windowed=windowed(config, range(config.layers)),
        output_gate=config.output_gate,
        latent=None if mla is None else Latent(config.hidden, config.heads, **vars(mla)),
        lora=Lora.of(config.lora),
    )


def windowed(config: LLMConfig, layers: range) -> int:
    """How many of these layers of the LLM have a window."""
    return sum(config.kind(layer) == "window" for layer in layers)


def check_divisible(section: str, config: Any, key: str, tp: int, *names: str) -> None:
    """Refuse a tensor-parallel size `tp`, set by `key`, that does not divide the sizes called `names`.

    Raises:
        ConfigError: naming both keys.
    """
    for name in names:
        if getattr(config, name) % tp:
            raise ConfigError(
                f"{key}={tp} does not divide {section}.{name}={getattr(config, name)}: choose a tp that "
                f"does: {nearest_divisor(tp, *(getattr(config, own) for own in names))} is the nearest"
            )


def check_heads(section: str, config: Any, rotary_axes: int) -> None:
    """Refuse heads that cannot be rotated over so many axes.

    Raises:
        ConfigError: naming the key under `section`.
    """
    if config.hidden % (2 * rotary_axes * config.heads):
        raise ConfigError(
            f"{section}.heads={config.heads}: hidden={config.hidden} must divide into heads whose size is a "
            f"multiple of {2 * rotary_axes}, for rotation over {rotary_axes} axes"
        )


def check_offload(section: str, config: TransformerEncoderConfig) -> None:
    """Refuse to send more inputs than there are layers behind the first, whose own stays.

    Raises:
        ConfigError: naming the key under `section`.
    """
    if (config.offload or 0) >= config.layers:
        raise ConfigError(
            f"{section}.offload={config.offload}: inputs of layers behind the first go to the host, and "
            f"there are {config.layers} layers: set at most {config.layers - 1}"
        )


def check_experts(section: str, config: MoEConfig, *, tp: int, ep: int) -> None:
    """Refuse experts that do not fit the layout.

    Raises:
        ConfigError: naming the key under `section`.
    """
    if config.experts % ep:
        raise ConfigError(
            f"layout.llm.ep={ep} does not divide {section}.experts={config.experts}: choose an ep that does: "
            f"{nearest_divisor(ep, config.experts)} is the nearest"
        )
    if config.shared_ffn % tp:
        raise ConfigError(
            f"{section}.shared_ffn={config.shared_ffn} does not divide among layout.llm.tp={tp}: choose a "
            f"multiple of {tp}"
        )
