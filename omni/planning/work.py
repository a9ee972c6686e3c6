"""The statements of work of a run's parts; read off them: who runs passes together, and the cost table."""

from collections.abc import Iterator, Mapping, Sequence

from omni.llm_config import LLMConfig
from omni.models.llm import NAME as LLM
from omni.models.llm import llm_work
from omni.models.registry import Encoder, naming
from omni.planning.frameworks import Framework, table_under
from parallel.axes import axes_names, axes_of, group_of
from parallel.cluster import Cluster
from parallel.costs import Axes, CostTable, table_from_work
from parallel.layout import Arrangement, Layout
from parallel.work import FP32, Attended, Collective, Grad, Load, Part, virtual_stage_name


def part_work(
    llm: LLMConfig, encoders: Mapping[str, Encoder], vocab_size: int, arrangement: Arrangement, element: int
) -> dict[str, Part]:
    """State the work of a rank in every virtual stage and every encoder, with `element` bytes a number."""
    parts: dict[str, Part] = {
        virtual_stage_name(LLM, number): part
        for number, part in enumerate(llm_work(llm, vocab_size, arrangement.llm, element, arrangement.pool))
    }
    for name, encoder in encoders.items():
        with naming(name):
            parts[name] = encoder.work(llm.hidden, element, arrangement.encoder_tp[name])
    return parts


def num_parameters(config: LLMConfig, encoders: Mapping[str, Encoder], vocab_size: int) -> dict[str, int]:
    """Count the parameters of every component, however they are divided among ranks."""
    element = 1  # of no account here
    whole: dict[str, Sequence[Part]] = {LLM: llm_work(config, vocab_size, Layout(), element)}
    whole |= {name: [encoder.work(config.hidden, element, 1)] for name, encoder in encoders.items()}
    return {
        name: sum(weight.elements for part in parts for weight in part.weights())
        for name, parts in whole.items()
    }


def part_axes(
    parts: Mapping[str, Part], encoders: Mapping[str, Encoder], arrangement: Arrangement, cluster: Cluster
) -> dict[str, Axes]:
    """Return the groups of every part, by axis."""
    of_llm = axes_of(arrangement, None, cluster)
    own = {name: axes_of(arrangement, name, cluster) for name in encoders}
    return {name: own.get(name, of_llm) for name in parts}


def collectives_of_passes(part: Part, pool: int = 1) -> Iterator[Collective]:
    """Yield all that a forward and a backward of some tokens communicate; in a pool of more than one cp rank,
    those of a sequence that all of them share.
    """
    tokens = part.tp * 64
    one_each = (1,) * pool if pool > 1 else ()
    load = Load(
        Attended(tokens, tokens, 0, 0, one_each, one_each, one_each, one_each),
        targets=tokens,
        rows=1,
        most_rows=1,
        routed=(64,) * part.ep,
    )
    yield from part.forward(load).collectives
    yield from part.backward(load, Grad.BOTH).collectives


def collective_group_size(parts: Sequence[Part], arrangement: Arrangement, pool: int) -> int:
    """Return how many neighbouring ranks of a stage run passes of the LLM together: those that collectives of
    its `parts` connect, directly or through others. A policy may share sequences over `pool` cp ranks.
    """
    first = arrangement.mesh.ranks[0]
    groups_of_first = {axis: group_of(arrangement, None, axis, first) for axis in axes_names(None)}
    axes = {
        one.axis
        for part in parts
        for one in collectives_of_passes(part, len(groups_of_first["pool"]) if pool > 1 else 1)
    }
    connected, found = {first}, {first}
    while found:
        groups = [group_of(arrangement, None, axis, rank) for axis in axes for rank in found]
        found = {rank for group in groups for rank in group} - connected
        connected |= found
    return len(connected)


def cost_table(
    parts: Mapping[str, Part],
    encoders: Mapping[str, Encoder],
    arrangement: Arrangement,
    cluster: Cluster,
    row_bytes: int,
    under: tuple[Framework, int] | None = None,
    sent: int = FP32,
    overlaps: bool = True,
) -> CostTable:
    """Read the first cost table off the statements: of our steps, or `under` another framework's, where a
    rank has so many tokens of a microbatch. Of a gradient of ours a number takes `sent` bytes on its way;
    weights arrive and gradients leave behind passes if that `overlaps`.
    """
    axes = part_axes(parts, encoders, arrangement, cluster)
    table = table_from_work(
        parts,
        cluster,
        row_bytes,
        axes=axes,
        between=axes[virtual_stage_name(LLM, 0)]["pp"].link,
        components=(LLM, *encoders),
        sent=sent,
        overlaps=overlaps,
    )
    if under is None:
        return table
    framework, tokens = under
    return table_under(table, parts, axes, framework, tokens, arrangement.llm.pp)
