"""The configuration: dataclasses that type every key of `hydra_conf/`. No torch here.

Sources, encoders and per-component settings are mappings, never lists, so that one entry can be overridden
by name on the command line. OmegaConf cannot add an entry to a mapping of dataclasses by one of its keys, so
entries are untyped while a configuration is composed; `MAPPINGS` says what each becomes afterwards.

A policy is named, and no name is known here: `omni.policies.KINDS` says which kind a section chooses.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


class ConfigError(ValueError):
    """A mistake in the configuration: the message names the key, the value and the remedy."""


def require(section: str, config: Any, *keys: str, least: float = 1) -> None:
    """Refuse numbers below `least`, and those that are not finite, naming the key.

    Raises:
        ConfigError: for the first of `keys` whose value is no such number; None passes.
    """
    for key in keys:
        value = getattr(config, key)
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"{section}.{key}={value}: must be a finite number")
        if value is not None and value < least:
            raise ConfigError(f"{section}.{key}={value}: must be at least {least:g}")


@dataclass
class MoEConfig:
    """Experts in place of MLPs, in all layers after the first `dense_layers`; none if `experts` is 0.

    Every token goes to `topk` of `experts` of width `ffn`, and through a shared expert of width `shared_ffn`
    (0 for none). Weights are the softmax of the chosen logits (Mixtral) or their sigmoids divided by their
    sum (DeepSeek-V3). With a topk of 1 nothing is divided: the weight is the expert's probability among all
    (Switch) or its sigmoid. The bias of an expert moves by `bias_update_rate` a step; 0 leaves the choice to
    the scores.
    """

    experts: int = 0
    topk: int = 2
    ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    score: str = "sigmoid"
    bias_update_rate: float = 1e-3


@dataclass
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, section 2.1), none if `kv_rank` is 0.

    Keys and values are made from `kv_rank` numbers of a token, queries from `q_rank` (0: from the stream). A
    head of queries and keys has `nope_dim` numbers and `rope_dim` rotated ones, which all heads of keys
    share; a head of values has `value_dim`.
    """

    q_rank: int = 0
    kv_rank: int = 0
    nope_dim: int = 0
    rope_dim: int = 0
    value_dim: int = 0


@dataclass
class LLMConfig:
    """A decoder-only transformer: RoPE, SwiGLU, grouped-query attention.

    The vocabulary has `vocab` ids, null for those of the tokenizer, rounded up to a multiple of
    `vocab_multiple`. `loss_chunk` is the most tokens whose logits are held at once. `moe` gives layers
    experts. `head_dim: null` is hidden / heads; `gated: false` makes the feed-forward two matrices with a
    GELU; `qk_norm` norms each head of queries and keys. In the first of every `window_every` layers a token
    sees `window` tokens, itself among them. `mla` makes queries, keys and values from few numbers a token.
    `mtp` layers at the end predict one token further each (DeepSeek-V3, section 2.2).

    What of this no module computes yet is refused where modules are made (`omni.planning.trainable`).
    """

    layers: int = MISSING
    hidden: int = MISSING
    heads: int = MISSING
    kv_heads: int = MISSING
    ffn: int = MISSING
    head_dim: int | None = None
    gated: bool = True
    qk_norm: bool = False
    window: int | None = None
    window_every: int = 1
    mla: MLAConfig = field(default_factory=MLAConfig)
    mtp: int = 0
    norm: str = "RMSNorm"
    norm_eps: float = 1e-5
    rotary_base: float = 10000.0
    qkv_bias: bool = False
    tied: bool = True
    vocab: int | None = None
    vocab_multiple: int = 8
    loss_chunk: int = 4096
    recompute: str = "none"
    moe: MoEConfig = field(default_factory=MoEConfig)

    @property
    def mixture(self) -> MoEConfig | None:
        """The experts, None for a dense model."""
        return self.moe if self.moe.experts else None

    @property
    def latent(self) -> MLAConfig | None:
        """Multi-head latent attention, None for a model whose layers attend with whole heads."""
        return self.mla if self.mla.kv_rank else None

    @property
    def head_size(self) -> int:
        """Numbers of a head of queries and keys."""
        if self.latent is not None:
            return self.latent.nope_dim + self.latent.rope_dim
        return self.head_dim or self.hidden // self.heads


@dataclass
class ModelConfig:
    """The LLM and its encoders by name. An encoder is `name: <registered>` or `_target_: <class>`, with
    the keys of that encoder's own configuration beside it.
    """

    llm: LLMConfig = field(default_factory=LLMConfig)
    encoders: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class LLMLayoutConfig:
    """Ranks of each axis. `dp: null` takes all ranks that the other axes leave. Each of the pp stages holds
    `parts` parts of the LLM, in turn: they take no ranks of their own.
    """

    tp: int = 1
    cp: int = 1
    dp: int | None = None
    pp: int = 1
    ep: int = 1
    parts: int = 1


