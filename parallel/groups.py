"""Process groups of every component, made once, in one order on all ranks.

Each rank creates only the groups it belongs to, so start-up does not grow with the number of groups in the
world. The order of creation follows from the layout alone, hence is the same on all members of each group.

Invariant: every rank creates the same number of groups. torch names a group that only its members create by
its ranks and by how many groups the process has; members that count differently wait for each other under
different names until they time out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from parallel.layout import Layout
from parallel.megatron import ProcessGroupCollection


@dataclass(frozen=True)
class Groups:
    """Communicators of one rank.

    `forward`, `backward`, `ship` and `back` connect the ranks of a replica, one for each direction of each
    traffic so that neither can block the other; `control` is a CPU group over all ranks for digests, flags
    and checkpoints, `replica_control` one over the ranks of the replica.
    """

    world: dist.ProcessGroup
    control: dist.ProcessGroup
    replica_control: dist.ProcessGroup
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    ship: dist.ProcessGroup
    back: dist.ProcessGroup
    components: Mapping[str, ProcessGroupCollection]


def make_groups(layouts: Mapping[str, Layout], llm: str, timeout: timedelta) -> Groups:
    """Create all groups of this rank. `layouts` maps components to layouts; `llm` names the one with stages.

    Every component's layout must cover the whole world.
    """
    rank = dist.get_rank()
    maker = _Maker(rank, timeout)
    components = {name: _collection(maker, layout) for name, layout in layouts.items()}
    replica = layouts[llm].group(rank, "tp", "cp", "pp")
    return Groups(
        world=maker.shared(range(dist.get_world_size())),
        control=maker.own(range(dist.get_world_size()), backend="gloo"),
        replica_control=maker.own(replica, backend="gloo"),
        forward=maker.own(replica),
        backward=maker.own(replica),
        ship=maker.own(replica),
        back=maker.own(replica),
        components=components,
    )


class _Maker:
    """Creates groups of this rank; `shared` returns the same communicator for the same ranks."""

    def __init__(self, rank: int, timeout: timedelta) -> None:
        self.rank = rank
        self.timeout = timeout
        self.made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def own(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        assert self.rank in ranks, f"rank {self.rank} makes a group of {list(ranks)}"
        return dist.new_group(list(ranks), self.timeout, backend, use_local_synchronization=True)

    def shared(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        key = tuple(ranks)
        if key not in self.made:
            self.made[key] = self.own(key)
        return self.made[key]


def _collection(maker: _Maker, layout: Layout) -> ProcessGroupCollection:
    """The groups megatron asks for. Experts are not split yet, so their data-parallel ranks are tp·cp·dp."""

    def group(*axes: str) -> dist.ProcessGroup:
        return maker.shared(layout.group(maker.rank, *axes))

    pg = ProcessGroupCollection()
    pg.tp, pg.cp, pg.pp, pg.dp = group("tp"), group("cp"), group("pp"), group("dp")
    pg.dp_cp, pg.mp, pg.tp_cp = group("dp", "cp"), group("tp", "pp"), group("tp", "cp")
    pg.tp_dp_cp = group("tp", "dp", "cp")
    pg.ep = pg.expt_tp = pg.tp_ep = group()
    pg.expt_dp, pg.tp_ep_pp = group("tp", "dp", "cp"), group("pp")
    pg.intra_dp_cp, pg.intra_expt_dp, pg.inter_dist_opt = pg.dp_cp, pg.expt_dp, None
    pg.intra_dist_opt = maker.shared(range(layout.world))
    # The first and last stages share the word embedding when it is tied to the output.
    stages = layout.group(maker.rank, "pp")
    ends = tuple(dict.fromkeys((stages[0], stages[-1])))
    if maker.rank in ends:
        pg.embd = maker.shared(ends)
    else:
        maker.own((maker.rank,))  # in place of the group of the ends, to keep count
        pg.embd = None
    pg.pos_embd = pg.ep if maker.rank == stages[0] else None
    return pg
