"""What goes through the first rank of a run of any size, counted from the layout.

On 16,384 ranks of the 70B (tp8·pp4, 8 ranks a node) a rank exchanges its step's vector with 10 others at
most. Beside that two things meet at the first rank: the index of a checkpoint that is committed, an entry for
each piece of a parameter that a rank's file holds; and, as ranks start, their connections to the store that
its agent keeps.
"""

from dataclasses import dataclass

from omni.models.llm import NAME as LLM
from omni.planning.run_spec import RunSpec
from parallel.control_tree import Tree
from parallel.learning import sums_of
from pipeline.laps import CAUSES

ENTRY_BYTES, RANK_BYTES = 110, 200
"""Bytes in an index of an entry, and of a rank beside its entries: means of indexes that were written."""
_NUMBER = 8  # bytes
_BESIDE = 64  # bytes of a vector's message that are no numbers
_REQUESTS_BESIDE = (
    12  # of a rank to the store that are not for a group: torch's own as it starts, and control's
)


@dataclass(frozen=True)
class AtScale:
    """Of a step's vector: `connections` of a rank, at most, which are also the messages that it sends and
    receives; messages that follow each other, and bytes of one. Of a commit: entries of the index, and its
    bytes at the first rank. Of a start: connections from other nodes to the first, and requests to its store.
    """

    connections: int
    depth: int
    vector_bytes: int
    entries: int
    index_bytes: int
    store_connections: int
    store_requests: int


def at_scale(spec: RunSpec, groups: int) -> AtScale:
    """Count for the ranks of `spec`, each of which makes so many `groups` with others."""
    world, per_node = spec.arrangement.world, spec.config.cluster.ranks_per_node
    tree = Tree(world, min(world, per_node))
    entries = sum(_entries(spec, name) for name in spec.work)
    return AtScale(
        connections=max(map(tree.connections, range(world))),
        depth=tree.depth,
        vector_bytes=_BESIDE + _NUMBER * _numbers(spec),
        entries=entries,
        index_bytes=ENTRY_BYTES * entries + RANK_BYTES * world,
        store_connections=max(0, world - per_node),
        store_requests=world * (groups + _REQUESTS_BESIDE),
    )


def _numbers(spec: RunSpec) -> int:
    """Numbers of the longest vector: `omni/training/telling.py` names them."""
    components, parts = len(spec.components), len(spec.table.parts)
    plan = 3 + (2 * components + 1) + 2 * (2 * components + 1)
    step = len(CAUSES) + 1 + 3 + 2 * parts + 1
    costs = len(sums_of((), spec.table)) if spec.config.costs.learn else 0
    lost = 2
    return plan + step + costs + lost


def _entries(spec: RunSpec, part: str) -> int:
    """Pieces of a part's parameters in all files: each tensor-parallel rank's parameters lie one after the
    other, and the ranks that hold the same divide them among themselves, anywhere in a parameter.
    """
    component, work = part.partition("/")[0], spec.work[part]
    mesh = spec.arrangement.mesh if component == LLM else spec.arrangement.encoder_meshes[component]
    replicated = ("cp", "dp") if "cp" in mesh.sizes else ("dp",)
    replicas = len(mesh.group(mesh.ranks[0], *replicated))
    weights = work.weights()
    partitions = sum(weight.partition for weight in weights)
    own = sum(not (weight.experts or weight.partial or weight.partition) for weight in weights)
    shared = sum(not weight.experts and weight.partial for weight in weights)
    experts = sum(weight.experts for weight in weights)
    pieces = work.tp * own + shared + work.tp * (replicas - 1)
    if partitions:
        pool = spec.arrangement.partitions
        pieces += work.tp * pool * (partitions + replicas // pool - 1)
    if experts:
        copies = max(1, replicas * work.tp // work.ep)
        pieces += work.ep * (experts + copies - 1)
    return pieces
