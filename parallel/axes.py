"""The groups of each component by axis: which ranks they connect, and over which link they talk.

tp        ranks that share layers            pool    members that share sequences
dp_cp     replicas of dense weights          ep      ranks among which experts are divided
expt_dp   replicas of an expert              embd    the two ends of the pipeline, if both hold the embedding
tp_dp_cp  all ranks of a stage               pp      the stages of a pipeline
"""

from collections.abc import Mapping, Sequence

from parallel.costs import Axes, Axis, Links
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


def axes_of(arrangement: Arrangement, encoder: str | None, ranks_per_node: int, links: Links) -> Axes:
    """Return all axes of the LLM, or of `encoder`, each with the link of its widest group."""
    ranks = arrangement.mesh.ranks if encoder is None else arrangement.encoder_meshes[encoder].ranks
    return {
        axis: _axis(arrangement, encoder, axis, ranks, ranks_per_node, links) for axis in axes_names(encoder)
    }


def _axis(
    arrangement: Arrangement,
    encoder: str | None,
    axis: str,
    ranks: Sequence[int],
    ranks_per_node: int,
    links: Links,
) -> Axis:
    seen: set[int] = set()
    size, across = 1, False
    for rank in ranks:
        if rank in seen:
            continue
        group = group_of(arrangement, encoder, axis, rank)
        seen.update(group)
        size = len(group)
        across |= len({member // ranks_per_node for member in group}) > 1
    return Axis(size, links.across if across else links.inside)
