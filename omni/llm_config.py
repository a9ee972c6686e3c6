"""The keys of the LLM: dataclasses that type `model.llm` and its sections; encoders share some of them. No
torch here.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from omni.keys import Rule, Rules, at_least, one_of
from ops.names import ACTIVATIONS, NORMS

RECOMPUTE = ("none", "selective", "full")
SCORES = ("softmax", "sigmoid")  # of experts
ATTENTION = ("full", "window", "delta")  # of a layer
NORMED = ("before", "around", "after")  # the halves of a layer
SCALINGS = ("none", "linear", "llama3", "yarn")  # of rotation
WITH_MLA = "with model.llm.mla: set mla.kv_rank=0, or this to "
WINDOWS_STAY = Rule(
    "recompute",
    lambda own: own.window is None or own.recompute != "selective",
    "with window={window}: choose full, which keeps less and makes layers anew, or none, which makes nothing "
    "anew; costs count attention that is made anew by squared lengths, and that of windows has none",
)


@dataclass
class MoEConfig:
    """Experts in place of MLPs, in all layers after the first `dense_layers`; none if `experts` is 0.

    Every token goes to `topk` of `experts` of width `ffn`, and through a shared expert of width `shared_ffn`
    (0 for none). Weights are the softmax of the chosen logits (Mixtral) or their sigmoids divided by their
    sum (DeepSeek-V3). With a topk of 1 nothing is divided: the weight is the expert's probability among all
    (Switch) or its sigmoid. The bias of an expert moves by `bias_update_rate` a step; 0 leaves the choice to
    the scores. With `normalise: false` the weights are the softmax over all experts of those chosen, and are
    not divided by their sum (Qwen2-MoE). All weights are multiplied by `scale`. Of `groups` of neighbouring
    experts a token chooses `group_topk`, by the sum of the best topk / group_topk scores in each, and its
    experts among theirs (DeepSeek-V3). With `shared_gate` the shared expert's output is multiplied by the
    sigmoid of a number of each token.
    """

    experts: int = at_least(0, 0)
    topk: int = at_least(1, 2)
    ffn: int = at_least(0, 0)
    shared_ffn: int = at_least(0, 0)
    dense_layers: int = at_least(0, 0)
    score: str = one_of(SCORES, "sigmoid")
    normalise: bool = True
    scale: float = at_least(1e-6, 1.0)
    groups: int = at_least(1, 1)
    group_topk: int = at_least(1, 1)
    shared_gate: bool = False
    bias_update_rate: float = at_least(0, 1e-3)

    rules: ClassVar[Rules] = (
        Rule("ffn", lambda own: not own.experts or own.ffn >= 1, "must be at least 1"),
        Rule(
            "topk",
            lambda own: not own.experts or own.topk <= own.experts,
            "must be at most experts={experts}",
        ),
        Rule(
            "normalise",
            lambda own: own.normalise or own.score == "softmax",
            "with score={score}: sigmoids of several experts are divided by their sum; set it to true",
        ),
        Rule(
            "groups",
            lambda own: not own.experts or own.experts % own.groups == 0,
            "must divide experts={experts}",
        ),
        Rule(
            "group_topk",
            lambda own: (
                not own.experts
                or (
                    own.group_topk <= own.groups
                    and own.topk % own.group_topk == 0
                    and own.topk <= own.group_topk * own.experts // own.groups
                )
            ),
            "must divide topk={topk}, be at most groups={groups}, and leave enough experts to choose",
        ),
        Rule(
            "shared_gate",
            lambda own: not own.shared_gate or own.shared_ffn,
            "is of a shared expert: set shared_ffn, or this to false",
        ),
        Rule(
            "bias_update_rate",
            lambda own: not (own.experts and own.bias_update_rate) or own.score != "softmax",
            "needs score=sigmoid: a bias is added to scores that do not depend on each other; set it to 0 "
            "for score=softmax",
        ),
    )


@dataclass
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, section 2.1), none if `kv_rank` is 0.

    Keys and values are made from `kv_rank` numbers of a token, queries from `q_rank` (0: from the stream). A
    head of queries and keys has `nope_dim` numbers and `rope_dim` rotated ones, which all heads of keys
    share; a head of values has `value_dim`.
    """

    q_rank: int = at_least(0, 0)
    kv_rank: int = at_least(0, 0)
    nope_dim: int = at_least(0, 0)
    rope_dim: int = at_least(0, 0)
    value_dim: int = at_least(0, 0)

    rules: ClassVar[Rules] = (
        Rule(
            "kv_rank",
            lambda own: own.kv_rank or not any(vars(own).values()),
            "latent attention needs it; or set all of mla to 0",
        ),
        Rule("nope_dim", lambda own: not own.kv_rank or own.nope_dim, "must be at least 1"),
        Rule("rope_dim", lambda own: not own.kv_rank or own.rope_dim, "must be at least 1"),
        Rule("value_dim", lambda own: not own.kv_rank or own.value_dim, "must be at least 1"),
        Rule("rope_dim", lambda own: own.rope_dim % 2 == 0, "rotation takes pairs; choose an even number"),
    )


