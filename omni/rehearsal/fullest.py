"""The rank that holds most, and whether its device can."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from omni.config import ConfigError
from omni.planning.run_spec import RunSpec
from omni.rehearsal.memory import model_peak
from omni.rehearsal.rank_work import rank_work
from pipeline.plan import StepPlan

GIB = 1 << 30
_STATE = ("weights", "gradients", "optimizer")


@dataclass(frozen=True)
class Peak:
    """The bytes of each kind that a rank of the world holds when it holds most: `position` of the domain of
    `plan`, while it runs the op `at`. Kinds are those of `Footprint`.
    """

    plan: StepPlan
    position: int
    rank: int
    held: Mapping[str, int]
    at: str

    @property
    def bytes(self) -> int:
        """All that it holds."""
        return sum(self.held.values())


def fullest_rank(spec: RunSpec, plans: Iterable[StepPlan]) -> Peak:
    """Return the rank that holds most of the domains of `plans`.

    Positions of a team run the same ops on the same layers: of each team its first rank is modelled, of the
    fullest team all.
    """
    found = max((fullest_team(spec, plan) for plan in plans), key=lambda peak: peak.bytes)
    return fullest_in_team(spec, found)


def fullest_team(spec: RunSpec, plan: StepPlan) -> Peak:
    """Return the first rank of the team that holds most of a plan's domain."""
    return _fullest(spec, plan, range(0, plan.domain.num_ranks, plan.domain.team))


def fullest_in_team(spec: RunSpec, first: Peak) -> Peak:
    """Return the rank that holds most of a team, of which `first` is the first."""
    return _fullest(spec, first.plan, range(first.position, first.position + first.plan.domain.team))


def _fullest(spec: RunSpec, plan: StepPlan, positions: Iterable[int]) -> Peak:
    ranks = spec.arrangement.domain_ranks(plan.number)
    peaks = (
        Peak(plan, at, ranks[at], *model_peak(spec, rank_work(spec, plan, ranks[at]))) for at in positions
    )
    return max(peaks, key=lambda peak: peak.bytes)


def check_memory(spec: RunSpec, fullest: Peak) -> None:
    """Refuse a rank that holds more than a device of the cluster can. A cluster may not say what that is.

    Raises:
        ConfigError: naming the rank, what it holds, what that is made of, and the remedy.
    """
    most = spec.cluster.memory_bytes
    if most is None or fullest.bytes <= most:
        return
    by_size = sorted(fullest.held.items(), key=lambda item: -item[1])
    made_of = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in by_size)
    raise ConfigError(
        f"rank {fullest.rank} ({place(spec, fullest.rank)}) would hold {fullest.bytes / GIB:.1f} GiB at "
        f"{fullest.at}, more than the {most / GIB:.1f} GiB of cluster.memory_bytes={most} "
        f"({spec.cluster.name}): {made_of}. {_remedy(spec, fullest)}"
    )


def _remedy(spec: RunSpec, fullest: Peak) -> str:
    """What to change: what is kept for each token, or what is kept for each parameter, if that is more."""
    sizes = spec.config.layout.llm
    if 2 * sum(fullest.held[kind] for kind in _STATE) > fullest.bytes:
        return f"Raise layout.llm.tp={sizes.tp} or pp={sizes.pp}, or launch.ranks={spec.arrangement.world}"
    recompute = "" if spec.config.model.llm.recompute == "full" else "set model.llm.recompute=full, "
    return (
        f"Lower data.microbatch_tokens={spec.config.data.microbatch_tokens}, {recompute}"
        f"or raise layout.llm.cp={sizes.cp} or tp={sizes.tp}"
    )


def place(spec: RunSpec, rank: int) -> str:
    """Return where a rank is, in words: its coordinates, or that it is beside the LLM."""
    if rank not in spec.arrangement.mesh:
        return "encoders only"
    at = spec.arrangement.mesh.coordinates(rank)
    return ", ".join(f"{axis} {at[axis]}" for axis in ("tp", "cp", "dp", "pp"))
