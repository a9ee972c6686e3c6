"""Rows of published_throughput.csv as configurations: what `simulator_error.py` plans and simulates."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from dataloader.tokens import SampleMeta
from omni.compose import compose_config
from omni.planning.clusters import cluster_of
from omni.planning.frameworks import Framework, framework_called
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.planning.work import cost_table
from ops.names import LOWER
from pipeline.costs import simulate
from pipeline.domain_plan import DomainPlan

ROWS = Path(__file__).with_name("published_throughput.csv")
# FLOP/s of large products (Bekman, Machine Learning Engineering, 2026-08). Nobody measured GB300: as GB200.
REACHED = {
    "a100": {"bf16": 271.2e12},
    "h100": {"bf16": 794.5e12, "fp8": 1402.6e12},
    "h100_500w": {"bf16": 671.5e12, "fp8": 1185.4e12},
    "h200": {"bf16": 794.5e12, "fp8": 1453.4e12},
    "b200": {"bf16": 1745e12, "fp8": 3432.5e12},
    "b300": {"bf16": 1769e12, "fp8": 3353.3e12},
    "gb200": {"bf16": 1822e12, "fp8": 3615.6e12},
    "gb300": {"bf16": 1822e12, "fp8": 3615.6e12},
}
GRACE = ("gb200", "gb300")  # whose hosts are Grace, and launch kernels faster
SHORT = (1, 2)  # microbatches a stage of the two steps that stand for a long one
MODELS = {
    "LLAMA3_8B": "llama3_8b",
    "LLAMA3.1_405B": "llama3_405b",
    "GPT-175B": "gpt_175b",
    "GPT-530B": "gpt_530b",
    "DeepSeekV3": "deepseek_v3",
    "GPT OSS 120B": "gpt_oss_120b",
    "Qwen3_30B_a3B": "qwen3_30b_a3b",
}
GPTS = {  # of hydra_conf/model/llm/gpt.yaml: layers, hidden, heads
    "GPT-1.7B": (24, 2048, 16),
    "GPT-7.1B": (30, 4096, 32),
    "GPT-16B": (32, 6144, 48),
    "GPT-32B": (48, 7168, 56),
    "GPT-70B": (84, 8192, 64),
    "GPT-119B": (92, 10240, 80),
    "GPT-177B": (96, 12288, 96),
    "GPT-314B": (96, 16384, 128),
    "GPT-462B": (112, 18432, 144),
}


class Knobs(NamedTuple):
    """What is fitted: shares of what products of large matrices reach, in low precision `low` times as much;
    of it attention's, and memory's of its bandwidth; nanoseconds of a layer's launches and of a dispatch to
    experts, times `grace` on such hosts; and the thousandths of a split message that are waited for.
    """

    products: float = 0.75
    low: float = 1.0
    attention: float = 0.75
    memory: float = 0.75
    launch_ns: float = 50_000.0
    dispatch_ns: float = 1_500_000.0
    grace: float = 0.7
    visible: float = 200.0


@dataclass(frozen=True)
class Row:
    """A published run."""

    number: int
    values: Mapping[str, str]

    def __getitem__(self, key: str) -> int:
        return int(self.values[key])

    @property
    def model(self) -> str:
        """The model's name."""
        return self.values["model"]

    @property
    def cluster(self) -> str:
        """The cluster's name."""
        return self.values["cluster"]

    @property
    def family(self) -> str:
        """Which target the row counts for."""
        if self["ep"] > 1:
            return "experts"
        return "dense bf16" if self.values["precision"] == "bf16" else "dense low"

    @property
    def knobs(self) -> list[str]:
        """The knobs that have a say in the row's time."""
        overlaps = framework_called(self.values["framework"]).overlap.tensor < 1000
        says = {
            "low": self.values["precision"] != "bf16",
            "dispatch_ns": self["ep"] > 1,
            "grace": self.cluster in GRACE,
            "visible": overlaps and self["tp"] > 1,
        }
        return [name for name in Knobs._fields if says.get(name, True)]

    @property
    def microbatches(self) -> int:
        """Microbatches of a replica in a step."""
        return self["gbs"] // self["dp"] // self["mbs"]

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self["gbs"] * self["seq"]

    @property
    def alike(self) -> tuple[str, ...]:
        """What rows of equal configurations have in common: all but who measured, when and what."""
        return tuple(v for k, v in self.values.items() if k not in ("source", "release", *MEASURED))

    @cached_property
    def published_s(self) -> float:
        """Seconds of a step."""
        if self.values["step_s"]:
            return float(self.values["step_s"])
        if self.values["tokens_per_s_per_gpu"]:
            return self.tokens / self["gpus"] / float(self.values["tokens_per_s_per_gpu"])
        return model_flops(self) / self["gpus"] / (float(self.values["tflops_per_gpu"]) * 1e12)

    def keys(self, microbatches: int | None = None) -> list[str]:
        """The overrides of `omni plan`; with fewer microbatches than the row has, of a shorter step."""
        values, count = self.values, microbatches or self.microbatches
        tokens = self["mbs"] * self["seq"]
        return [
            "~experiment",
            "system=multiplexed",
            *model_keys(self.model),
            f"model.llm.recompute={values['recompute']}",
            f"cluster={self.cluster}",
            "cluster.memory_bytes=null",
            *(
                ["cluster.ranks_per_node=64"] if self.cluster in GRACE else []
            ),  # of 72: jobs have 64, 128, 256
            f"train.precision={values['precision']}",
            f"launch.ranks={self['gpus']}",
            *(f"layout.llm.{axis}={values[axis]}" for axis in ("tp", "pp", "cp", "ep")),
            f"layout.llm.vpp={values['vpp']}",
            f"pipeline={'interleaved' if self['vpp'] > 1 else 'encode_first'}",
            f"data.microbatch_tokens={tokens}",
            f"data.step_samples={self['dp'] * self['mbs'] * count}",
            "optim.lr=1e-4",
            "train.steps=1",
        ]

    def command(self) -> list[str]:
        """The command that plans the row's step, whole."""
        return [
            "omni",
            "plan",
            "--trace",
            str(self["seq"]),
            "--framework",
            self.values["framework"],
            *self.keys(),
        ]

    def resolved(self, microbatches: int) -> RunSpec:
        """The row's run, of a step of so many microbatches."""
        even = SampleMeta(0, "even", self["seq"] - 1, (), 0)
        samples = self["dp"] * self["mbs"] * microbatches
        trace = [replace(even, id=number) for number in range(samples)]
        framework = framework_called(self.values["framework"])
        return prepare_run(compose_config(self.keys(microbatches)), self["gpus"], trace, framework)


