"""Process groups of every component, made once, in one order on all ranks.

Each rank creates only the groups it belongs to, so start-up does not grow with the number of groups in the
world. The order of creation follows from the arrangement alone, hence is the same on all ranks.

Invariant: every rank creates the same number of groups. torch names a group that only its members create by
its ranks and by how many groups the process has; members that count differently wait for each other under
different names until they time out. A rank that is not in a group therefore makes one of itself instead.

A communicator takes device memory on every rank. So none is made that nothing is sent over, and what is
summed over the world, always in one order, goes over torch's default group.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallel.control_tree import Tree
from parallel.layout import Arrangement, Mesh, Staged
from parallel.megatron import ProcessGroupCollection


@dataclass(frozen=True)
class Groups:
    """Communicators of one rank.

    `forward` and `backward` connect the stages of this rank's pipeline, `ship` and `back` all ranks of its
    domain: one for each direction of each traffic, so that neither can block the other. `components` holds
    the groups of the components that live on this rank; the `pool` of each connects the ranks that share its
    sequences. Where the LLM's weights are partitioned, `partition` connects the same ranks for these, and
    `domains` those that hold the same partitions. What ranks tell each other beside goes through
    `parallel.control`.
    """

    world: dist.ProcessGroup
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    ship: dist.ProcessGroup
    back: dist.ProcessGroup
    components: Mapping[str, ProcessGroupCollection]


def make_groups(arrangement: Arrangement, llm: Staged, timeout: timedelta) -> Groups:
    """Create all groups of this rank that something is sent over."""
    return _groups(_Maker(dist.get_rank(), timeout), arrangement, llm)


@contextlib.contextmanager
def node_group(tree: Tree, timeout: timedelta) -> Iterator[dist.ProcessGroup]:
    """Connect the ranks of a node by gloo, for what they hand each other in host memory before training. All
    ranks of the world come here, those that are alone on their node too, so that all count groups alike.
    """
    members = list(tree.node(dist.get_rank()))
    group = dist.new_group(members, timeout, backend="gloo", use_local_synchronization=True)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def count_groups(arrangement: Arrangement, llm: Staged, rank: int) -> tuple[int, int]:
    """Return how many groups with others `make_groups` gives a rank, and of how many peers in sum."""
    counter = _Counter(rank, timedelta(0))
    _groups(counter, arrangement, llm)
    return len(counter.peers), sum(counter.peers)


@dataclass(frozen=True)
class Places:
    """Where a rank stands along axes of a mesh, in place of a group over which nothing is sent: megatron asks
    for one and keeps it. Of a use torch would say that this is none.
    """

    ranks: tuple[int, ...]
    me: int

    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    def rank(self) -> int:
        """Which of them this one is."""
        return self.ranks.index(self.me)


def _groups(maker: "_Maker", arrangement: Arrangement, llm: Staged) -> Groups:
    everyone = range(arrangement.world)
    domain = arrangement.global_ranks(arrangement.domain(maker.rank))
    mesh = arrangement.mesh
    world = maker.world(everyone)
    forward, backward = maker.axes(mesh, "pp", fresh=True), maker.axes(mesh, "pp", fresh=True)
    collections = {llm.name: _llm_collection(maker, arrangement, llm, forward)}
    for name, encoder_mesh in arrangement.encoder_meshes.items():
        collections[name] = _encoder_collection(maker, encoder_mesh)
    return Groups(
        world=world,
        forward=forward,
        backward=backward,
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

    def world(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The default group, which has all `ranks`."""
        world = dist.group.WORLD
        assert world is not None
        assert world.size() == len(ranks), f"a world of {world.size()}, and not {len(ranks)}, ranks"
        return world

    def places(self, mesh: Mesh, *names: str) -> Places:
        """Where this rank stands along axes of a mesh."""
        ranks = mesh.group(self.rank, *names) if self.rank in mesh else (self.rank,)
        return Places(tuple(sorted(ranks)), self.rank)

    def axes(self, mesh: Mesh, *names: str, fresh: bool = False) -> dist.ProcessGroup:
        """The group of this rank along axes of a mesh; `fresh` for one that no other traffic uses."""
        key = (id(mesh), mesh.axes(names))
        ranks = sorted(mesh.group(self.rank, *names)) if self.rank in mesh else []
        if fresh:
            return self.own(ranks)
        if key not in self.made:
            # Whether it was made before depends on the mesh alone, so all ranks keep count alike.
            self.made[key] = self.own(ranks)
        return self.made[key]


