"""`omni layout show`: which ranks do what, and why a rank is in each of its groups; no data is read."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from omni.commands._shared import add_configuration
from parallel.control_tree import Tree

if TYPE_CHECKING:
    from omni.models.registry import Encoder
    from omni.planning.choices import Chosen
    from parallel.layout import Arrangement, Mesh
    from parallel.policies import SharingPolicy
    from parallel.work import Part

SHOWN_RANKS = 8  # of a group, before the rest is only counted
SHOWN_NODES = 32
_COLOURS = (41, 42, 43, 44, 45, 46, 100, 101, 102, 103, 104, 105)
_DESCRIPTION = """\
Shows a layout without starting it: the groups that one rank is in, with what they carry and whether they stay
inside a node, and a picture of all ranks by their coordinate on an axis. Overrides as for `omni train`.

  omni layout show experiment=llama3_70b --rank 37 --axis pp
  omni layout show experiment=llama3_70b --rank 37 --axis image.dp
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("action", choices=["show"], help="what to do")
    parser.add_argument("--rank", type=int, default=0, help="whose groups to explain (default 0)")
    parser.add_argument(
        "--axis",
        default="pp",
        help="tp, cp, dp, pp, ep, edp, domain or replica, or an encoder's, such as image.tp (default pp)",
    )
    add_configuration(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table and the picture."""
    from omni.compose import compose_config
    from omni.config import ConfigError
    from omni.planning.choice import open_keys, unchosen
    from omni.planning.choices import chosen_policies, with_pairing
    from omni.planning.layouts import check_layout, planned_ranks, resolve_layout
    from omni.planning.prepare import make_encoders
    from omni.planning.run_data import tokenizer_of
    from omni.planning.work import part_work
    from ops.device import dtype_of

    try:
        config = compose_config(arguments.overrides, arguments.config_dir)
        policies = chosen_policies(unchosen(with_pairing(config)).policies)
        encoders = make_encoders(config.model.encoders)
        ranks = planned_ranks(config.launch)
        arrangement = resolve_layout(config.layout, config.placement, tuple(encoders), ranks)
        vocab_size = tokenizer_of(config.data).vocab_size
        check_layout(config.model.llm, encoders, arrangement, config.launch.layouts, vocab_size)
        holder, mesh, axis = _mesh_with(arrangement, arguments.axis)
        if not 0 <= arguments.rank < arrangement.world:
            raise ConfigError(f"--rank {arguments.rank}: there are ranks 0 to {arrangement.world - 1}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    per_node = config.cluster.ranks_per_node
    element = dtype_of(config.train.precision).itemsize
    sent = dtype_of(config.train.mixed_precision_reduce).itemsize
    parts = part_work(config.model.llm, encoders, vocab_size, arrangement, element)
    print(f"{arrangement.world} ranks, {per_node} a node: {arrangement.describe()}; {arrangement.placement}")
    print(f"domains: {arrangement.num_domains}, replicas in each: {arrangement.replicas}")
    if left := open_keys(config):
        print(f"chosen when a run starts, and shown as if nothing were shared: {', '.join(left)}")
    print()
    for line in explain(parts, policies, encoders, arrangement, per_node, arguments.rank, sent):
        print(line)
    print(f"\nranks by {arguments.axis}, one line a node; . holds no part of {holder}")
    for line in picture(arrangement, mesh, axis, per_node, colour=sys.stdout.isatty()):
        print(line)
    return 0


def _mesh_with(arrangement: "Arrangement", text: str) -> "tuple[str, Mesh, str]":
    """Find an axis such as "pp" or "image.dp". Returns what is divided by it, its mesh and its name there."""
    from omni.config import ConfigError

    known: dict[str, tuple[str, Mesh, str]] = {}
    for own in (arrangement.mesh, arrangement.expert_mesh):
        for axis in (*own.sizes, *own.aliases):
            known.setdefault(axis, ("the LLM", own, axis))
    for name, own in arrangement.encoder_meshes.items():
        for axis in (*own.sizes, *own.aliases):
            known[f"{name}.{axis}"] = (name, own, axis)
    if text not in known:
        raise ConfigError(f"--axis {text}: choose one of {', '.join(known)}")
    return known[text]


def explain(
    parts: "Mapping[str, Part]",
    policies: "Chosen",
    encoders: "Mapping[str, Encoder]",
    arrangement: "Arrangement",
    per_node: int,
    rank: int,
    sent: int,
) -> Iterator[str]:
    """Yield a line for each group of more than one rank that `rank` is in and that carries something.

    `parts` are the statements of work of the LLM's virtual stages and of the encoders: what a group carries
    is read off their collectives. Of a gradient a number takes `sent` bytes on its way to another replica.
    """
    mesh = arrangement.mesh
    if rank in mesh:
        at = mesh.coordinates(rank)
        where = ", ".join(f"{axis} {at[axis]}" for axis in ("tp", "cp", "dp", "pp"))
        if arrangement.llm.vpp > 1:
            where += f", virtual stages {' '.join(map(str, arrangement.llm.holds(at['pp'])))}"
    else:
        where = "encoders only"
    yield f"rank {rank}: {where}; domain {arrangement.domain(rank)}"
    yield f"{'component':10} {'axes':12} {'ranks':36} {'node':8} carries"
    groups: list[_Group] = []
    if rank in mesh:
        groups += _llm_groups(parts, policies["llm_sp"], arrangement, rank, sent)
    for name, of in arrangement.encoder_meshes.items():
        if rank in of:
            shared = policies["encoder_sp"].cuts and encoders[name].unit is not None
            groups += _stated([parts[name]], name, arrangement, rank, shared, sent)
    domain, world = arrangement.global_ranks(arrangement.domain(rank)), range(arrangement.world)
    if encoders:
        groups.append(("boundary", "domain", domain, "rows from encoders to the LLM, gradients back"))
    tree = Tree(arrangement.world, per_node)
    above = tree.parent(rank)
    near = [rank, *tree.children(rank), *([] if above is None else [above])]
    groups += [
        ("control", "tree", near, "plans, times and bad items, to all ranks by way of these: TCP"),
        ("totals", "world", world, "losses, targets, squared norms, whether to stop: all-reduce"),
    ]
    for name, axes, ranks, purpose in groups:
        if len(ranks) > 1:
            yield _line(name, axes, sorted(ranks), per_node, purpose)


_Group = tuple[str, str, Sequence[int], str]  # component, axes, ranks, what it carries
_CARRIES = {
    "tp": "layers",
    "pool": "sequences shared in attention",
    "dp_cp": "gradients and weights",
    "partition": "matrices of layers and their gradients (ZeRO)",
    "domains": "gradients and weights of partitions",
    "embd": "gradients of the embedding, tied to the output",
    "ep": "tokens to experts and back",
    "expt_dp": "gradients and weights of experts",
    "tp_dp_cp": "tokens of each expert, once a step",
}
_OF_EXPERTS = ("ep", "expt_dp", "tp_dp_cp")


def _llm_groups(
    parts: "Mapping[str, Part]", policy: "SharingPolicy", arrangement: "Arrangement", rank: int, sent: int
) -> Iterator[_Group]:
    from omni.models.llm import NAME as LLM
    from parallel.work import virtual_stage_name

    numbers = arrangement.llm.holds(arrangement.mesh.coordinates(rank)["pp"])
    shared = policy.cuts and (arrangement.llm.cp > 1 or not policy.within_replica)
    own = [parts[virtual_stage_name(LLM, number)] for number in numbers]
    yield from _stated(own, None, arrangement, rank, shared, sent)
    yield LLM, "pp", arrangement.mesh.group(rank, "pp"), "activations and their gradients between stages"


def _stated(
    parts: "Sequence[Part]",
    encoder: str | None,
    arrangement: "Arrangement",
    rank: int,
    shared: bool,
    sent: int,
) -> Iterator[_Group]:
    """The groups that parts on a rank name in their collectives, with the kinds of these."""
    from omni.models.llm import NAME as LLM
    from omni.planning.work import collectives_of_passes
    from parallel.axes import axes_names, group_of, mesh_axes

    ranks = {axis: group_of(arrangement, encoder, axis, rank) for axis in axes_names(encoder)}
    kinds: dict[str, dict[str, None]] = {}
    for part in parts:
        sizes = {axis: len(of) for axis, of in ranks.items()}
        passes = collectives_of_passes(part, sizes["pool"] if shared else 1)
        for one in (*passes, *part.reduction(sizes, sent)):
            kinds.setdefault(one.axis, {})[one.kind.replace("_", "-")] = None
    for axis in (axis for axis in _CARRIES if axis in kinds):
        name = "experts" if axis in _OF_EXPERTS else encoder or LLM
        where = "ends of pp" if axis == "embd" else "·".join(mesh_axes(encoder, axis))
        yield name, where, ranks[axis], f"{_CARRIES[axis]}: {', '.join(kinds[axis])}"


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
    size = prod(mesh.sizes[part] for part in mesh.aliases.get(axis, (axis,)))
    width = 1 + max(3, len(str(size - 1)))
    for first in nodes[:SHOWN_NODES]:
        cells = []
        for rank in range(first, min(first + per_node, arrangement.world)):
            at = mesh.coordinates(rank)[axis] if rank in mesh else None
            text = f"{'.' if at is None else at:>{width}}"
            cells.append(
                f"\033[{_COLOURS[at % len(_COLOURS)]}m{text}\033[0m" if colour and at is not None else text
            )
        yield f"{first:6} {''.join(cells)}"
    if len(nodes) > SHOWN_NODES:
        yield f"… and {len(nodes) - SHOWN_NODES} more nodes"
