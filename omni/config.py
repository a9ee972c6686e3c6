"""The configuration: dataclasses that type every key of `hydra_conf/`. No torch here.

Sources, encoders and per-component settings are mappings, never lists, so that one entry can be overridden
by name on the command line. OmegaConf cannot add an entry to a mapping of dataclasses by one of its keys, so
entries are untyped while a configuration is composed; `MAPPINGS` says what each becomes afterwards.

A policy is named, and no name is known here: `omni.policies.KINDS` says which kind a section chooses.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from omegaconf import MISSING

from infra.tracker import KINDS, MODES
from omni.data_config import DataConfig, HeldoutConfig, PhaseConfig, SourceConfig
from omni.keys import ConfigError as ConfigError
from omni.keys import Rule, Rules, at_least, one_of, share
from omni.llm_config import LLMConfig
from omni.optim_config import ComponentOptimConfig, OptimConfig
from ops.names import LOWER, PRECISIONS, REDUCED
from parallel.cluster import QUEUES

MOST_SEEDS = 2**63
MOST_WAIT_S = 30 * 24 * 3600  # torch's waits take no number of seconds that is too large


@dataclass
class ModelConfig:
    """The LLM and its encoders by name. An encoder is `name: <registered>` or `_target_: <class>`, with
    the keys of that encoder's own configuration beside it. With `from_folder` they are those of the folder
    `start.weights`, with what is set here in place of theirs.
    """

    llm: LLMConfig = field(default_factory=LLMConfig)
    encoders: dict[str, dict[str, Any]] = field(default_factory=dict)
    from_folder: bool = False


@dataclass
class LLMLayoutConfig:
    """Ranks of each axis. `dp: null` takes all ranks that the other axes leave. Each of the pp stages holds
    `vpp` virtual stages of the LLM, in turn: they take no ranks of their own. `zero` is the stage of ZeRO: 1
    divides the optimizer's state among replicas, 2 gradients too, 3 weights too. Null leaves either to be
    chosen.
    """

    tp: int = 1
    cp: int = 1
    dp: int | None = None
    pp: int = 1
    ep: int = 1
    vpp: int | None = 1
    zero: int | None = 1

    def __post_init__(self) -> None:
        if self.vpp is None and self.pp == 1:
            self.vpp = 1  # one stage has nothing to go round


@dataclass
class EncoderLayoutConfig:
    """Ranks that share each layer of an encoder; the rest of its ranks hold copies."""

    tp: int = 1


@dataclass
class LayoutConfig:
    """The LLM's layout, and by name that of each encoder that is divided. A domain has at least `domain`
    replicas: they plan together, and their ranks may share sequences and items. Layers are divided over
    stages so that these take as long for tokens of sequences of `context` tokens. `domain: null` and
    `context: null` leave the number to be chosen for the run (`omni.planning.choose`).
    """

    llm: LLMLayoutConfig = field(default_factory=LLMLayoutConfig)
    domain: int | None = 1
    context: int | None = 4096
    encoders: dict[str, Any] = field(default_factory=dict)


@dataclass
class PolicyConfig:
    """A section that names the policy of one decision; docs/policies.md says which decides what."""

    policy: str = MISSING


@dataclass
class ChoiceConfig:
    """What was chosen for the run when it was composed: `keys` that nobody had given, for so many `ranks`,
    after step `since`. Where another number of ranks goes on with the run, these are chosen again. Nobody
    sets this section.
    """

    ranks: int | None = None
    keys: list[str] = field(default_factory=list)
    since: int = 0


@dataclass
class PlacementConfig(PolicyConfig):
    """`ranks` is the number of ranks beside the LLM; null is one if the placement takes such, else none."""

    ranks: int | None = None


@dataclass
class BalanceConfig(PolicyConfig):
    """A group is `group` neighbouring domains; null is as many as hold 16 replicas or 256 ranks, whichever
    are more.
    """

    group: int | None = at_least(1, None)


@dataclass
class PackingConfig(PolicyConfig):
    """A pack has at most `data.microbatch_tokens` / `divisor` tokens, unless one sample has more: passes are
    smaller then and more of them fill a pipeline. `divisor: null` leaves it to be chosen for the run.
    """

    divisor: int | None = at_least(1, 1)


@dataclass
class PipelineConfig(PolicyConfig):
    """A step has at most so many `rounds`, each encoded, passed and gone back through before the next, so
    that encoders hold the activations of a round; null: as few as fit `cluster.memory_bytes`. A rank holds at
    most `encoder_bytes` of activations of each encoder; null does not bound them.
    """

    rounds: int | None = at_least(1, None)
    encoder_bytes: int | None = at_least(1, None)


@dataclass
class EfficiencyConfig:
    """Shares that work reaches: products of large matrices of the peak of their precision; attention of that
    of activations, in a backward counted as twice a forward; whatever moves bytes of the rates of memory and
    links.
    """

    products: dict[str, float] = share()
    attention: float = share()
    attention_backward: float = share()
    memory: float = share(1.0)
    node_link: float = share(1.0)
    link: float = share(1.0)
    host_link: float = share(1.0)


@dataclass
class ClusterConfig:
    """What a rank, its memory and its links can do: peak FLOP/s by precision, bytes/s, nanoseconds.

    `node_link` is inside a node of `ranks_per_node` neighbouring ranks, `link` between nodes and `far_link`
    between rails of `ranks_per_rail` ranks; null: all are on one. `issue_ns` is what a rank that computes
    itself spends on each communication that it issues or takes in. Communicators of a rank run in `queues`,
    `one` for all or `per_communicator`. `host_link_bytes_per_s` is between a rank's memory and its host's,
    one way, while all ranks of the node copy; null: not known, and nothing goes there. Of the host's memory
    passes of a rank may keep `host_memory_bytes`. That and `memory_bytes` are not checked where they are
    null. `price_per_hour` is that of a rank in any currency, `device` "cpu" or "cuda". `env` are variables
    that ranks find in their environment there, such as NCCL's.
    """

    name: str = MISSING
    device: str = one_of(("cpu", "cuda"), "cuda")
    flops: dict[str, int] = at_least(1)
    efficiency: EfficiencyConfig = field(default_factory=EfficiencyConfig)
    memory_bytes_per_s: int = at_least(1)
    ranks_per_node: int = at_least(1)
    node_link_bytes_per_s: int = at_least(1)
    node_link_latency_ns: int = at_least(0)
    link_bytes_per_s: int = at_least(1)
    link_latency_ns: int = at_least(0)
    ranks_per_rail: int | None = at_least(1, None)
    far_link_bytes_per_s: int | None = at_least(1, None)
    far_link_latency_ns: int | None = at_least(0, None)
    host_link_bytes_per_s: int | None = at_least(1, None)
    op_overhead_ns: int = at_least(0)
    launch_ns: int = at_least(0, 0)
    dispatch_ns: int = at_least(0, 0)
    issue_ns: int = at_least(0, 0)
    queues: str = one_of(QUEUES, "one")
    memory_bytes: int | None = at_least(1, None)
    host_memory_bytes: int | None = at_least(1, None)
    price_per_hour: float | None = at_least(0, None)
    env: dict[str, str] = field(default_factory=dict)

    rules: ClassVar[Rules] = (
        Rule(
            "ranks_per_rail",
            lambda own: own.ranks_per_rail is None or own.ranks_per_rail % own.ranks_per_node == 0,
            "must be a multiple of ranks_per_node={ranks_per_node}",
        ),
    )


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

    kind: str = one_of(KINDS, "jsonl")
    project: str = "omni"
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    mode: str = one_of(MODES, "auto")
    prometheus_port: int | None = at_least(0, None)
    prometheus_host: str = "127.0.0.1"

    rules: ClassVar[Rules] = (
        Rule(
            "prometheus_port",
            lambda own: own.prometheus_port is None or own.prometheus_port < 2**16,
            "is a port: at most 65535, or null for none",
        ),
    )


@dataclass
class TrainConfig:
    """Length, seeds, precision and cadence: what is done every so many steps and after the last one, 0 for
    never. A checkpoint is saved after the last step in any case, with 0 there alone; more than 8 ranks refuse
    0 and take `checkpoint_every: ${train.steps}` for that. `precision: auto` is bf16 on a GPU and fp32 on the
    CPU; fp8, mxfp8 and nvfp4 are for plans alone. Gradients add up in fp32 and travel to the other replicas
    as `mixed_precision_reduce` says: in bf16 each is rounded once on its way. Behind the first and the last
    pass of a step weights arrive and gradients leave bucket by bucket; with `overlap_buckets=false` all do
    between passes, with the same sums, so that a hang or a wrong sum is easier to find. Checkpoints lie in
    `checkpoint_dir`, an absolute path or a URL of a file system that fsspec knows, null for the run folder;
    kept are the newest `keep_checkpoints` and those of steps that `keep_every` divides (0: none). Free
    generation at the end leaves off after `generate_s` seconds. With `deterministic` torch takes algorithms
    alone that give the same bits each time, which are slower, and fails where it has none.
    """

    steps: int = at_least(1)
    seed: int = 0
    precision: str = one_of((*PRECISIONS, *LOWER), "auto")
    mixed_precision_reduce: str = one_of(REDUCED, "fp32")
    overlap_buckets: bool = True
    eval_every: int = at_least(0, 0)
    generate_s: float = at_least(0, 300.0)
    checkpoint_every: int = at_least(0, 0)
    timeline_every: int = at_least(0, 0)
    checkpoint_dir: str | None = None
    keep_checkpoints: int = at_least(1, 2)
    keep_every: int = at_least(0, 0)
    timeout_s: float = at_least(1, 300.0)
    deterministic: bool = False

    rules: ClassVar[Rules] = (
        Rule("seed", lambda own: 0 <= own.seed < MOST_SEEDS, f"must lie in [0, {MOST_SEEDS})"),
        Rule(
            "timeout_s", lambda own: own.timeout_s <= MOST_WAIT_S, f"must be at most {MOST_WAIT_S}, 30 days"
        ),
    )


@dataclass
class ProfileConfig:
    """The first and the last of the `steps` of which every rank writes a trace of operators and kernels to
    `profile/` of the run folder; none if empty.
    """

    steps: list[int] = field(default_factory=list)

    rules: ClassVar[Rules] = (
        Rule(
            "steps",
            lambda own: not own.steps or (len(own.steps) == 2 and 1 <= own.steps[0] <= own.steps[1]),
            "must be the first and the last step to record, such as [20,22], or []",
        ),
    )


@dataclass
class HealthConfig:
    """What a run watches itself for. Every `compare_every` steps (0 for never), and before each save, ranks
    that hold copies of the same weights compare their bits; if they differ, the run is to `restart` from its
    last checkpoint while launch.max_restarts allows, or to `stop` (`on_corruption`). A rank that made no
    progress for `report_hang_s` seconds says where it stands; train.timeout_s decides when it gives up. With
    `exclude_slow` a rank that was named as slow is left out from the next restart on. Where steps are planned
    to take the share `choice_costs` longer, beside even work, than when keys were chosen for the run, an
    alert says so, and with `choose_again` they are chosen again when `omni train` or `omni resume` goes on.
    """

    compare_every: int = at_least(0, 10)
    on_corruption: str = one_of(("restart", "stop"), "restart")
    report_hang_s: float = at_least(1, 45.0)
    exclude_slow: bool = False
    choice_costs: float = at_least(0, 0.15)
    choose_again: bool = False


@dataclass
class LaunchConfig:
    """Processes. `ranks: null` is one a GPU, or two on a machine without one. `oversubscribe` starts more
    ranks than the cores and the memory of this machine can be expected to take.

    `layouts` are what the LLM is split by where the layout of the run does not fit the ranks that there are
    after a restart: the first that fits as many of them as possible. Ranks that are left over stand by.
    """

    ranks: int | None = at_least(1, None)
    max_restarts: int = at_least(0, 0)
    oversubscribe: bool = False
    layouts: list[LLMLayoutConfig] = field(default_factory=list)


@dataclass
class StartConfig:
    """What a run begins with in place of random weights: those of the folder `checkpoint` of another run,
    with the state of its optimizer if asked, or those of the LLM in the folder `weights` of a published
    model, which also says the keys of `model.llm`. `cursor` is the position in the stream of samples that it
    begins at, null for the beginning.
    """

    checkpoint: str | None = None
    optimizer: bool = False
    cursor: int | None = at_least(0, None)
    weights: str | None = None

    rules: ClassVar[Rules] = (
        Rule(
            "optimizer",
            lambda own: not own.optimizer or own.checkpoint is not None or own.weights is not None,
            "it is the state of a checkpoint, and start.checkpoint is null: name one, or leave this out",
        ),
    )


@dataclass
class RunConfig:
    """The run folder. A folder that holds checkpoints is continued; `dir` names it."""

    name: str = "run"
    dir: str = MISSING

    rules: ClassVar[Rules] = (Rule("dir", lambda own: own.dir.strip() != "", "name a folder"),)


@dataclass
class Config:
    """The whole configuration, as written to `config.yaml` of the run folder."""

    run: RunConfig = field(default_factory=RunConfig)
    start: StartConfig = field(default_factory=StartConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    choice: ChoiceConfig = field(default_factory=ChoiceConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    encoder_sp: PolicyConfig = field(default_factory=PolicyConfig)
    llm_sp: PolicyConfig = field(default_factory=PolicyConfig)
    boundary: PolicyConfig = field(default_factory=PolicyConfig)
    deal: PolicyConfig = field(default_factory=PolicyConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    pairing: PolicyConfig = field(default_factory=PolicyConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    stages: dict[str, Any] = field(default_factory=dict)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    costs: CostsConfig = field(default_factory=CostsConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def policies(self) -> dict[str, str]:
        """The name of the policy that each section chooses."""
        return {name: of.policy for name, of in vars(self).items() if isinstance(of, PolicyConfig)}


MAPPINGS: tuple[tuple[str, str, type], ...] = (
    ("layout", "encoders", EncoderLayoutConfig),
    ("data", "sources", SourceConfig),
    ("data", "mixture", PhaseConfig),
    ("data", "heldout", HeldoutConfig),
    ("optim", "components", ComponentOptimConfig),
)
"""Section, key and type of the entries of each typed mapping."""

RENAMED = {
    "boundary.transport": "boundary.policy",
    "pipeline.schedule": "pipeline.policy",
    "layout.llm.parts": "layout.llm.vpp",
    "launch.layouts[].parts": "launch.layouts[].vpp",
}
"""Keys of before, and their names of now, with [] for any entry of a list. A run that was saved with them is
read; who sets one is told.
"""

RENAMED_OPTIONS = {"cluster/h100_8x8": "cluster/h100", "system/stage0": "system/megatron"}
"""Options of before, as group/option, and their names of now."""
