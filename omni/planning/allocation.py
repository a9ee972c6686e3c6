"""How many ranks encode beside the LLM where nobody says: as many as keep it busy. Pure.

After DistTrain's allocation of ranks to modules (Zhang et al., arXiv 2408.04275), of which this is the steady
phase: a step takes what the slower of both takes, and both take least where neither waits. There layouts of
all modules are searched as well and how the pipeline fills counts; here the LLM's and the encoders' layout
are given, and whole replicas of the LLM give ranks away. Entrain asks the same of all samples of a step
instead of a few (Jang and Chowdhury, arXiv 2605.27918): so is it done here.
"""

from collections.abc import Callable, Mapping
from math import lcm

from omni.config import LayoutConfig, LLMLayoutConfig, PlacementConfig
from omni.planning.choice import BESIDE, PLACEMENT, Keys
from omni.planning.run_spec import RunSpec
from parallel.layout import Layout, LayoutError, arrange
from parallel.placements import PlacementPolicy
from parallel.policy import find


def allocated(
    placement: PlacementConfig,
    layout: LayoutConfig,
    world: int,
    encoder_tp: Mapping[str, int],
    make: Callable[[int], RunSpec],
    cursor: int,
) -> Keys:
    """Return `placement.ranks` for the samples of the step that begins at `cursor` of the stream, where the
    placement takes ranks beside the LLM and nobody gave their number; else nothing. `make` prepares a run of
    so many ranks that all encode; `encoder_tp` are the ranks of a copy of each encoder, by name.

    Raises:
        LayoutError: as `ranks_beside`.
    """
    policy, own = find(PlacementPolicy, placement.policy, PLACEMENT), layout.llm
    if not policy.beside or placement.ranks is not None:
        return {}
    domain = layout.domain or 1
    fewest = ranks_beside(world, own, encoder_tp, policy, domain)
    if own.dp is not None:
        return {BESIDE: fewest}
    replica = own.tp * own.cp * own.pp
    work = _work(make(world // replica * replica), cursor)
    return {BESIDE: ranks_beside(world, own, encoder_tp, policy, domain, work)}


def _work(spec: RunSpec, cursor: int) -> tuple[int, int]:
    """Nanoseconds that a step takes a replica of the LLM, of it and of all encoders."""
    planner, costing = spec.planner.world, spec.planner.domain.costing
    taken = planner.take(cursor)
    costs = costing.costs([planner.meta_of(taken, number) for number in range(len(taken))])
    llm, *encoders = costs.ns.sum(0).tolist()
    return llm, sum(encoders)


def ranks_beside(
    world: int,
    own: LLMLayoutConfig,
    encoder_tp: Mapping[str, int],
    placement: PlacementPolicy,
    domain: int = 1,
    work: tuple[int, int] = (1, 0),
) -> int:
    """Return how many of `world` ranks encode, the others being replicas of the LLM split as its `own`
    layout says, in domains of so many of them.

    `work` is that of a step, of the LLM and of all encoders, in the time of a replica: with r replicas and b
    ranks beside them the LLM takes work[0] / r, and encoders work[1] · replica / b. `encoder_tp` are the
    ranks of a copy of each encoder, by name. Of equals, and where there is no such work, it is the fewest
    ranks.

    Raises:
        LayoutError: where no replica can stand beside a rank that encodes, with the nearest number of ranks
            of which some can.
    """
    replica = own.tp * own.cp * own.pp
    llm, encoders = work

    def takes(rest: int) -> float:
        return max(llm * replica / (world - rest), encoders * replica / rest)

    for rest in sorted(_counts(world, own), key=takes):
        if _can_be(world, own, encoder_tp, placement, domain, rest):
            return rest
    tp, do = lcm(*encoder_tp.values()), (own.dp or domain) * replica
    others = (n for n in range(1, world + do + tp + 1) if _fits(n, own, tp, domain))
    nearest = min(others, key=lambda other: abs(other - world))
    raise LayoutError(
        f"launch.ranks={world}: placement.policy={placement.name} encodes beside the LLM, whose replicas "
        f"take {replica} ranks each, and no number of them leaves ranks for whole copies of encoders: "
        f"launch.ranks={nearest} would do, or a smaller layout.llm"
    )


def _counts(world: int, own: LLMLayoutConfig) -> list[int]:
    """Numbers of ranks that replicas leave, ascending."""
    replica = own.tp * own.cp * own.pp
    if own.dp is not None:
        return [world - own.dp * replica] * (world > own.dp * replica)
    return list(range((world - 1) % replica + 1, world, replica))


def _fits(world: int, own: LLMLayoutConfig, tp: int, domain: int) -> bool:
    """Whether some replicas leave whole copies of encoders, for each domain."""
    replica = own.tp * own.cp * own.pp
    return any(rest % tp == 0 and (world - rest) // replica % domain == 0 for rest in _counts(world, own))


def _can_be(
    world: int,
    own: LLMLayoutConfig,
    encoder_tp: Mapping[str, int],
    placement: PlacementPolicy,
    domain: int,
    rest: int,
) -> bool:
    """Whether so many ranks beside the LLM can be arranged."""
    dp = (world - rest) // (own.tp * own.cp * own.pp)
    if dp % domain:
        return False
    try:
        layout = Layout(own.tp, own.cp, dp, own.pp, own.ep, own.vpp or 1, own.zero or 1)
        arrange(layout, encoder_tp, placement, rest, domain)
    except LayoutError:
        return False
    return True
