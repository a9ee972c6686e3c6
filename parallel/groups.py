"""Process groups of every component, made once, in one order on all ranks.

Each rank creates only the groups it belongs to, so start-up does not grow with the number of groups in the
world. The order of creation follows from the arrangement alone, hence is the same on all ranks.

Invariant: every rank creates the same number of groups. torch names a group that only its members create by
its ranks and by how many groups the process has; members that count differently wait for each other under
different names until they time out. A rank that is not in a group therefore makes one of itself instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallel.layout import Arrangement, Mesh
from parallel.megatron import ProcessGroupCollection


@dataclass(frozen=True)
class Groups:
    """Communicators of one rank.

    `forward` and `backward` connect the stages of this rank's pipeline, `ship` and `back` all ranks of its
    domain: one for each direction of each traffic, so that neither can block the other. `components` holds
    the groups of the components that live on this rank; the `pool` of each connects the ranks that share its
    sequences. What ranks tell each other beside goes through `parallel.control`.
    """

    world: dist.ProcessGroup
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    ship: dist.ProcessGroup
    back: dist.ProcessGroup
    components: Mapping[str, ProcessGroupCollection]


def make_groups(arrangement: Arrangement, llm: str, timeout: timedelta) -> Groups:
    """Create all groups of this rank; `llm` is the name of the component with stages."""
    return _groups(_Maker(dist.get_rank(), timeout), arrangement, llm)


def count_groups(arrangement: Arrangement, llm: str, rank: int) -> tuple[int, int]:
    """Return how many groups with others `make_groups` creates on a rank, and of how many peers in sum."""
    counter = _Counter(rank, timedelta(0))
    _groups(counter, arrangement, llm)
    return len(counter.peers), sum(counter.peers)


def _groups(maker: "_Maker", arrangement: Arrangement, llm: str) -> Groups:
    everyone = range(arrangement.world)
    domain = arrangement.domain_ranks(arrangement.domain(maker.rank))
    mesh = arrangement.mesh
    collections = {llm: _llm_collection(maker, arrangement)}
    for name, encoder_mesh in arrangement.encoder_meshes.items():
        collections[name] = _encoder_collection(maker, encoder_mesh)
    return Groups(
        world=maker.own(everyone),
        forward=maker.axes(mesh, "pp", fresh=True),
        backward=maker.axes(mesh, "pp", fresh=True),
        ship=maker.own(domain),
        back=maker.own(domain),
        components={name: pg for name, pg in collections.items() if pg is not None},
    )


class _Maker:
    """Creates groups of this rank; groups along the same axes of a mesh are made once."""

    def __init__(self, rank: int, timeout: timedelta) -> None:
        self.rank = rank
        self.timeout = timeout
        self.made: dict[tuple[int, tuple[str, ...]], dist.ProcessGroup] = {}

    def own(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        members = list(ranks) if self.rank in ranks else [self.rank]
        return dist.new_group(members, self.timeout, use_local_synchronization=True)

    def axes(self, mesh: Mesh, *names: str, fresh: bool = False) -> dist.ProcessGroup:
        """The group of this rank along axes of a mesh; `fresh` for one that no other traffic uses."""
        key = (id(mesh), mesh.axes(names))
        if fresh or key not in self.made:
            # Whether it was made before depends on the mesh alone, so all ranks keep count alike.
            ranks = mesh.group(self.rank, *names) if self.rank in mesh else ()
            self.made[key] = self.own(sorted(ranks))
        return self.made[key]


class _Counter(_Maker):
    """Creates nothing, and notes the number of peers in each group that has others."""

    def __init__(self, rank: int, timeout: timedelta) -> None:
        super().__init__(rank, timeout)
        self.peers: list[int] = []

    def own(self, ranks: Sequence[int]) -> Any:
        if self.rank in ranks and len(ranks) > 1:
            self.peers.append(len(ranks) - 1)


def _llm_collection(maker: _Maker, arrangement: Arrangement) -> ProcessGroupCollection | None:
    """The groups megatron asks for, and `pool`, which is ours: megatron sees no context parallelism."""
    mesh, experts = arrangement.mesh, arrangement.expert_mesh
    pg = _collection(maker, mesh)
    pg.pool = maker.axes(mesh, "cp", "replica", fresh=True)
    pg.pp, pg.mp = maker.axes(mesh, "pp"), maker.axes(mesh, "tp", "pp")
    pg.ep = pg.tp_ep = maker.axes(experts, "ep")
    pg.expt_tp = maker.axes(experts)
    pg.expt_dp = pg.intra_expt_dp = maker.axes(experts, "edp")
    pg.tp_ep_pp = maker.axes(experts, "ep", "pp")
    pg.intra_dist_opt = maker.axes(mesh, "tp", "cp", "dp", "pp")
    # The first and last stages share the word embedding when it is tied to the output.
    stages = mesh.group(maker.rank, "pp") if maker.rank in mesh else ()
    ends = tuple(dict.fromkeys((stages[0], stages[-1]))) if stages else ()
    embd = maker.own(ends)
    pg.embd = embd if maker.rank in ends else None
    pg.pos_embd = pg.expt_tp if stages and maker.rank == stages[0] else None
    return pg if maker.rank in mesh else None


def _encoder_collection(maker: _Maker, mesh: Mesh) -> ProcessGroupCollection | None:
    pg = _collection(maker, mesh)
    pg.pool = maker.axes(mesh, "slot", fresh=True)
    pg.pp = pg.ep = pg.tp_ep = pg.expt_tp = pg.tp_ep_pp = pg.embd = pg.pos_embd = maker.axes(mesh)
    pg.mp = pg.tp
    pg.expt_dp = pg.intra_expt_dp = pg.dp
    pg.intra_dist_opt = maker.axes(mesh, "tp", "dp")
    return pg if maker.rank in mesh else None


def _collection(maker: _Maker, mesh: Mesh) -> ProcessGroupCollection:
    """Groups of the dense parts. Gradients are summed over all ranks that differ in tokens: cp and dp."""
    replicated = ("cp", "dp") if "cp" in mesh.sizes else ("dp",)
    pg = ProcessGroupCollection()
    pg.tp = pg.tp_cp = maker.axes(mesh, "tp")
    pg.cp = maker.axes(mesh)
    pg.dp = pg.dp_cp = pg.intra_dp_cp = maker.axes(mesh, *replicated)
    pg.tp_dp_cp = maker.axes(mesh, "tp", *replicated)
    pg.inter_dist_opt = None
    return pg
