"""A run, resolved: everything about it that follows from its configuration and its data.

`prepare.py` makes it. The same spec is what the trainer runs, what `omni plan` prints and times.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

from dataloader.format import SampleError
from dataloader.index import Index
from dataloader.samples import Samples
from dataloader.tokenizer import Tokenizer
from dataloader.tokens import ItemMeta, SampleMeta
from omni.config import Config, ConfigError
from omni.models.grid_positions import AXES
from omni.models.item_layout import ItemLayout, LayoutOf, num_literals
from omni.models.llm import NAME as LLM
from omni.models.registry import Encoder, named, naming
from omni.planning.choice import RunChoice
from omni.planning.choices import Chosen
from omni.planning.planner import Planner
from omni.planning.workload import Workload
from parallel.costs import CostTable
from parallel.layout import Layout

_FIRST = 16  # samples whose items are laid out before ranks start


@dataclass(frozen=True)
class RunSpec(Workload):
    """A run, resolved: its policies, who lives where, its components, data and planner; and what was chosen
    of what its configuration left open, if it did.
    """

    config: Config
    policies: Chosen
    tokenizer: Tokenizer
    indexes: Mapping[str, Index]
    heldout: Mapping[str, Index]
    planner: Planner
    table: CostTable
    choice: RunChoice | None = None

    @property
    def layout(self) -> Layout:
        """The LLM's layout."""
        return self.arrangement.llm

    @property
    def components(self) -> tuple[str, ...]:
        """Names of all components, the LLM first: the order of every reduction."""
        return (LLM, *self.encoders)

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the training sources, in the order in which losses are reported."""
        return tuple(self.config.data.sources)

    def heldout_meta(self, source: str, sample: int) -> SampleMeta:
        """Metadata of a held-out sample."""
        return self.heldout[source].meta(sample, source, partial(item_count, self.encoders))


def item_count(encoders: Mapping[str, Encoder], modality: str, size: tuple[int, ...]) -> tuple[int, int]:
    """Return how many tokens an item has in the encoder that takes its modality, and how many in the LLM: its
    rows, and literal tokens among them. A step may ask for tens of thousands of sizes.
    """
    name, encoder = next(of for of in encoders.items() if of[1].modality == modality)
    try:
        tokens, rows = encoder.count(size)
        own = getattr(encoder, "row_layout", None)
        return tokens, rows if own is None else rows + num_literals(own(size))
    except (ConfigError, SampleError) as error:
        raise named(error, name) from error


def layouts_of(encoders: Mapping[str, Encoder], vocab_size: int) -> LayoutOf:
    """Return `item_layout` of these encoders, which are asked once for items of a size: plans have many."""

    @lru_cache(maxsize=1 << 16)
    def of_size(modality: str, rows: int, size: tuple[int, ...]) -> ItemLayout:
        return item_layout(encoders, ItemMeta(modality, 0, rows, 0, size), vocab_size)

    return lambda item: of_size(item.modality, item.rows, item.size)


def check_layouts(encoders: Mapping[str, Encoder], vocab_size: int, samples: Samples, begin: int) -> None:
    """Refuse an encoder whose items cannot stand among the LLM's tokens, by the first samples from a position
    on; later ones are refused when their step is planned. Raises as `item_layout`.
    """
    taken = {encoder.modality for encoder in encoders.values()}
    sources, ids = samples.stream.take(begin, _FIRST)
    for source, sample in zip(sources.tolist(), ids.tolist(), strict=True):
        for item in samples.metas(samples.stream.names[source], sample).items:
            if item.modality in taken and not item.refused:
                item_layout(encoders, item, vocab_size)


def item_layout(encoders: Mapping[str, Encoder], item: ItemMeta, vocab_size: int) -> ItemLayout:
    """Return how an item's rows stand, by the encoder that takes its modality: next to each other and in no
    grid, if it says nothing, or nothing is known of the item's size.

    Raises:
        ConfigError: naming the encoder, if its `count` tells other rows, or a literal is no token.
    """
    name = next(name for name, encoder in encoders.items() if encoder.modality == item.modality)
    in_grid, in_runs = (getattr(encoders[name], of, None) for of in ("row_grid", "row_layout"))
    if not item.size:
        return ItemLayout(item.rows)
    with naming(name):
        runs = tuple(in_runs(item.size)) if in_runs else ()
        rows = item.rows - num_literals(runs)
        if runs and sum(count for count, _ in runs) != rows:
            raise ConfigError(
                f"row_layout({item.size}) tells runs of {[count for count, _ in runs]} rows, and count() "
                f"{rows} rows: make them as many"
            )
        if wrong := [token for _, after in runs for token in after if not 0 <= token < vocab_size]:
            raise ConfigError(
                f"row_layout({item.size}) has a token {wrong[0]} between rows, and the tokenizer "
                f"{vocab_size} tokens: take the id of one of them"
            )
        grid = tuple(in_grid(item.size)) if in_grid else ()
        if in_grid and (len(grid) != AXES or math.prod(grid) != rows):
            raise ConfigError(
                f"row_grid({item.size}) tells {grid}, and count() {rows} rows: make it (frames, rows, "
                "columns) of as many"
            )
    return ItemLayout(rows, grid, runs)
