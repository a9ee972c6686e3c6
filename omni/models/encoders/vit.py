"""An image encoder as plans and loaders see it: a vision transformer on packed patches of native aspect.

An image is cut into patches as it is: no resizing to a square, only padding to whole merge windows and, above
`max_tokens`, shrinking with its aspect kept. Patches of one merge window are neighbours in token order, so
merging is a reshape. Row and column positions are learned and, in attention, rotary in two dimensions.

Shapes: T patches, P values of a patch, E width of the encoder.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from dataloader.decode import decode_image
from dataloader.format import Item, SampleError
from omni.keys import at_least, one_of
from omni.models.blocks import Embed, Table
from omni.models.encoders.transformer import TransformerEncoder
from omni.models.item_layout import lines
from omni.models.layer_sizes import TransformerEncoderConfig
from omni.models.registry import ItemArrays
from ops.one_copy import later
from parallel.work import Block
from pipeline.domain_plan import RowRuns

if TYPE_CHECKING:
    from parallel.packed import PackedTokens


SIDES = ("rows", "columns")  # of a patch that are picture: numbers behind its pixels


@dataclass
class ViTConfig(TransformerEncoderConfig):
    """Sizes. `max_side` is the largest grid side in patches; `max_tokens` the most patches of one image. A
    `row_break` is the id of a token between neighbouring lines of rows.
    """

    rotary_base: float = at_least(1, 100.0)
    patch: int = at_least(1, 14)
    merge: int = at_least(1, 2)
    channels: int = one_of((1, 3), 3)  # grey or colour
    mean: float = at_least(-math.inf, 0.5)
    std: float = at_least(1e-6, 0.5)
    max_side: int = at_least(1, 512)
    max_tokens: int = at_least(1, 16384)
    row_break: int | None = at_least(0, None)


class ViTEncoder(TransformerEncoder):
    """The image encoder: patches, in windows of `merge` times `merge`, each of which becomes a row."""

    Config = ViTConfig
    modality = "image"
    config: ViTConfig

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config, values=config.patch**2 * config.channels, row_tokens=config.merge**2, axes=2)

    def grid(self, size: tuple[int, ...]) -> tuple[int, int]:
        """Return the patch rows and columns of an image of (height, width) pixels.

        Raises:
            SampleError: if one side has more patches than there are positions.
        """
        height, width = self._scaled(size)
        merge, window = self.config.merge, self.config.patch * self.config.merge
        rows, columns = -(-height // window) * merge, -(-width // window) * merge
        if max(rows, columns) > self.config.max_side:
            raise SampleError(
                f"an image of {size[0]}x{size[1]} pixels has a grid of {rows}x{columns} patches, more than "
                f"encoder.max_side={self.config.max_side} on a side: raise it, or lower encoder.max_tokens"
            )
        return rows, columns

    def _scaled(self, size: tuple[int, ...]) -> tuple[int, int]:
        """Shrink (height, width) until its patches fit `max_tokens`, keeping the aspect."""
        height, width = size[0], size[1]
        window = self.config.patch * self.config.merge
        limit = self.config.max_tokens // self.row_tokens
        while -(-height // window) * -(-width // window) > limit and max(height, width) > window:
            # Rounding up to windows can exceed the limit again, so shrink a little at a time at the end.
            factor = min(0.99, math.sqrt(limit * window**2 / (height * width)))
            height, width = max(1, int(height * factor)), max(1, int(width * factor))
        return height, width

    def count(self, size: tuple[int, ...]) -> tuple[int, int]:
        """Return (patches, rows) of an image of (height, width) pixels."""
        rows, columns = self.grid(size)
        return rows * columns, rows * columns // self.row_tokens

    def row_grid(self, size: tuple[int, ...]) -> tuple[int, int, int]:
        """Return (frames, rows, columns) of the LLM rows of an image, which are its merge windows."""
        rows, columns = self.grid(size)
        return 1, rows // self.config.merge, columns // self.config.merge

    def row_layout(self, size: tuple[int, ...]) -> RowRuns:
        """Return the lines of the LLM rows of an image, with tokens between them if there is one."""
        token = self.config.row_break
        return () if token is None else lines(self.row_grid(size), token)

    def decode(self, item: Item) -> np.ndarray:
        """Decode to uint8 [H, W, channels of the file]."""
        return decode_image(item)

    def blank(self) -> np.ndarray:
        """One grey pixel."""
        return np.zeros((1, 1, 1), np.uint8)

    def preprocess(self, array: np.ndarray) -> ItemArrays:
        """uint8 [H, W, C] → patches [T, P + 2] in window order, with (row, column) positions.

        A patch has its pixels, row by row and channels last, and behind them how many of its rows and columns
        are picture; the others are padding. Pixels are uint8 where the encoder sees colours; where it sees
        greys they are the sum of three channels, int16. `transfer` makes numbers of them.
        """
        c = self.config
        height, width = self._scaled(array.shape[:2])
        image = array if (height, width) == array.shape[:2] else _shrunk(array, height, width)
        image = _with_channels(image, c.channels)
        rows, columns = self.grid(array.shape[:2])
        padded = np.zeros((rows * c.patch, columns * c.patch, c.channels), image.dtype)
        padded[:height, :width] = image
        windows = padded.reshape(
            rows // c.merge, c.merge, c.patch, columns // c.merge, c.merge, c.patch, c.channels
        )
        positions = window_positions(rows, columns, c.merge)
        patches = np.empty((rows * columns, self.values + len(SIDES)), image.dtype)
        # → window row, window column, row and column in the window, then the pixels of the patch
        ordered = windows.transpose(0, 3, 1, 4, 2, 5, 6)
        patches[:, : self.values].reshape(ordered.shape)[:] = ordered  # a view: axes are only divided
        seen = np.array((height, width)) - positions * c.patch
        patches[:, self.values :] = seen.clip(0, c.patch)
        return ItemArrays(patches, positions)

    def transfer(self, values: np.ndarray, device: torch.device) -> torch.Tensor:
        """Patches [T, P + 2] of `preprocess` → normalised float32 [T, P] on `device`, channel by channel, 0
        where nothing is seen.
        """
        c = self.config
        # Only few patches are padded. They are looked for here, since to ask a GPU is to wait for it.
        edge = np.flatnonzero((values[:, self.values :] < c.patch).any(1))
        side = np.arange(c.patch)
        row, column = (side < of[:, None] for of in values[edge, self.values :].T)
        seen = np.repeat((row[:, :, None] & column[:, None, :])[:, None], c.channels, 1)
        seen = seen.reshape(len(edge), self.values)
        return later(device, self._normal, *map(torch.from_numpy, (values, edge, seen)))

    def _normal(self, patches: torch.Tensor, edge: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Normalise patches, of which those of `edge` are padded where they are not `seen`."""
        c = self.config
        planes = patches[:, : self.values].unflatten(1, (c.patch**2, c.channels)).permute(0, 2, 1)
        normal = planes.to(torch.float32, memory_format=torch.contiguous_format).flatten(1)
        if c.channels == 1:
            normal.div_(3.0)
        normal.div_(255.0).sub_(c.mean).div_(c.std)
        normal[edge] = normal[edge].where(seen, 0.0)
        return normal

    def stem(self, dtype: torch.dtype) -> torch.nn.Module:
        """A linear, and learned positions."""
        return PatchStem(self.values, self.config.hidden, self.config.max_side, dtype)

    def stem_work(self, element: int) -> tuple[Block, ...]:
        """A linear, and two tables."""
        c = self.config
        return (Embed(self.values, c.hidden, element), *(Table(c.max_side, c.hidden),) * 2)


