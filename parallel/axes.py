"""The groups of each component by axis: which ranks they connect, and over which link they talk.

tp        ranks that share layers            pool    members that share sequences
dp_cp     replicas of dense weights          ep      ranks among which experts are divided
expt_dp   replicas of an expert              embd    the two ends of the pipeline, if both hold the embedding
tp_dp_cp  all ranks of a stage               pp      the stages of a pipeline
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from parallel.cluster import Cluster, Link
from parallel.costs import Axes, Axis
from parallel.layout import Arrangement

_LLM: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "pool": ("cp", "replica"),
    "dp_cp": ("cp", "dp"),
    "tp_dp_cp": ("tp", "cp", "dp"),
    "pp": ("pp",),
}
_EXPERTS: Mapping[str, tuple[str, ...]] = {"ep": ("ep",), "expt_dp": ("edp",)}
_ENCODER: Mapping[str, tuple[str, ...]] = {"tp": ("tp",), "pool": ("slot",), "dp_cp": ("dp",)}


def axes_names(encoder: str | None) -> tuple[str, ...]:
    """Return the axes of the LLM, or of an encoder."""
    return tuple(_ENCODER) if encoder is not None else (*_LLM, *_EXPERTS, "embd")


def mesh_axes(encoder: str | None, axis: str) -> tuple[str, ...]:
    """Return the names that an axis of the LLM, or of `encoder`, has in its mesh."""
    if encoder is not None:
        return _ENCODER[axis]
    return _EXPERTS[axis] if axis in _EXPERTS else _LLM[axis]


def group_of(arrangement: Arrangement, encoder: str | None, axis: str, rank: int) -> tuple[int, ...]:
    """Return the ranks that `rank` talks to over an axis of the LLM, or of `encoder`, itself included, in the
    order of the group.
    """
    if axis == "embd":
        stages = arrangement.mesh.group(rank, "pp")
        return tuple(dict.fromkeys((stages[0], stages[-1])))
    names = mesh_axes(encoder, axis)
    if encoder is not None:
        mesh = arrangement.encoder_meshes[encoder]
    else:
        mesh = arrangement.expert_mesh if axis in _EXPERTS else arrangement.mesh
    return tuple(sorted(mesh.group(rank, *names)))


def axes_of(arrangement: Arrangement, encoder: str | None, cluster: Cluster) -> Axes:
    """Return all axes of the LLM, or of `encoder`, each with the links of its widest group."""
    ranks = arrangement.mesh.ranks if encoder is None else arrangement.encoder_meshes[encoder].ranks
    return {axis: _axis(arrangement, encoder, axis, ranks, cluster) for axis in axes_names(encoder)}


def _axis(
    arrangement: Arrangement, encoder: str | None, axis: str, ranks: Sequence[int], cluster: Cluster
) -> Axis:
    seen: set[int] = set()
    size = nodes = rails = 1
    near = len(ranks)  # members of a node, where these are fewest
    rail = cluster.ranks_per_rail or arrangement.world
    for rank in ranks:
        if rank in seen:
            continue
        group = group_of(arrangement, encoder, axis, rank)
        seen.update(group)
        size = len(group)
        by_node = Counter(member // cluster.ranks_per_node for member in group)
        nodes, near = max(nodes, len(by_node)), min(near, *by_node.values())
        rails = max(rails, len({member // rail for member in group}))
    links = cluster.links
    if nodes == 1:
        return Axis(size, links.inside)
    across = links.across if rails == 1 or links.beyond is None else links.beyond
    if axis == "pp":
        return Axis(size, across)
    return Axis(size, _rings(across, links.inside, near), _pairs(across, links.inside, size, near))


def _rings(across: Link, inside: Link, near: int) -> Link:
    """Rings leave a node at each of its `near` members in turn: bytes go over the links of all of them at
    once, as fast as a member's own links take them.
    """
    return replace(across, bytes_per_s=min(inside.bytes_per_s, across.bytes_per_s * near))


def _pairs(across: Link, inside: Link, size: int, near: int) -> Link:
    """Of what a member sends to all others of `size`, `near - 1` get theirs inside the node."""
    outside = across.bytes_per_s * (size - 1) // (size - near)
    return replace(across, bytes_per_s=min(inside.bytes_per_s, outside))