@dataclass
class EncoderLayoutConfig:
    """Ranks that share each layer of an encoder; the rest of its ranks hold copies."""

    tp: int = 1


@dataclass
class LayoutConfig:
    """The LLM's layout, and by name that of each encoder that is divided. A domain has at least `domain`
    replicas: they plan together, and their ranks may share sequences and items.
    """

    llm: LLMLayoutConfig = field(default_factory=LLMLayoutConfig)
    domain: int = 1
    encoders: dict[str, Any] = field(default_factory=dict)


@dataclass
class PolicyConfig:
    """A section that names the policy of one decision; docs/policies.md says which decides what."""

    policy: str = MISSING


@dataclass
class PlacementConfig(PolicyConfig):
    """`ranks` is the number of ranks beside the LLM; null is one if the placement takes such, else none."""

    ranks: int | None = None


@dataclass
class BalanceConfig(PolicyConfig):
    """A group is `group` neighbouring domains; null is as many as hold 16 replicas or 256 ranks, whichever
    are more.
    """

    group: int | None = None


@dataclass
class PipelineConfig(PolicyConfig):
    """A rank holds at most `encoder_bytes` of activations of each encoder; null does not bound them."""

    encoder_bytes: int | None = None


@dataclass
class SourceConfig:
    """A dataset folder and its integer weight in the mixture (samples in a period)."""

    path: str = MISSING
    weight: int = 1


@dataclass
class HeldoutConfig:
    """A held-out dataset: `samples` of it give the loss, `generate` are transcribed freely at the end, each
    with at most `generate_tokens` tokens.
    """

    path: str = MISSING
    samples: int = 128
    generate: int = 0
    generate_tokens: int = 128


@dataclass
class DataConfig:
    """What to train on. A step takes samples up to `step_tokens` LLM tokens or `step_samples` samples. A
    sample has at most `sample_tokens`, null for `microbatch_tokens`; more takes ranks that share it.
    """

    sources: dict[str, Any] = field(default_factory=dict)
    heldout: dict[str, Any] = field(default_factory=dict)
    tokenizer: str = "bytes"
    microbatch_tokens: int = MISSING
    sample_tokens: int | None = None
    step_tokens: int | None = None
    step_samples: int | None = None
    on_long: str = "error"
    on_error: str = "fail"
    max_error_share: float = 0.01
    window_groups: int = 64
    loader_threads: int = 1
    record_samples: bool = False


@dataclass
class ComponentOptimConfig:
    """Per component: a factor on the learning rate, and the spans of steps [first, last) it is frozen for."""

    lr_scale: float = 1.0
    frozen: list[list[int]] = field(default_factory=list)


@dataclass
class OptimConfig:
    """AdamW and its schedule: linear warm-up, then cosine or WSD (stable, then linear decay) to `min_lr`.

    `max_skipped` steps in a row without an update, because their gradient norm was not finite, end the run.
    """

    lr: float = MISSING
    min_lr: float = 0.0
    warmup_steps: int = 0
    schedule: str = "cosine"
    decay_steps: int | None = None
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    max_skipped: int = 10
    components: dict[str, Any] = field(default_factory=dict)


@dataclass
class EfficiencyConfig:
    """Shares that work reaches: products of large matrices of the peak of their precision; attention of that
    of activations, in a backward counted as twice a forward; whatever moves bytes of the rates of memory and
    links.
    """

    products: dict[str, float] = MISSING
    attention: float = MISSING
    attention_backward: float = MISSING
    memory: float = 1.0
    node_link: float = 1.0
    link: float = 1.0


@dataclass
class ClusterConfig:
    """What a rank, its memory and its links can do: peak FLOP/s by precision, bytes/s, nanoseconds.

    `node_link` is inside a node of `ranks_per_node` neighbouring ranks, `link` between nodes and `far_link`
    between rails of `ranks_per_rail` ranks; null: all are on one. `issue_ns` is what a rank that computes
    itself spends on each communication that it issues or takes in. Communicators of a rank run in `queues`,
    `one` for all or `per_communicator`. `memory_bytes: null` is not checked, `price_per_hour` that of a rank
    in any currency. `device` is "cpu" or "cuda". `env` are variables that ranks find in their environment
    there, such as NCCL's.
    """

    name: str = MISSING
    device: str = "cuda"
    flops: dict[str, int] = MISSING
    efficiency: EfficiencyConfig = field(default_factory=EfficiencyConfig)
    memory_bytes_per_s: int = MISSING
    ranks_per_node: int = MISSING
    node_link_bytes_per_s: int = MISSING
    node_link_latency_ns: int = MISSING
    link_bytes_per_s: int = MISSING
    link_latency_ns: int = MISSING
    ranks_per_rail: int | None = None
    far_link_bytes_per_s: int | None = None
    far_link_latency_ns: int | None = None
    op_overhead_ns: int = MISSING
    launch_ns: int = 0
    dispatch_ns: int = 0
    issue_ns: int = 0
    queues: str = "one"
    memory_bytes: int | None = None
    price_per_hour: float | None = None
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class CostsConfig:
    """What work costs. `learn`: op times that the run measures correct what the cluster's figures give."""

    learn: bool = False


