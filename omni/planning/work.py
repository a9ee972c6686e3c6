"""The statements of work of a run's parts, the groups that they talk in, and the cost table read off them."""

from collections.abc import Mapping

from omni.config import Config
from omni.models.llm import NAME as LLM
from omni.models.llm import llm_work
from omni.models.registry import Encoder
from parallel.axes import axes_of
from parallel.costs import Axes, Cluster, CostTable, table_from_work
from parallel.layout import Arrangement
from parallel.work import Part


def part_work(
    config: Config, encoders: Mapping[str, Encoder], vocab_size: int, arrangement: Arrangement, element: int
) -> dict[str, Part]:
    """State the work of a rank of every part of the LLM and every encoder, with `element` bytes a number."""
    parts: dict[str, Part] = {
        f"{LLM}/{number}": part
        for number, part in enumerate(llm_work(config.model.llm, vocab_size, arrangement.llm, element))
    }
    for name, encoder in encoders.items():
        parts[name] = encoder.work(config.model.llm.hidden, element, arrangement.encoder_tp[name])
    return parts


def part_axes(
    parts: Mapping[str, Part], encoders: Mapping[str, Encoder], arrangement: Arrangement, cluster: Cluster
) -> dict[str, Axes]:
    """Return the groups of every part, by axis."""
    of_llm = axes_of(arrangement, None, cluster.ranks_per_node, cluster.links)
    own = {name: axes_of(arrangement, name, cluster.ranks_per_node, cluster.links) for name in encoders}
    return {name: own.get(name, of_llm) for name in parts}


def cost_table(
    config: Config,
    parts: Mapping[str, Part],
    encoders: Mapping[str, Encoder],
    arrangement: Arrangement,
    cluster: Cluster,
    element: int,
) -> CostTable:
    """Read the first cost table off the statements."""
    axes = part_axes(parts, encoders, arrangement, cluster)
    return table_from_work(
        parts,
        cluster,
        config.model.llm.hidden * element,
        axes=axes,
        between=axes[f"{LLM}/0"]["pp"].link,
        components=(LLM, *encoders),
    )
