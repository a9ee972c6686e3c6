"""Pictures as the processor of a folder makes them: patches of any number, and the grid that they form."""

from math import prod
from typing import Any

import numpy as np

from dataloader.decode import decode_image
from dataloader.format import Item
from omni.keys import ConfigError
from omni.models.item_layout import Grid, lines
from omni.models.towers.folder import GRIDS, Tower
from omni.models.towers.processors import open_processor, processed, resized_by
from pipeline.domain_plan import RowRuns


class GridImages:
    """The part of an encoder that takes pictures: counts, grids and values of patches, of which the tower
    merges `side` by `side` into a row.
    """

    modality: str = "image"
    processor: Any
    patch: int
    """Pixels of a patch's side."""
    side: int = 1
    row_break: int | None = None
    """The token between lines of rows."""

    def open_images(self, tower: Tower, side: int) -> int:
        """Open the processor of a tower's folder. Return how many numbers a patch has.

        Raises:
            ConfigError: if there is none, or its patches are not those that the tower takes.
        """
        self.processor = open_processor(tower.folder, audio=False)
        self.resized = resized_by(
            self.processor, getattr(self.processor, "get_number_of_image_patches", None)
        )
        size = self.processor.patch_size
        self.patch, self.side = int(size if isinstance(size, int) else size["height"]), side
        if (theirs := getattr(self.processor, "merge_size", side)) != side:
            raise ConfigError(
                f"{tower.key}: its processor {type(self.processor).__name__} merges {theirs}x{theirs} "
                f"patches to a token, and {tower.kind.__name__} merges {side}x{side}: take the "
                f"preprocessor_config.json that the tower came with"
            )
        made, grid = processed(self.processor, self.blank()), self.grid(self.blank().shape[:2])
        found, planned = made["pixel_values"].reshape(-1, made["pixel_values"].shape[-1]), prod(grid)
        told = next((value for name, value in made.items() if name.endswith(GRIDS)), np.array([grid]))
        if prod(told.ravel().tolist()) != planned or len(found) < planned or grid[1] % side or grid[2] % side:
            raise ConfigError(
                f"{tower.key}: its processor {type(self.processor).__name__} makes {told.tolist()} "
                f"patches of a picture of 32x32 pixels, where {grid} are counted and the tower merges "
                f"{side}x{side} of them: take the preprocessor_config.json that the tower came with"
            )
        return int(found.shape[1])

    def grid(self, size: tuple[int, ...]) -> Grid:
        """Frames, rows and columns of the patches of an image of (height, width) pixels."""
        height, width = self.resized(size[0], size[1])
        return 1, height // self.patch, width // self.patch

    def count(self, size: tuple[int, ...]) -> tuple[int, int]:
        """Return (patches, rows) of an image of (height, width) pixels."""
        return prod(self.grid(size)), prod(self.row_grid(size))

    def row_grid(self, size: tuple[int, ...]) -> Grid:
        """Return (frames, rows, columns) of the LLM rows of an image."""
        frames, rows, columns = self.grid(size)
        return frames, rows // self.side, columns // self.side

    def row_layout(self, size: tuple[int, ...]) -> RowRuns:
        """Return the lines of the LLM rows of an image, with tokens between them if there is one."""
        token = self.row_break
        return () if token is None else lines(self.row_grid(size), token)

    def decode(self, item: Item) -> np.ndarray:
        """Decode to uint8 [H, W, channels of the file]."""
        return decode_image(item)

    def blank(self) -> np.ndarray:
        """A dark picture."""
        return np.zeros((32, 32, 3), np.uint8)

    def patches(self, array: np.ndarray) -> np.ndarray:
        """uint8 [H, W, C] → patches float32 [T, V] as the processor makes them, without its padding."""
        tokens = prod(self.grid(array.shape[:2]))
        values = processed(self.processor, array)["pixel_values"]
        patches = values.reshape(-1, values.shape[-1])[:tokens].astype(np.float32)
        return np.ascontiguousarray(patches)
