"""Towers that compute from a grid: any number of patches, and how many rows and columns of them there are."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from omni.keys import ConfigError
from omni.models.item_layout import Grid
from omni.models.registry import ItemArrays
from omni.models.towers.attention import WHOLE
from omni.models.towers.calls import Given, GridCalls, PaddedCalls
from omni.models.towers.encoder import TowerConfig, WrappedTower
from omni.models.towers.folder import GRIDS
from omni.models.towers.images import GridImages
from ops.attention import make_packing


class GridTower(GridImages, WrappedTower):
    """A tower of images that takes patches in one row and their grids. Where the tower merges neighbours
    itself, its rows are the LLM's, and those that it has for later layers enter there.
    """

    def __init__(self, config: TowerConfig) -> None:
        super().__init__(config)
        own = self.tower
        if not {*GRIDS} & {*own.takes}:
            raise own.refused(f"its forward takes none of {', '.join(GRIDS)}: try name=batch_tower")
        self.packs = GRIDS[0] in own.takes
        self.calls = GridCalls() if self.packs else PaddedCalls()
        merge = int(getattr(own.config, "spatial_merge_size", 1)) if self.packs else 1
        self.merges = merge**2
        self.values, self.row_break = self.open_images(own, merge), config.row_break
        projects = not self.packs if config.projector is None else config.projector
        if not (projects or self.packs):
            raise ConfigError(
                f"encoder.projector=false: {own.kind.__name__} makes no rows for an LLM; leave the key out"
            )
        if config.connector:
            raise ConfigError(
                "encoder.connector=true: towers that take grids have their own; leave the key out"
            )
        if config.merge > 1:
            raise ConfigError(
                f"encoder.merge={config.merge}: sides of grids need not divide by it, and "
                f"{own.kind.__name__} merges {merge}x{merge} itself; leave it at 1"
            )
        self.projected = int(projects)
        self._try()

    def _try(self) -> None:
        """Run the tower once without storage: what comes out says how wide rows are and where they enter."""
        count, tried = self.tried(256, 4)
        rows, self.out = tried.out.shape
        self.prepared = tried.prepared
        self.freeze(tried)
        points, rest = divmod(rows, count // self.merges)
        if rest or not points:
            raise self.tower.refused(f"of {count} patches it makes {rows} rows, not {count // self.merges}")
        if points > 1 and self.projected:
            raise self.tower.refused(
                "it has rows for later layers of its own LLM (DeepStack), of which a projector would make "
                "none: leave encoder.projector out"
            )
        self.attach = ("llm.embed", *(f"llm.layers.{number}" for number in range(1, points)))

    def sample(self, tokens: int, element: int) -> tuple[int, torch.Tensor, Given]:
        """A square picture."""
        side = round(tokens**0.5) // self.side * self.side
        values = torch.empty(side**2, self.values, device="meta")
        places = {} if self.packs else {"padded": torch.empty(side**2, dtype=torch.int64, device="meta")}
        return side**2, values, Given(grids=((1, side, side),), places=places)

    def preprocess(self, array: np.ndarray) -> ItemArrays:
        """uint8 [H, W, C] → patches [T, V] as the processor makes them, without its padding."""
        patches = self.patches(array)
        return ItemArrays(patches, np.zeros((len(patches), 0), np.int64))

    def given(self, grids: Sequence[Grid], dtype: torch.dtype, device: torch.device) -> Given:
        """Arguments that the tower would compute of grids, or where patches lie in a padded batch."""
        patches = tuple((t, h * self.side, w * self.side) for t, h, w in grids)
        heads = self.tower.hidden
        if self.packs:
            tensors, lengths = self.prepared.arguments(patches)
            packings = {name: make_packing(of, False, heads, device, dtype) for name, of in lengths.items()}
            arguments: dict[str, Any] = dict(tensors)
            arguments |= dict.fromkeys(self.prepared.longest, max(map(max, lengths.values())))
            return Given(packings, arguments, patches)
        counts = [prod(grid) for grid in patches]
        longest = max(counts)
        place = np.concatenate([np.arange(n) + longest * i for i, n in enumerate(counts)])
        whole = [part for n in counts for part in (n, longest - n)]
        packing = make_packing(tuple(whole), False, heads, device, dtype)
        return Given({WHOLE: packing}, {}, patches, {"padded": torch.from_numpy(place)})
