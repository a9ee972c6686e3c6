"""What passes keep on the hosts of ranks: inputs of layers that wait there from a forward to its backward.

For example, 28 of 30 layers of an encoder take in 6 MiB each, and a rank encodes 400 times before anything
goes back: it has 66 GiB on its host, a node of eight ranks 525.
"""

from dataclasses import fields

from omni.config import ClusterConfig, ConfigError, ModelConfig
from omni.models.blocks import EncoderPart
from omni.models.stack import Stack
from omni.planning.choice import KEEPS, OF_ENCODERS, OFFLOAD
from omni.planning.memory import model_host
from omni.planning.memory_advice import GIB
from omni.planning.rank_work import rank_work
from omni.planning.run_spec import RunSpec
from omni.planning.workload import Workload
from parallel.costs import CostTable
from pipeline.plan import StepPlan


def offloaded(model: ModelConfig) -> dict[str, int]:
    """Return the keys that send inputs of layers to the host, and of how many layers."""
    keys = {"model.llm.offload": model.llm.offload}
    for name, options in model.encoders.items():
        keys[f"{OF_ENCODERS}{name}{OFFLOAD}"] = options.get("offload") or 0
    return {key: count for key, count in keys.items() if count}


def check_host_link(model: ModelConfig, cluster: ClusterConfig) -> None:
    """Refuse to send inputs of layers over a link of which nobody has said how fast it is.

    Raises:
        ConfigError: naming the keys.
    """
    for key, count in offloaded(model).items():
        if cluster.host_link_bytes_per_s is None:
            raise ConfigError(
                f"{key}={count}, but cluster={cluster.name} does not say how fast a rank copies to its host: "
                "set cluster.host_link_bytes_per_s, or offload=0"
            )


def keeps_nothing(precision: str, cluster: ClusterConfig) -> bool:
    """Whether kernels of attention put out nothing that is kept: those of GPUs in single precision."""
    return precision == "fp32" and cluster.device == "cuda"


def check_kept(model: ModelConfig, cluster: ClusterConfig, precision: str) -> None:
    """Refuse to keep what attention puts out where its kernels are not kept: plans would count on it.

    Raises:
        ConfigError: naming the keys.
    """
    keys = {f"{OF_ENCODERS}{name}{KEEPS}": own.get(KEEPS[1:]) for name, own in model.encoders.items()}
    for key, kept in {"model.llm.keep_attention": model.llm.keep_attention, **keys}.items():
        if kept and keeps_nothing(precision, cluster):
            raise ConfigError(
                f"{key}={kept}: with train.precision=fp32 GPUs have no kernel of attention that is kept: set "
                "train.precision=bf16, or this to false"
            )


def most_on_host(spec: Workload, table: CostTable, plan: StepPlan) -> int:
    """Return the most bytes that passes of a rank of a plan's domain keep on its host at once: what the first
    ranks of teams do, of which all ranks keep about the same.
    """
    if not any(cost.copies for cost in table.parts.values()):
        return 0
    ranks = spec.arrangement.global_ranks(plan.number)[:: plan.domain.team]
    return max(on_host(spec, plan, rank) for rank in ranks)


def on_host(spec: Workload, plan: StepPlan, rank: int) -> int:
    """Return the most bytes that passes of a rank keep on its host at once."""
    return model_host(rank_work(spec, plan, rank, messages=False))


def most_sent(spec: RunSpec) -> dict[str, int]:
    """The keys that say how many inputs of encoders' layers go to the host, where these are computed anew and
    hosts are known, and the most that is worth it: the last layer's would come back behind no other.
    """
    if spec.cluster.host_bytes is None or spec.cluster.host_per_s is None:
        return {}
    layers = _layers_with(spec, OFFLOAD)
    return {f"{OF_ENCODERS}{name}{OFFLOAD}": count - 2 for name, count in layers.items() if count > 2}


def may_keep(spec: RunSpec) -> list[str]:
    """The keys that have encoders' layers, where these are computed anew, keep what attention puts out: none
    where it is not known what devices hold, nor where no kernel is kept.
    """
    if spec.cluster.memory_bytes is None or keeps_nothing(spec.config.train.precision, spec.config.cluster):
        return []
    return [f"{OF_ENCODERS}{name}{KEEPS}" for name in _layers_with(spec, KEEPS)]


def _layers_with(spec: RunSpec, key: str) -> dict[str, int]:
    """How many layers each encoder has, of those that compute them anew and have a key that ends so."""
    found = {}
    for name, encoder in spec.encoders.items():
        part = spec.work[name]
        stack = part.stack if isinstance(part, EncoderPart) else None
        known = any(field.name == key.lstrip(".") for field in fields(encoder.Config))
        if known and isinstance(stack, Stack) and stack.recompute == "full":
            found[name] = stack.layers
    return found


def check_host(spec: RunSpec, plan: StepPlan, held: int) -> None:
    """Refuse to have a rank keep so many bytes on its host, if that is more than its share of it.

    Raises:
        ConfigError: naming the keys, what is held, and the remedy.
    """
    most, keys = spec.cluster.host_bytes, offloaded(spec.config.model)
    if most is None or held <= most:
        return
    raise ConfigError(
        f"a rank of domain {plan.number} would keep {held / GIB:.1f} GiB on its host in step {plan.step}, "
        f"more than the {most / GIB:.1f} GiB of cluster.host_memory_bytes={most} ({spec.cluster.name}): "
        f"lower {' or '.join(f'{key}={count}' for key, count in keys.items())}, or have fewer samples pass "
        "at a time: set pipeline.rounds, or launch more ranks"
    )
