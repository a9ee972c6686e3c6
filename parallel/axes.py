"""The groups of each component by axis: which ranks they connect, and over which link they talk.

tp        ranks that share layers            pool    cp ranks that share sequences
dp_cp     replicas of dense weights          ep      ranks among which experts are divided
expt_dp   replicas of an expert              embd    the two ends of the pipeline, if both hold the embedding
tp_dp_cp  all ranks of a stage               pp      the stages of a pipeline
partition the ranks of a pool, of which each holds a partition of matrices
domains   replicas of a partition
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from parallel.cluster import Cluster, Link
from parallel.costs import Axes, Axis
from parallel.layout import Arrangement, Mesh

_LLM: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "pool": ("cp", "replica"),
    "dp_cp": ("cp", "dp"),
    "partition": ("cp", "replica"),
    "domains": ("domain",),
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
    return tuple(sorted(_mesh(arrangement, encoder, axis).group(rank, *mesh_axes(encoder, axis))))


def _mesh(arrangement: Arrangement, encoder: str | None, axis: str) -> Mesh:
    if encoder is not None:
        return arrangement.encoder_meshes[encoder]
    return arrangement.expert_mesh if axis in _EXPERTS else arrangement.mesh


def axes_of(arrangement: Arrangement, encoder: str | None, cluster: Cluster) -> Axes:
    """Return all axes of the LLM, or of `encoder`, each with the links of its widest group."""
    return {axis: _axis(arrangement, encoder, axis, cluster) for axis in axes_names(encoder)}


def _axis(arrangement: Arrangement, encoder: str | None, axis: str, cluster: Cluster) -> Axis:
    if axis == "embd":
        ends = [0, -1] if arrangement.llm.pp > 1 else [0]
        groups = arrangement.mesh.table("pp")[:, ends]
    else:
        groups = _mesh(arrangement, encoder, axis).table(*mesh_axes(encoder, axis))
    size = groups.shape[1]
    nodes, near = _spread(groups // cluster.ranks_per_node)
    rails, _ = _spread(groups // (cluster.ranks_per_rail or arrangement.world))
    links = cluster.links
    if nodes == 1:
        return Axis(size, links.inside)
    across = links.across if rails == 1 or links.beyond is None else links.beyond
    if axis == "pp":
        return Axis(size, across)
    return Axis(size, _rings(across, links.inside, near), _pairs(across, links.inside, size, near))


def _spread(places: npt.NDArray[np.int64]) -> tuple[int, int]:
    """Return over how many places a group spreads at most, where members are at `places` [groups, members],
    and how many members of a group are at one place at least.
    """
    begins = np.diff(np.sort(places, axis=1), axis=1, prepend=-1) != 0
    members = np.diff(np.flatnonzero(begins), append=begins.size)
    return int(begins.sum(1).max()), int(members.min())


def _rings(across: Link, inside: Link, near: int) -> Link:
    """Rings leave a node at each of its `near` members in turn: bytes go over the links of all of them at
    once, as fast as a member's own links take them.
    """
    return replace(across, bytes_per_s=min(inside.bytes_per_s, across.bytes_per_s * near))


def _pairs(across: Link, inside: Link, size: int, near: int) -> Link:
    """Of what a member sends to all others of `size`, `near - 1` get theirs inside the node."""
    outside = across.bytes_per_s * (size - 1) // (size - near)
    return replace(across, bytes_per_s=min(inside.bytes_per_s, outside))
