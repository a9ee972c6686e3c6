"""An image encoder as plans and loaders see it: a vision transformer on packed patches of native aspect.

An image is cut into patches as it is: no resizing to a square, only padding to whole merge windows and, above
`max_tokens`, shrinking with its aspect kept. Patches of one merge window are neighbours in token order, so
merging is a reshape. Row and column positions are learned and, in attention, rotary in two dimensions.

Shapes: T patches, P values of a patch.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from dataloader.decode import decode_image
from dataloader.format import Item, SampleError
from omni.config import ConfigError, require
from omni.models.blocks import Embed, EncoderPart, FinalNorm, Projector, Table, encoder_stack, value_bytes
from omni.models.layer_sizes import check_divisible, check_transformer
from omni.models.registry import Attention, ItemArrays

if TYPE_CHECKING:
    from omni.models.encoders.vit_module import ViT
    from parallel.megatron import ProcessGroupCollection
    from parallel.packed import PackedTokens, Sharding


@dataclass
class ViTConfig:
    """Sizes. `max_side` is the largest grid side in patches; `max_tokens` the most patches of one image.

    `taps` are layers after which patches are merged and projected too (DeepStack; Meng et al., 2024): the
    rows of the first are added to what enters the LLM's second layer, and so on.
    """

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    ffn: int = 192
    patch: int = 14
    merge: int = 2
    channels: int = 3
    mean: float = 0.5
    std: float = 0.5
    max_side: int = 512
    max_tokens: int = 16384
    rotary_base: float = 100.0
    norm: str = "RMSNorm"
    recompute: str = "none"
    taps: list[int] = field(default_factory=list)


class ViTEncoder:
    """The description of the image encoder that every policy reads; `build` makes its module."""

    Config = ViTConfig
    modality = "image"

    def __init__(self, config: ViTConfig) -> None:
        check_transformer("encoder", config, rotary_axes=2)
        require("encoder", config, "patch", "merge", "channels", "max_side", "max_tokens", "rotary_base")
        require("encoder", config, "mean", least=-math.inf)
        require("encoder", config, "std", least=1e-6)
        if config.channels not in (1, 3):
            raise ConfigError(f"encoder.channels={config.channels}: choose 1 (grey) or 3 (colour)")
        if config.taps != sorted(set(config.taps)) or not set(config.taps) <= set(range(1, config.layers)):
            raise ConfigError(
                f"encoder.taps={config.taps}: must be layers between 1 and {config.layers - 1}, in order"
            )
        self.config = config
        self.unit = config.merge**2
        self.attach = ("llm.embed", *(f"llm.layers.{number}" for number in range(1, len(config.taps) + 1)))

    def grid(self, size: tuple[int, ...]) -> tuple[int, int]:
        """Return the patch rows and columns of an image of (height, width) pixels.

        Raises:
            SampleError: if one side has more patches than there are positions.
        """
        height, width = self._scaled(size)
        window = self.config.patch * self.config.merge
        rows, columns = (-(-side // window) * self.config.merge for side in (height, width))
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
        limit = self.config.max_tokens // self.unit
        while math.ceil(height / window) * math.ceil(width / window) > limit and max(height, width) > window:
            # Rounding up to windows can exceed the limit again, so shrink a little at a time at the end.
            factor = min(0.99, math.sqrt(limit * window**2 / (height * width)))
            height, width = max(1, int(height * factor)), max(1, int(width * factor))
        return height, width

    def count(self, size: tuple[int, ...]) -> tuple[int, int]:
        """Return (patches, rows) of an image of (height, width) pixels."""
        rows, columns = self.grid(size)
        return rows * columns, rows * columns // self.unit

    def work(self, width: int, element: int, tp: int = 1) -> EncoderPart:
        """Patches and two positions, layers, and a projector at their end and after each tap."""
        c = self.config
        values = c.patch**2 * c.channels
        tail = (FinalNorm(c.hidden, c.norm == "LayerNorm"), Projector(c.hidden, self.unit, width, element))
        return EncoderPart(
            stem=(Embed(values, c.hidden, element), *(Table(c.max_side, c.hidden),) * 2),
            stack=encoder_stack(c, element, tp),
            tail=tail * (1 + len(c.taps)),
            width=width,
            token_bytes=value_bytes(values, 2),
        )

    def attention(self) -> Attention:
        """Every token sees all of its item."""
        c = self.config
        return Attention(c.layers, c.heads, c.heads, c.hidden // c.heads, causal=False)

    def check_tp(self, key: str, tp: int) -> None:
        """Heads and feed-forward are what tensor parallelism divides."""
        check_divisible("encoder", self.config, key, tp, "heads", "ffn")

    def decode(self, item: Item) -> np.ndarray:
        """Decode to uint8 [H, W, channels of the file]."""
        return decode_image(item)

    def blank(self) -> np.ndarray:
        """One grey pixel."""
        return np.zeros((1, 1, 1), np.uint8)

    def preprocess(self, array: np.ndarray) -> ItemArrays:
        """uint8 [H, W, C] → normalised patches [T, P] in window order, with (row, column) positions."""
        c = self.config
        image = torch.from_numpy(np.ascontiguousarray(array)).float().div_(255.0)
        image = image.mean(2, keepdim=True) if c.channels == 1 else image.expand(-1, -1, 3)
        image = image.sub(c.mean).div_(c.std).permute(2, 0, 1)
        height, width = self._scaled(array.shape[:2])
        if (height, width) != array.shape[:2]:
            image = F.interpolate(
                image[None], (height, width), mode="bilinear", antialias=True, align_corners=False
            )[0]
        rows, columns = self.grid(array.shape[:2])
        image = F.pad(image, (0, columns * c.patch - width, 0, rows * c.patch - height))
        windows = image.reshape(
            c.channels, rows // c.merge, c.merge, c.patch, columns // c.merge, c.merge, c.patch
        )
        # → window row, window column, row and column in the window, then the values of the patch
        patches = windows.permute(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, -1)
        return ItemArrays(patches.contiguous().numpy(), _window_positions(rows, columns, c.merge))

    def pack(
        self, sharding: "Sharding", positions: torch.Tensor, dtype: torch.dtype, device: torch.device
    ) -> "PackedTokens":
        """Each image attends to itself alone."""
        from parallel.packed import pack_tokens

        c = self.config
        return pack_tokens(
            sharding,
            positions,
            heads=c.heads,
            head_dim=c.hidden // c.heads,
            rotary_base=c.rotary_base,
            causal=False,
            dtype=dtype,
            device=device,
        )

    def build(
        self, width: int, dtype: torch.dtype, device: torch.device, groups: "ProcessGroupCollection"
    ) -> "ViT":
        """Build the module on `device`."""
        from omni.models.encoders.vit_module import ViT

        return ViT(self.config, width, dtype, groups).to(device)


def _window_positions(rows: int, columns: int, merge: int) -> np.ndarray:
    row, column = np.mgrid[0:rows, 0:columns]
    grid = np.stack([row, column], -1).reshape(rows // merge, merge, columns // merge, merge, 2)
    return grid.transpose(0, 2, 1, 3, 4).reshape(-1, 2).copy()
