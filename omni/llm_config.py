"""The keys of the LLM: the dataclass that types `model.llm`. No torch here."""

from dataclasses import dataclass, field
from typing import ClassVar

from omni.keys import Rule, Rules, at_least, one_of
from omni.llm_sections import DeltaConfig, LoraConfig, MLAConfig, MoEConfig, RotaryConfig
from ops.names import ACTIVATIONS, NORMS

RECOMPUTE = ("none", "selective", "full")
ATTENTION = ("full", "window", "delta")  # of a layer
NORMED = ("before", "around", "after")  # the halves of a layer
WITH_MLA = "with model.llm.mla: set mla.kv_rank=0, or this to "
WINDOWS_STAY = Rule(
    "recompute",
    lambda own: own.window is None or own.recompute != "selective",
    "with window={window}: choose full, which keeps less and makes layers anew, or none, which makes nothing "
    "anew; costs count attention that is made anew by squared lengths, and that of windows has none",
)


@dataclass
class LLMConfig:
    """A decoder-only transformer: RoPE, SwiGLU, grouped-query attention.

    The vocabulary has `vocab` ids, and rows of padding up to a multiple of `vocab_multiple` which take no
    part; `vocab: null` is the tokenizer's ids, rounded up to it. `loss_chunk` is the most tokens whose logits
    are held at once. `moe` gives layers experts. `head_dim: null` is hidden / heads; `gated: false` makes the
    feed-forward two matrices with a GELU; `qk_norm` norms each head of queries and keys. `attention` gives
    the kind of each layer, and repeats over them: in those of kind `window` a token sees `window` tokens,
    itself among them; those of kind `delta` have a gated delta net in its place. `mla` makes queries, keys
    and values from few numbers a token. `mtp` layers at the end predict one token further each (DeepSeek-V3,
    section 2.2).

    Scores of attention are divided by the root of a head's size, or multiplied by `attention_scale`; with
    `sinks` a learned number of each head takes part in its softmax and in no output (gpt-oss). Norms stand
    `before` attention and feed-forward, `around` them (Gemma 3) or `after` them, ahead of the sum (OLMo 2);
    with `norm_zero_centered` they multiply by 1 + weight. `qk_norm_over` a head, or all heads together. With
    `output_gate` what attention puts out is multiplied by the sigmoid of a linear of its input (Qwen3.5).

    `activation: null` is silu with gates and gelu without. Ahead of it the gate is cut off above
    `activation_clamp`, and what it gates on both sides, to which `gate_offset` is then added (gpt-oss).
    `qkv_bias` and `output_bias` are of attention's linears, `ffn_bias` of the feed-forward's, or of experts
    and their router. Word embeddings are multiplied by `embedding_scale`. With `lora` adapters of linears
    learn, and nothing else of the LLM.

    What of layers is kept for their backward is decided by `recompute`: all, all but what attention makes, or
    a layer's input alone. With `recompute_long` passes of one long sample keep inputs alone: those in which
    some rank has more tokens than a pack of several samples may have. With `keep_attention` such layers keep
    what attention puts out, too, and do not attend a second time. With `full`, `offload` layers of each
    virtual stage, from its second on, have their inputs on the host from their forward to their backward.

    What of this no module computes yet is refused where modules are made (`omni.planning.trainable`).
    """

    layers: int = at_least(1)
    hidden: int = at_least(1)
    heads: int = at_least(1)
    kv_heads: int = at_least(1)
    ffn: int = at_least(1)
    head_dim: int | None = at_least(2, None)
    gated: bool = True
    qk_norm: bool = False
    qk_norm_over: str = one_of(("head", "all"), "head")
    window: int | None = at_least(1, None)
    attention: list[str] = field(default_factory=lambda: ["full"])
    attention_scale: float | None = at_least(1e-6, None)
    sinks: bool = False
    delta: DeltaConfig = field(default_factory=DeltaConfig)
    output_gate: bool = False
    mla: MLAConfig = field(default_factory=MLAConfig)
    mtp: int = at_least(0, 0)
    norm: str = one_of(NORMS, "RMSNorm")
    norm_eps: float = at_least(1e-20, 1e-5)
    norms: str = one_of(NORMED, "before")
    norm_zero_centered: bool = False
    activation: str | None = one_of((None, *ACTIVATIONS), None)
    activation_clamp: float | None = at_least(1e-6, None)
    gate_offset: float = at_least(0, 0.0)
    embedding_scale: float = at_least(1e-6, 1.0)
    rotary_base: float = at_least(1, 10000.0)
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    qkv_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    tied: bool = True
    vocab: int | None = at_least(1, None)
    vocab_multiple: int = at_least(1, 8)
    loss_chunk: int = at_least(1, 4096)
    recompute: str = one_of((*RECOMPUTE, "auto"), "none")
    recompute_long: bool = False
    keep_attention: bool = False
    offload: int = at_least(0, 0)
    moe: MoEConfig = field(default_factory=MoEConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)

    rules: ClassVar[Rules] = (
        Rule(
            "heads",
            lambda own: own.head_dim or own.latent or own.hidden % (2 * own.heads) == 0,
            "hidden={hidden} must divide into heads of even size, for rotation",
        ),
        Rule("kv_heads", lambda own: own.heads % own.kv_heads == 0, "must divide heads={heads}"),
        Rule(
            "head_dim",
            lambda own: own.head_dim is None or own.head_dim % 2 == 0,
            "rotation takes pairs; choose an even number",
        ),
        WINDOWS_STAY,
        Rule(
            "recompute_long",
            lambda own: not own.recompute_long or own.recompute in ("none", "selective"),
            "with recompute={recompute}: it says which passes keep less than others do: set recompute=none "
            "or selective, or this to false",
        ),
        Rule(
            "keep_attention",
            lambda own: not own.keep_attention or own.recompute == "full" or own.recompute_long,
            "with recompute={recompute} and recompute_long=false: it says what is kept of layers that are "
            "made anew: set recompute=full or recompute_long=true, or this to false",
        ),
        Rule(
            "keep_attention",
            lambda own: not (own.keep_attention and own.offload and "delta" in own.attention),
            "with offload={offload} and delta nets, which keep no attention between layers that do: set "
            "offload=0, or this to false",
        ),
        Rule(
            "offload",
            lambda own: not own.offload or own.recompute == "full",
            "with recompute={recompute}: inputs of layers that are made anew go to the host, nothing else; "
            "what a layer keeps otherwise takes longer to copy than to make anew: set recompute=full, or "
            "this to 0",
        ),
        Rule(
            "attention",
            lambda own: own.attention and set(own.attention) <= set(ATTENTION),
            f"give the kinds of some layers, which repeat, out of {', '.join(ATTENTION)}",
        ),
        Rule(
            "window",
            lambda own: (own.window is not None) == ("window" in own.attention),
            "with attention={attention}: layers of kind window have one; set both or neither",
        ),
        Rule(
            "delta.key_heads",
            lambda own: bool(own.delta.key_heads) == ("delta" in own.attention),
            "with attention={attention}: layers of kind delta have heads of their own; set both or neither",
        ),
        Rule("output_gate", lambda own: not own.mla.kv_rank or not own.output_gate, f"{WITH_MLA}false"),
        Rule(
            "rotary.window_base",
            lambda own: own.rotary.window_base is None or own.window is not None,
            "is of layers with a window, and there are none: set it to null",
        ),
        Rule(
            "rotary.share",
            lambda own: own.head_size * own.rotary.share % 2 == 0,
            "must leave an even number of each head, for rotation",
        ),
        Rule(
            "rotary.sections",
            lambda own: (
                not own.rotary.sections
                or 2 * sum(own.rotary.sections) == int(own.head_size * own.rotary.share)
            ),
            "must sum to the number of frequencies, half of the numbers of a head, or of their rotary.share",
        ),
        Rule("rotary.sections", lambda own: not own.mla.kv_rank or not own.rotary.sections, f"{WITH_MLA}[]"),
        Rule(
            "moe.dense_layers",
            lambda own: own.mixture is None or own.moe.dense_layers < own.layers,
            "leaves none of {layers} layers to experts: choose fewer, or a model without experts",
        ),
        Rule(
            "ffn_bias",
            lambda own: not own.ffn_bias or (own.qkv_bias and own.output_bias),
            "goes with biases of attention: set qkv_bias and output_bias, or this to false",
        ),
        Rule(
            "ffn_bias",
            lambda own: not (own.ffn_bias and own.mixture and own.moe.shared_ffn),
            "goes with no shared expert: set moe.shared_ffn=0, or this to false",
        ),
        Rule(
            "gate_offset",
            lambda own: own.gated or not own.gate_offset,
            "is added to what a gate lets through: set gated=true, or this to 0",
        ),
        Rule(
            "activation_clamp",
            lambda own: own.gated or own.activation_clamp is None,
            "cuts off what a gate takes: set gated=true, or this to null",
        ),
        Rule(
            "qk_norm_over",
            lambda own: own.qk_norm or own.qk_norm_over == "head",
            "is of norms of queries and keys: set qk_norm=true",
        ),
        Rule(
            "qk_norm_over",
            lambda own: own.qk_norm_over == "head" or own.norm == "RMSNorm",
            "goes with norm=RMSNorm, not with {norm}",
        ),
        Rule("sinks", lambda own: not own.mla.kv_rank or not own.sinks, f"{WITH_MLA}false"),
        Rule("head_dim", lambda own: not own.mla.kv_rank or own.head_dim is None, f"{WITH_MLA}null"),
        Rule("qk_norm", lambda own: not own.mla.kv_rank or not own.qk_norm, f"{WITH_MLA}false"),
        Rule("qkv_bias", lambda own: not own.mla.kv_rank or not own.qkv_bias, f"{WITH_MLA}false"),
        Rule("window", lambda own: not own.mla.kv_rank or own.window is None, f"{WITH_MLA}null"),
        Rule(
            "kv_heads", lambda own: not own.mla.kv_rank or own.kv_heads == own.heads, f"{WITH_MLA}{{heads}}"
        ),
    )

    @property
    def mixture(self) -> MoEConfig | None:
        """The experts, None for a dense model."""
        return self.moe if self.moe.experts else None

    @property
    def latent(self) -> MLAConfig | None:
        """Multi-head latent attention, None for a model whose layers attend with whole heads."""
        return self.mla if self.mla.kv_rank else None

    def kind(self, layer: int) -> str:
        """The kind of attention of a layer, counted from 0."""
        return self.attention[layer % len(self.attention)]

    def rotates(self, layer: int) -> bool:
        """Whether a layer rotates queries and keys."""
        return self.rotary.layers[layer % len(self.rotary.layers)]

    @property
    def head_size(self) -> int:
        """Numbers of a head of queries and keys."""
        if self.latent is not None:
            return self.latent.nope_dim + self.latent.rope_dim
        return self.head_dim or self.hidden // self.heads