class PatchStem(torch.nn.Module):
    """A linear of each patch, plus a learned vector of its row and one of its column."""

    def __init__(self, values: int, hidden: int, max_side: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.patch_linear = torch.nn.Linear(values, hidden, dtype=dtype)
        self.row_embedding = torch.nn.Embedding(max_side, hidden, dtype=dtype)
        self.column_embedding = torch.nn.Embedding(max_side, hidden, dtype=dtype)

    def forward(self, values: torch.Tensor, positions: torch.Tensor, packed: "PackedTokens") -> torch.Tensor:
        """values [T, P], positions [T, 2] → [T, E]."""
        hidden: torch.Tensor = self.patch_linear(values)
        return hidden + self.row_embedding(positions[:, 0]) + self.column_embedding(positions[:, 1])


def _with_channels(image: np.ndarray, channels: int) -> np.ndarray:
    """uint8 [H, W, 1 or 3] → colours uint8 [H, W, 3], or greys [H, W, 1] as the sum of three, int16."""
    if channels == 1:
        return image.sum(2, dtype=np.int16, keepdims=True) * np.int16(3 // image.shape[2])
    return np.broadcast_to(image, (*image.shape[:2], channels))


def _shrunk(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 [H, W, C] → [height, width, C]: bilinear and antialiased, to the nearest level."""
    planes = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None]
    small = F.interpolate(planes, (height, width), mode="bilinear", antialias=True, align_corners=False)
    return small[0].permute(1, 2, 0).numpy()


def window_positions(rows: int, columns: int, merge: int) -> np.ndarray:
    """(row, column), int64 [rows · columns, 2], of patches, one `merge` by `merge` window after the other."""
    row, column = np.mgrid[0:rows, 0:columns]
    grid = np.stack([row, column], -1).reshape(rows // merge, merge, columns // merge, merge, 2)
    return grid.transpose(0, 2, 1, 3, 4).reshape(-1, 2).copy()