class _Counter(_Maker):
    """Creates nothing, and notes the number of peers in each group that has others."""

    def __init__(self, rank: int, timeout: timedelta) -> None:
        super().__init__(rank, timeout)
        self.peers: list[int] = []

    def own(self, ranks: Sequence[int]) -> Any:
        if self.rank in ranks and len(ranks) > 1:
            self.peers.append(len(ranks) - 1)

    def world(self, ranks: Sequence[int]) -> Any:
        return self.own(ranks)


def _llm_collection(
    maker: _Maker, arrangement: Arrangement, llm: Staged, forward: dist.ProcessGroup
) -> ProcessGroupCollection | None:
    """The groups megatron asks for, and `pool`, `partition` and `domains`, which are ours: megatron sees no
    context parallelism. Of the pipeline it learns which stage this is; messages between stages are the
    engine's.
    """
    mesh, experts = arrangement.mesh, arrangement.expert_mesh
    pg = _collection(maker, mesh)
    pg.pool = maker.axes(mesh, "cp", "replica", fresh=True)
    pg.partition = pg.domains = None
    if arrangement.partitions > 1:
        # Of its own: weights are gathered while sequences are exchanged.
        pg.partition = maker.axes(mesh, "cp", "replica", fresh=True)
        pg.domains = maker.axes(mesh, "domain")
    pg.pp = forward
    pg.expt_tp = maker.axes(experts)
    if llm.experts:
        pg.ep = pg.tp_ep = maker.axes(experts, "ep")
        pg.expt_dp = maker.axes(experts, "edp")
        pg.tp_dp_cp = maker.axes(mesh, "tp", *_replicated(mesh))
    else:
        pg.ep = pg.tp_ep = maker.axes(experts)
        pg.expt_dp = pg.dp
        pg.tp_dp_cp = maker.places(mesh, "tp", *_replicated(mesh))
    # The first and last stages share the word embedding when it is tied to the output.
    stages = mesh.group(maker.rank, "pp") if maker.rank in mesh else ()
    ends = tuple(dict.fromkeys((stages[0], stages[-1]))) if stages else ()
    pg.embd = maker.own(ends) if llm.tied else None
    if maker.rank not in ends:
        pg.embd = None
    pg.pos_embd = pg.expt_tp if stages and maker.rank == stages[0] else None
    return pg if maker.rank in mesh else None


def _encoder_collection(maker: _Maker, mesh: Mesh) -> ProcessGroupCollection | None:
    pg = _collection(maker, mesh)
    pg.partition = pg.domains = None
    pg.pool = maker.axes(mesh, "slot", fresh=True)
    pg.pp = pg.ep = pg.tp_ep = pg.expt_tp = pg.embd = pg.pos_embd = maker.axes(mesh)
    pg.expt_dp = pg.dp
    pg.tp_dp_cp = maker.places(mesh, "tp", "dp")
    return pg if maker.rank in mesh else None


def _collection(maker: _Maker, mesh: Mesh) -> ProcessGroupCollection:
    """Groups of the dense parts. Gradients are summed over all ranks that differ in tokens: cp and dp."""
    pg = ProcessGroupCollection()
    pg.tp = pg.tp_cp = maker.axes(mesh, "tp")
    pg.cp = maker.axes(mesh)
    pg.dp = pg.dp_cp = maker.axes(mesh, *_replicated(mesh))
    return pg


def _replicated(mesh: Mesh) -> tuple[str, ...]:
    return ("cp", "dp") if "cp" in mesh.sizes else ("dp",)
