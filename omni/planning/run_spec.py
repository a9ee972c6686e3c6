"""A run, resolved: everything about it that follows from its configuration and its data.

`prepare.py` makes it. The same spec is what the trainer runs, what `omni plan` prints and times.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

from dataloader.format import SampleError
from dataloader.index import Index
from dataloader.tokenizer import Tokenizer
from dataloader.tokens import ItemMeta, SampleMeta
from omni.config import Config, ConfigError
from omni.models.grid_positions import AXES, Grid
from omni.models.llm import NAME as LLM
from omni.models.registry import Encoder, named, naming
from omni.planning.choice import RunChoice
from omni.planning.choices import Chosen
from omni.planning.planner import Planner
from omni.planning.workload import Workload
from parallel.costs import CostTable
from parallel.layout import Layout


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
    """Return the tokens and rows of an item, by the encoder that takes its modality. A step may ask for tens
    of thousands of sizes.
    """
    name, encoder = next(of for of in encoders.items() if of[1].modality == modality)
    try:
        return encoder.count(size)
    except (ConfigError, SampleError) as error:
        raise named(error, name) from error


def grids_of(encoders: Mapping[str, Encoder]) -> Callable[[ItemMeta], Grid]:
    """Return `item_grid` of these encoders, which are asked once for items of a size: plans have many."""

    @lru_cache(maxsize=1 << 16)
    def of_size(modality: str, rows: int, size: tuple[int, ...]) -> Grid:
        return item_grid(encoders, ItemMeta(modality, 0, rows, 0, size))

    return lambda item: of_size(item.modality, item.rows, item.size)


def item_grid(encoders: Mapping[str, Encoder], item: ItemMeta) -> Grid:
    """Return the grid of an item's rows, by the encoder that takes its modality; () if it says none, or
    nothing is known of the item's size.

    Raises:
        ConfigError: naming the encoder, if its `count` tells other rows.
    """
    name = next(name for name, encoder in encoders.items() if encoder.modality == item.modality)
    own = getattr(encoders[name], "row_grid", None)
    if own is None or not item.size:
        return ()
    with naming(name):
        grid: Grid = tuple(own(item.size))
        if len(grid) != AXES or math.prod(grid) != item.rows:
            raise ConfigError(
                f"row_grid({item.size}) tells {grid}, and count() {item.rows} rows: make it (frames, rows, "
                "columns) of as many"
            )
    return grid
