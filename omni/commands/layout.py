"""`omni layout show`: which ranks do what, and why a rank is in each of its groups; no data is read."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallel.layout import Arrangement, Mesh

SHOWN_RANKS = 8  # of a group, before the rest is only counted
SHOWN_NODES = 32
_COLOURS = (41, 42, 43, 44, 45, 46, 100, 101, 102, 103, 104, 105)
_DESCRIPTION = """\
Shows a layout without starting it: the groups that one rank is in, with what they carry and whether they stay
inside a node, and a picture of all ranks by their coordinate on an axis. Overrides as for `omni train`.

  omni layout show launch.ranks=128 layout=tp8_cp2_pp4 --rank 37 --axis pp
"""
# What each group carries, by component kind and axes.
_LLM_GROUPS = (
    (("tp",), "layers: all-gather and reduce-scatter of activations"),
    (("cp", "replica"), "sequences shared in attention: all-to-all"),
    (("pp",), "activations and their gradients between stages"),
    (("cp", "dp"), "gradients and weights: reduce-scatter and all-gather"),
)
_EXPERT_GROUPS = (
    (("ep",), "tokens to experts and back: all-to-all"),
    (("edp",), "gradients and weights of experts"),
)
_ENCODER_GROUPS = (
    (("tp",), "layers: all-reduce of activations"),
    (("slot",), "items shared in attention: all-to-all"),
    (("dp",), "gradients and weights: reduce-scatter and all-gather"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("action", choices=["show"], help="what to do")
    parser.add_argument("--rank", type=int, default=0, help="whose groups to explain (default 0)")
    parser.add_argument(
        "--axis", default="pp", help="tp, cp, dp, pp, ep, edp, domain or replica (default pp)"
    )
    parser.add_argument("overrides", nargs="*", help="configuration, such as layout.llm.pp=2")


def run(arguments: argparse.Namespace) -> int:
    """Print the table and the picture."""
    from omni.compose import compose_config
    from omni.config import ConfigError, require
    from omni.training.job import planned_ranks, resolve_layout

    try:
        config = compose_config(arguments.overrides)
        arrangement = resolve_layout(config, planned_ranks(config))
        require("cluster", config.cluster, "ranks_per_node")
        mesh = _mesh_with(arrangement, arguments.axis)
        if not 0 <= arguments.rank < arrangement.world:
            raise ConfigError(f"--rank {arguments.rank}: there are ranks 0 to {arrangement.world - 1}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    per_node = config.cluster.ranks_per_node
    print(f"{arrangement.world} ranks, {per_node} a node: {arrangement.describe()}; {arrangement.placement}")
    print(f"domains: {arrangement.num_domains}, replicas in each: {arrangement.replicas}\n")
    for line in explain(arrangement, arguments.rank, per_node):
        print(line)
    print(f"\nranks by {arguments.axis}, one line a node; . holds no part of the LLM")
    for line in picture(arrangement, mesh, arguments.axis, per_node, colour=sys.stdout.isatty()):
        print(line)
    return 0


def _mesh_with(arrangement: "Arrangement", axis: str) -> "Mesh":
    from omni.config import ConfigError

    for mesh in (arrangement.mesh, arrangement.expert_mesh):
        if axis in mesh.sizes or axis in mesh.aliases:
            return mesh
    known = dict.fromkeys(
        [*arrangement.mesh.sizes, *arrangement.mesh.aliases, *arrangement.expert_mesh.sizes]
    )
    raise ConfigError(f"--axis {axis}: choose one of {', '.join(known)}")


def explain(arrangement: "Arrangement", rank: int, per_node: int) -> Iterator[str]:
    """Yield a line for each group of more than one rank that `rank` is in."""
    mesh = arrangement.mesh
    if rank in mesh:
        at = mesh.coordinates(rank)
        where = ", ".join(f"{axis} {at[axis]}" for axis in ("tp", "cp", "dp", "pp"))
    else:
        where = "encoders only"
    yield f"rank {rank}: {where}; domain {arrangement.domain(rank)}"
    yield f"{'component':10} {'axes':12} {'ranks':36} {'node':8} carries"
    kinds = [("llm", mesh, _LLM_GROUPS), ("experts", arrangement.expert_mesh, _EXPERT_GROUPS)]
    kinds += [(name, m, _ENCODER_GROUPS) for name, m in arrangement.encoder_meshes.items()]
    for name, of, groups in kinds:
        if rank not in of or (name == "experts" and arrangement.llm.ep == 1):
            continue
        for axes, purpose in groups:
            if of.axes(axes):
                yield _line(name, "·".join(axes), sorted(of.group(rank, *axes)), per_node, purpose)
    domain = arrangement.domain_ranks(arrangement.domain(rank))
    yield _line("boundary", "domain", domain, per_node, "rows from encoders to the LLM, gradients back")


def _line(name: str, axes: str, ranks: Sequence[int], per_node: int, purpose: str) -> str:
    text = " ".join(map(str, ranks[:SHOWN_RANKS]))
    if len(ranks) > SHOWN_RANKS:
        text += f" … ({len(ranks)})"
    node = "inside" if len({rank // per_node for rank in ranks}) == 1 else "across"
    return f"{name:10} {axes:12} {text:36} {node:8} {purpose}"


def picture(
    arrangement: "Arrangement", mesh: "Mesh", axis: str, per_node: int, colour: bool
) -> Iterator[str]:
    """Yield a line for each node: the coordinate of each of its ranks on `axis`."""
    nodes = range(0, arrangement.world, per_node)
    for first in nodes[:SHOWN_NODES]:
        cells = []
        for rank in range(first, min(first + per_node, arrangement.world)):
            at = mesh.coordinates(rank)[axis] if rank in mesh else None
            text = f"{'.' if at is None else at:>4}"
            cells.append(
                f"\033[{_COLOURS[at % len(_COLOURS)]}m{text}\033[0m" if colour and at is not None else text
            )
        yield f"{first:6} {''.join(cells)}"
    if len(nodes) > SHOWN_NODES:
        yield f"… and {len(nodes) - SHOWN_NODES} more nodes"