@dataclass
class TrackingConfig:
    """Where metrics go besides metrics.jsonl: jsonl (nowhere), wandb or tensorboard. Prometheus scrapes the
    first rank at `prometheus_port`, 0 for any that is free, null for none; from other machines if
    `prometheus_host` is 0.0.0.0 or an address of this one. `group` and `tags` are W&B's; a job of a sweep has
    those of its sweep, and what it sets.
    """

    kind: str = "jsonl"
    project: str = "omni"
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    mode: str = "auto"
    prometheus_port: int | None = None
    prometheus_host: str = "127.0.0.1"


@dataclass
class TrainConfig:
    """Length, seeds, precision and cadence: what is done every so many steps and after the last one, 0 for
    never. A checkpoint is saved after the last step in any case, with 0 there alone; more than 8 ranks refuse
    0 and take `checkpoint_every: ${train.steps}` for that. `precision: auto` is bf16 on a GPU and fp32 on the
    CPU; fp8, mxfp8 and nvfp4 are for plans alone. Checkpoints lie in `checkpoint_dir`, an absolute path or a
    URL of a file system that fsspec knows, null for the run folder; kept are the newest `keep_checkpoints`
    and those of steps that `keep_every` divides (0: none). Free generation at the end leaves off after
    `generate_s` seconds.
    """

    steps: int = MISSING
    seed: int = 0
    precision: str = "auto"
    eval_every: int = 0
    generate_s: float = 300.0
    checkpoint_every: int = 0
    timeline_every: int = 0
    checkpoint_dir: str | None = None
    keep_checkpoints: int = 2
    keep_every: int = 0
    timeout_s: float = 300.0


@dataclass
class HealthConfig:
    """What a run watches itself for. Every `compare_every` steps (0 for never), and before each save, ranks
    that hold copies of the same weights compare their bits; if they differ, the run is to `restart` from its
    last checkpoint while launch.max_restarts allows, or to `stop` (`on_corruption`). A rank that made no
    progress for `report_hang_s` seconds says where it stands; train.timeout_s decides when it gives up. With
    `exclude_slow` a rank that was named as slow is left out from the next restart on.
    """

    compare_every: int = 10
    on_corruption: str = "restart"
    report_hang_s: float = 45.0
    exclude_slow: bool = False


@dataclass
class LaunchConfig:
    """Processes. `ranks: null` is one a GPU, or two on a machine without one. `oversubscribe` starts more
    ranks than the cores and the memory of this machine can be expected to take.

    `layouts` are what the LLM is split by where the layout of the run does not fit the ranks that there are
    after a restart: the first that fits as many of them as possible. Ranks that are left over stand by.
    """

    ranks: int | None = None
    max_restarts: int = 0
    oversubscribe: bool = False
    layouts: list[LLMLayoutConfig] = field(default_factory=list)


@dataclass
class StartConfig:
    """What a run begins with in place of random weights: those of the folder `checkpoint` of another run,
    with the state of its optimizer if asked. `cursor` is the position in the stream of samples that it begins
    at, null for the beginning.
    """

    checkpoint: str | None = None
    optimizer: bool = False
    cursor: int | None = None


@dataclass
class RunConfig:
    """The run folder. A folder that holds checkpoints is continued; `dir` names it."""

    name: str = "run"
    dir: str = MISSING


@dataclass
class Config:
    """The whole configuration, as written to `config.yaml` of the run folder."""

    run: RunConfig = field(default_factory=RunConfig)
    start: StartConfig = field(default_factory=StartConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    encoder_sp: PolicyConfig = field(default_factory=PolicyConfig)
    llm_sp: PolicyConfig = field(default_factory=PolicyConfig)
    boundary: PolicyConfig = field(default_factory=PolicyConfig)
    deal: PolicyConfig = field(default_factory=PolicyConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    packing: PolicyConfig = field(default_factory=PolicyConfig)
    pairing: PolicyConfig = field(default_factory=PolicyConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    costs: CostsConfig = field(default_factory=CostsConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


MAPPINGS: tuple[tuple[str, str, type], ...] = (
    ("layout", "encoders", EncoderLayoutConfig),
    ("data", "sources", SourceConfig),
    ("data", "heldout", HeldoutConfig),
    ("optim", "components", ComponentOptimConfig),
)
"""Section, key and type of the entries of each typed mapping."""

RENAMED = {"boundary.transport": "boundary.policy", "pipeline.schedule": "pipeline.policy"}
"""Keys of before, and their names of now. A run that was saved with them is read; who sets one is told."""
