"""Sections of `model.llm`: dataclasses that type the keys of experts, latent attention, delta nets, rotation
and adapters; encoders share some of them. No torch here.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from omni.keys import Rule, Rules, at_least, one_of

SCORES = ("softmax", "sigmoid")  # of experts
SCALINGS = ("none", "linear", "llama3", "yarn")  # of rotation


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