@dataclass
class DeltaConfig:
    """Gated delta nets (Yang et al., Gated Delta Networks, 2024) in layers of kind `delta`; none if
    `key_heads` is 0.

    Queries and keys have `key_heads` heads of `key_dim` numbers, each of which serves as many of the
    `value_heads` heads of `value_dim` numbers; a convolution over `conv` tokens goes before.
    """

    key_heads: int = at_least(0, 0)
    value_heads: int = at_least(0, 0)
    key_dim: int = at_least(0, 0)
    value_dim: int = at_least(0, 0)
    conv: int = at_least(1, 4)

    rules: ClassVar[Rules] = (
        Rule(
            "key_heads",
            lambda own: own.key_heads or not (own.value_heads or own.key_dim or own.value_dim),
            "delta nets need heads of keys; or set all of delta to 0",
        ),
        Rule(
            "value_heads",
            lambda own: not own.key_heads or (own.value_heads and own.value_heads % own.key_heads == 0),
            "must be a multiple of key_heads={key_heads}, which all serve as many",
        ),
        Rule("key_dim", lambda own: not own.key_heads or own.key_dim, "must be at least 1"),
        Rule("value_dim", lambda own: not own.key_heads or own.value_dim, "must be at least 1"),
    )


def _in_turn(time: int, height: int, width: int) -> bool:
    """Whether each frequency after the first of three may be of the height, and of the width the next."""
    count = time + height + width
    return 3 * height <= count + 1 and 3 * width <= count


@dataclass
class RotaryConfig:
    """How the frequencies of rotation, powers of `model.llm.rotary_base`, are scaled, and what is rotated.

    `linear` divides all of them by `factor`. `llama3` and `yarn` divide those that turn less than `slow`
    times in `trained_tokens`, leave those that turn more than `fast` times, and mix in between: `llama3` by
    turns (Llama 3.1), `yarn` by the number of the frequency, rounded outwards with `truncate` (Peng et al.,
    YaRN, 2023, section 3.2). `yarn` multiplies queries and keys by `attention_factor`, null for
    0.1 ln(factor) + 1.

    The first `share` of a head is rotated, in those `layers` whose entry, repeated, is true. Layers with a
    window rotate by `window_base`, unscaled, where that is not null.

    With `sections` a token has three positions, in time, height and width, and so many frequencies turn by
    each, one axis after the other (Qwen2-VL) or, if `interleaved`, in turn (Qwen3-VL, Qwen3.5). They differ
    for rows of items whose encoder says their grid (`omni.models.grid_positions`).
    """

    scaling: str = one_of(SCALINGS, "none")
    factor: float = at_least(1, 1.0)
    trained_tokens: int = at_least(0, 0)
    slow: float = at_least(0, 1.0)
    fast: float = at_least(0, 32.0)
    truncate: bool = True
    attention_factor: float | None = at_least(0, None)
    share: float = at_least(0, 1.0)
    layers: list[bool] = field(default_factory=lambda: [True])
    window_base: float | None = at_least(1, None)
    sections: list[int] = field(default_factory=list)
    interleaved: bool = False

    rules: ClassVar[Rules] = (
        Rule(
            "factor",
            lambda own: own.scaling != "none" or own.factor == 1,
            "scales nothing with scaling=none: choose linear, llama3 or yarn, or a factor of 1",
        ),
        Rule(
            "trained_tokens",
            lambda own: own.scaling not in ("llama3", "yarn") or own.trained_tokens,
            "with scaling={scaling}: say how long the sequences were before scaling",
        ),
        Rule("fast", lambda own: own.fast > own.slow, "must be more than slow={slow}"),
        Rule(
            "attention_factor",
            lambda own: own.scaling == "yarn" or own.attention_factor is None,
            "is of scaling=yarn: set it to null",
        ),
        Rule("share", lambda own: 0 < own.share <= 1, "must be more than 0 and at most 1"),
        Rule("layers", lambda own: any(own.layers), "rotates nothing: give at least one true"),
        Rule(
            "sections",
            lambda own: len(own.sections) in (0, 3) and min(own.sections, default=0) >= 0,
            "give three numbers of frequencies, for time, height and width, or [] for one position a token",
        ),
        Rule(
            "interleaved",
            lambda own: own.sections or not own.interleaved,
            "is of sections: set them, or this to false",
        ),
        Rule(
            "sections",
            lambda own: not own.interleaved or _in_turn(*own.sections),
            "with interleaved=true: height and width have every third frequency, so at most a third each",
        ),
    )


@dataclass
class LoraConfig:
    """Low-rank adapters (Hu et al., LoRA, 2021): to each linear W [out, in] called in `targets` is added
    alpha / rank · B A, with A [rank, in] and B [out, rank]. These alone learn in their component. There are
    none if `rank` is 0.
    """

    rank: int = at_least(0, 0)
    alpha: float = at_least(1e-6, 16.0)
    targets: list[str] = field(default_factory=list)

    rules: ClassVar[Rules] = (
        Rule(
            "rank",
            lambda own: own.rank or not own.targets,
            "with targets={targets}: give a rank of at least 1, or leave lora out",
        ),
        Rule(
            "targets",
            lambda own: own.targets or not own.rank,
            "nothing would learn: name linears, such as [linear_qkv, linear_proj], or leave lora out",
        ),
        Rule(
            "targets",
            lambda own: len(set(own.targets)) == len(own.targets),
            "names a linear twice: name each once",
        ),
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
