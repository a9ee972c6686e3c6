"""Process groups of every component, made once, in one order on all ranks.

Each rank creates only the groups it belongs to, so start-up does not grow with the number of groups in the
world. The order of creation follows from the arrangement alone, hence is the same on all ranks.

Invariant: every rank creates the same number of groups. torch names a group that only its members create by
its ranks and by how many groups the process has; members that count differently wait for each other under
different names until they time out. A rank that is not in a group therefore makes one of itself instead, and
so does one that has a group of the same ranks already, for traffic that may share it.

A communicator takes device memory on every rank. So traffic shares one where ranks issue it in one order
anyway: what layers, optimizers and totals do. That of the pipeline, of the boundary and of shared sequences
runs beside it and has its own.
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
    domain: one for each direction of each traffic, so that neither can block the other. `control` is a CPU
    group over all ranks for digests and flags, `saving` another for the thread that writes checkpoints,
    `domain_control` one over the ranks of the domain. `components` holds the groups of the components that
    live on this rank; the `pool` of each connects the ranks that share its sequences.
    """

    world: dist.ProcessGroup
    control: dist.ProcessGroup
    saving: dist.ProcessGroup
    domain_control: dist.ProcessGroup
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    ship: dist.ProcessGroup
    back: dist.ProcessGroup
    components: Mapping[str, ProcessGroupCollection]


def make_groups(arrangement: Arrangement, llm: str, timeout: timedelta, tied: bool = True) -> Groups:
    """Create all groups of this rank; `llm` is the name of the component with stages, whose output may be
    `tied` to its embedding.
    """
    return _groups(_Maker(dist.get_rank(), timeout), arrangement, llm, tied)


@dataclass(frozen=True)
class Counted:
    """Groups with others that a rank has: communicators of its device, groups of its CPU, and all peers."""

    device: int
    cpu: int
    peers: int


def count_groups(arrangement: Arrangement, llm: str, rank: int, tied: bool = True) -> Counted:
    """Return what groups with others `make_groups` creates on a rank."""
    counter = _Counter(rank, timedelta(0))
    _groups(counter, arrangement, llm, tied)
    backends = [backend for backend, _ in counter.made_of]
    peers = sum(size - 1 for _, size in counter.made_of)
    return Counted(backends.count(None), len(backends) - backends.count(None), peers)


def _groups(maker: "_Maker", arrangement: Arrangement, llm: str, tied: bool) -> Groups:
    everyone = range(arrangement.world)
    domain = arrangement.domain_ranks(arrangement.domain(maker.rank))
    mesh = arrangement.mesh
    world = maker.world(everyone)
    forward, backward = maker.axes(mesh, "pp", fresh=True), maker.axes(mesh, "pp", fresh=True)
    collections = {llm: _llm_collection(maker, arrangement, forward, tied)}
    for name, encoder_mesh in arrangement.encoder_meshes.items():
        collections[name] = _encoder_collection(maker, encoder_mesh)
    return Groups(
        world=world,
        control=maker.own(everyone, backend="gloo"),
        saving=maker.own(everyone, backend="gloo"),
        domain_control=maker.own(domain, backend="gloo"),
        forward=forward,
        backward=backward,
        ship=maker.own(domain),
        back=maker.own(domain),
        components={name: pg for name, pg in collections.items() if pg is not None},
    )


class _Maker:
    """Creates groups of this rank; those of the same ranks are made once, unless they are to be apart."""

    def __init__(self, rank: int, timeout: timedelta) -> None:
        self.rank = rank
        self.timeout = timeout
        self.made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def own(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        members = list(ranks) if self.rank in ranks else [self.rank]
        return dist.new_group(members, self.timeout, backend, use_local_synchronization=True)

    def world(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The default group, which has all `ranks`."""
        world = dist.group.WORLD
        assert world is not None
        assert world.size() == len(ranks)
        self.made[tuple(ranks)] = world
        return world

    def shared(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The group of these ranks, this one among them, for all traffic that is in one order."""
        members = tuple(ranks) if self.rank in ranks else (self.rank,)
        if members in self.made:
            self.own((self.rank,))  # all ranks keep count alike
        else:
            self.made[members] = self.own(members)
        return self.made[members]

    def axes(self, mesh: Mesh, *names: str, fresh: bool = False) -> dist.ProcessGroup:
        """The group of this rank along axes of a mesh; `fresh` for one that no other traffic uses."""
        ranks = sorted(mesh.group(self.rank, *names)) if self.rank in mesh else ()
        return self.own(ranks) if fresh else self.shared(ranks)


class _Counter(_Maker):
    """Creates nothing, and notes backend and size of each group that has others."""

    def __init__(self, rank: int, timeout: timedelta) -> None:
        super().__init__(rank, timeout)
        self.made_of: list[tuple[str | None, int]] = []

    def own(self, ranks: Sequence[int], backend: str | None = None) -> Any:
        if self.rank in ranks and len(ranks) > 1:
            self.made_of.append((backend, len(ranks)))

    def world(self, ranks: Sequence[int]) -> Any:
        self.made[tuple(ranks)] = self.own(ranks)


def _llm_collection(
    maker: _Maker, arrangement: Arrangement, pipeline: dist.ProcessGroup, tied: bool
) -> ProcessGroupCollection | None:
    """The groups megatron asks for, and `pool`, which is ours: megatron sees no context parallelism. Of its
    `pipeline` it asks for places alone: messages between stages are the engine's.
    """
    mesh, experts = arrangement.mesh, arrangement.expert_mesh
    pg = _collection(maker, mesh)
    pg.pool = maker.axes(mesh, "cp", "replica", fresh=True)
    pg.pp, pg.mp = pipeline, maker.axes(mesh, "tp", "pp")
    pg.ep = pg.tp_ep = maker.axes(experts, "ep")
    pg.expt_tp = maker.axes(experts)
    pg.expt_dp = pg.intra_expt_dp = maker.axes(experts, "edp")
    pg.tp_ep_pp = maker.axes(experts, "ep", "pp") if arrangement.llm.ep > 1 else pipeline
    pg.intra_dist_opt = maker.axes(mesh, "tp", "cp", "dp", "pp")
    # The first and last stages share the word embedding when it is tied to the output.
    stages = mesh.group(maker.rank, "pp") if maker.rank in mesh else ()
    ends = tuple(dict.fromkeys((stages[0], stages[-1]))) if stages else ()
    embd = maker.own(ends) if tied else maker.own(())
    pg.embd = embd if tied and maker.rank in ends else None
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
