"""Towers that compute from a grid: any number of patches, and how many rows and columns of them there are."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from dataloader.decode import decode_image
from dataloader.format import Item
from omni.keys import ConfigError
from omni.models.grid_positions import Grid
from omni.models.registry import ItemArrays
from omni.models.towers.attention import WHOLE
from omni.models.towers.calls import Given, GridCalls, PaddedCalls
from omni.models.towers.encoder import TowerConfig, WrappedTower
from omni.models.towers.folder import GRIDS
from omni.models.towers.processors import open_processor, processed, resized_by
from ops.attention import make_packing
from ops.device import to_device


class GridTower(WrappedTower):
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
        self.processor: Any = open_processor(config.folder, audio=False)
        self.resized = resized_by(
            self.processor, getattr(self.processor, "get_number_of_image_patches", None)
        )
        self.patch = _side(self.processor.patch_size)
        self.side = merge
        self.values = self._values(merge)
        projects = not self.packs if config.projector is None else config.projector
        if not (projects or self.packs):
            raise ConfigError(
                f"encoder.projector=false: {own.kind.__name__} makes no rows for an LLM; leave the key out"
            )
        if config.merge > 1:
            raise ConfigError(
                f"encoder.merge={config.merge}: sides of grids need not divide by it, and "
                f"{own.kind.__name__} merges {merge}x{merge} itself; leave it at 1"
            )
        self.projected = int(projects)
        self._try()

    def _values(self, merge: int) -> int:
        """Numbers of a patch as the processor makes it, which must be those that the tower takes."""
        made = processed(self.processor, self.blank())
        grid = self._grid(self.blank().shape[:2])
        found, planned = made["pixel_values"].reshape(-1, made["pixel_values"].shape[-1]), prod(grid)
        told = next((value for name, value in made.items() if name.endswith(GRIDS)), np.array([grid]))
        if (
            prod(told.ravel().tolist()) != planned
            or len(found) < planned
            or grid[1] % merge
            or grid[2] % merge
        ):
            raise ConfigError(
                f"{self.tower.key}: its processor {type(self.processor).__name__} makes {told.tolist()} "
                f"patches of a picture of 32x32 pixels, where {grid} are counted and the tower merges "
                f"{merge}x{merge} of them: take the preprocessor_config.json that the tower came with"
            )
        return int(found.shape[1])

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

    def _grid(self, size: tuple[int, ...]) -> Grid:
        """Frames, rows and columns of the patches of an image of (height, width) pixels."""
        height, width = self.resized(size[0], size[1])
        return 1, height // self.patch, width // self.patch

    def count(self, size: tuple[int, ...]) -> tuple[int, int]:
        """Return (patches, rows) of an image of (height, width) pixels."""
        return prod(self._grid(size)), prod(self.row_grid(size))

    def row_grid(self, size: tuple[int, ...]) -> Grid:
        """Return (frames, rows, columns) of the LLM rows of an image."""
        frames, rows, columns = self._grid(size)
        return frames, rows // self.side, columns // self.side

    def decode(self, item: Item) -> np.ndarray:
        """Decode to uint8 [H, W, channels of the file]."""
        return decode_image(item)

    def blank(self) -> np.ndarray:
        """A dark picture."""
        return np.zeros((32, 32, 3), np.uint8)

    def preprocess(self, array: np.ndarray) -> ItemArrays:
        """uint8 [H, W, C] → patches [T, V] as the processor makes them, without its padding."""
        tokens = prod(self._grid(array.shape[:2]))
        values = processed(self.processor, array)["pixel_values"]
        patches = values.reshape(-1, values.shape[-1])[:tokens].astype(np.float32)
        return ItemArrays(np.ascontiguousarray(patches), np.zeros((len(patches), 0), np.int64))

    def given(self, grids: Sequence[Grid], dtype: torch.dtype, device: torch.device) -> Given:
        """Arguments that the tower would compute of grids, or where patches lie in a padded batch."""
        patches = tuple((t, h * self.side, w * self.side) for t, h, w in grids)
        heads = self.tower.hidden
        if self.packs:
            tensors, lengths = self.prepared.arguments(patches)
            packings = {name: make_packing(of, False, heads, device, dtype) for name, of in lengths.items()}
            arguments: dict[str, Any] = {name: to_device(own, device) for name, own in tensors.items()}
            arguments |= dict.fromkeys(self.prepared.longest, max(map(max, lengths.values())))
            return Given(packings, arguments, patches)
        counts = [prod(grid) for grid in patches]
        longest = max(counts)
        place = np.concatenate([np.arange(n) + longest * i for i, n in enumerate(counts)])
        whole = [part for n in counts for part in (n, longest - n)]
        packing = make_packing(tuple(whole), False, heads, device, dtype)
        return Given({WHOLE: packing}, {}, patches, {"padded": to_device(torch.from_numpy(place), device)})


def _side(size: Any) -> int:
    """Pixels of a patch's side."""
    return int(size if isinstance(size, int) else size["height"])