MEASURED = ("tflops_per_gpu", "tokens_per_s_per_gpu", "step_s")


def model_keys(model: str) -> list[str]:
    """The overrides that choose a row's model; no layers that predict further tokens."""
    if model in MODELS:
        return [f"+model/llm={MODELS[model]}", "model.llm.mtp=0"]
    layers, hidden, heads = GPTS[model]
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": 4 * hidden}
    return ["+model/llm=gpt", *(f"model.llm.{key}={value}" for key, value in sizes.items())]


def model_flops(row: Row) -> float:
    """FLOPs of a step as Megatron-LM counts them (Narayanan et al., 2021, appendix): attention whole, though
    half of it is masked; the Llama 3 paper's rows count half.
    """
    llm = compose_config(row.keys()).model.llm
    pairs = row["seq"] * (1 if "GPT" in row.model else 0.5)
    attention = 2 * llm.hidden + 2 * llm.hidden // llm.heads * llm.kv_heads
    layer = llm.hidden * (attention + llm.ffn * (3 if llm.gated else 2))
    linear = llm.layers * layer + llm.hidden * (llm.vocab or 0)
    return 3 * row.tokens * (2 * linear + 4 * llm.layers * llm.hidden * pairs)


def rows_of(path: Path = ROWS) -> list[Row]:
    """Read the rows; the first is number 1."""
    with path.open(newline="") as file:
        return [Row(number, values) for number, values in enumerate(csv.DictReader(file), 1)]


@dataclass(frozen=True)
class Planned:
    """A row, planned: the first domain's steps of some microbatches, as many as are simulated."""

    row: Row
    spec: RunSpec
    domains: tuple[tuple[int, DomainPlan], ...]

    @classmethod
    def of(cls, row: Row) -> "Planned":
        """Plan a row's step, or two short ones that stand for it."""
        lengths = [of * row["pp"] for of in SHORT]
        counts = lengths if row.microbatches > lengths[-1] > SHORT[-1] else [row.microbatches]
        domains = []
        for count in counts:
            spec = row.resolved(count)
            domains.append((count, spec.planner.next_step(1, 0, 0).domain))
        return cls(row, spec, tuple(domains))

    def simulated_s(self, knobs: Knobs) -> float:
        """Seconds of the row's step."""
        spec, row = self.spec, self.row
        config = replace(spec.config, cluster=_with(spec, row, knobs))
        framework = _framework(row, knobs)
        precision = row.values["precision"]
        cluster = framework.on(cluster_of(config.cluster, precision), row["cp"])
        under = framework, config.data.microbatch_tokens // row["cp"]
        table = cost_table(spec.work, spec.encoders, spec.arrangement, cluster, spec.row_bytes, under)
        times = [(count, simulate(domain, table).makespan_ns / 1e9) for count, domain in self.domains]
        (few, short), (more, long) = times[0], times[-1]
        each = (long - short) / (more - few) if more > few else 0.0
        return short + each * (row.microbatches - few)


@cache
def planned(number: int) -> Planned:
    """Return the row of a number, planned once in this process."""
    return Planned.of(rows_of()[number - 1])


def seconds_of(number: int, many: Sequence[Knobs]) -> list[float]:
    """Return the simulated seconds of a row's step under each of some knobs."""
    return [planned(number).simulated_s(knobs) for knobs in many]


def _framework(row: Row, knobs: Knobs) -> Framework:
    framework = framework_called(row.values["framework"])
    if framework.overlap.tensor == 1000:
        return framework
    half = 2 if row.values["framework"] == "megascale" else 1
    return replace(framework, overlap=replace(framework.overlap, tensor=round(knobs.visible / half)))


def _with(spec: RunSpec, row: Row, knobs: Knobs) -> object:
    """The keys of the row's cluster under knobs."""
    cluster, reached = spec.config.cluster, REACHED[row.cluster]
    plain = reached["bf16"] / cluster.flops["bf16"]
    low = reached.get("fp8", 0.0) / cluster.flops.get("fp8", 1)
    products = {"bf16": knobs.products * plain}
    if low:
        products |= dict.fromkeys(LOWER, knobs.products * knobs.low * low)
    shares = replace(
        cluster.efficiency,
        products=products,
        attention=knobs.attention * plain,
        attention_backward=knobs.attention * plain * 2 / 3,
        memory=knobs.memory,
    )
    host = knobs.grace if row.cluster in GRACE else 1.0
    return replace(
        cluster,
        efficiency=shares,
        launch_ns=round(knobs.launch_ns * host),
        dispatch_ns=round(knobs.dispatch_ns * host),
    )
