"""How many ranks encode beside the LLM: as many as keep it busy. Pure.

After DistTrain's allocation of ranks to modules (Zhang et al., arXiv 2408.04275), of which this is the steady
phase: a step takes what the slower of both takes, and both take least where neither waits. There layouts of
all modules are searched as well and how the pipeline fills counts; here the LLM's and the encoders' layout
are given, and whole replicas of the LLM give ranks away. Entrain asks the same of all samples of a step
instead of a few (Jang and Chowdhury, arXiv 2605.27918): so is it done here.
"""

from collections.abc import Iterator, Mapping
from math import lcm

from omni.config import LLMLayoutConfig
from parallel.layout import Layout, LayoutError, arrange
from parallel.placements import PlacementPolicy


def ranks_beside(
    world: int,
    own: LLMLayoutConfig,
    slots: Mapping[str, int],
    placement: PlacementPolicy,
    work: tuple[int, int],
) -> int:
    """Return how many of `world` ranks encode, the others being replicas of the LLM split as its `own`
    layout says.

    `work` is that of a step, of the LLM and of all encoders, in the time of a replica: with r replicas and b
    ranks beside them the LLM takes work[0] / r, and encoders work[1] · replica / b. `slots` are the ranks of
    a copy of each encoder, by name. Of equals the one with the most replicas is taken.

    Raises:
        LayoutError: where no replica can stand beside a rank that encodes, with the ranks that would do.
    """
    replica = own.tp * own.cp * own.pp
    possible = list(_possible(world, own, slots, placement))
    if not possible:
        least = replica + lcm(*slots.values())
        raise LayoutError(
            f"launch.ranks={world}: placement.policy={placement.name} encodes beside the LLM, whose replicas "
            f"take {replica} ranks each, and no number of them leaves ranks for whole copies of encoders: "
            f"launch.ranks={least} would do, or a smaller layout.llm"
        )
    llm, encoders = work
    return min(possible, key=lambda rest: max(llm / ((world - rest) // replica), encoders * replica / rest))


def _possible(
    world: int, own: LLMLayoutConfig, slots: Mapping[str, int], placement: PlacementPolicy
) -> Iterator[int]:
    """Numbers of ranks beside the LLM that can be arranged, ascending."""
    replica = own.tp * own.cp * own.pp
    for rest in range((world - 1) % replica + 1, world, replica):
        try:
            layout = Layout(own.tp, own.cp, (world - rest) // replica, own.pp, own.ep, own.parts)
            arrange(layout, slots, placement, rest)
        except LayoutError:
            continue
        yield rest
