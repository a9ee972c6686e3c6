"""The vision towers of Qwen2.5-VL, Qwen3-VL and Qwen3.5 in our own layers, from the folder that one was
published in: as `grid_tower` runs them, with tensor parallelism, shared items, recomputation and adapters.

Patches are rotated by row and column. The folder's `config.json` says what there is besides:

    positions   a learned square table, interpolated to the grid of each picture (Qwen3-VL)
    windows     attention within squares of the picture in all but some layers (Bai et al., Qwen2.5-VL, 2025,
                section 2.1.1). Patches come window by window, and rows are put back in the end
    taps        rows for later layers of the LLM, normed as rows (DeepStack; Meng et al., 2024)

Invariant: rows are those of transformers' class for the same folder, whoever shares the layers or the item.

Shapes: T patches, V values of a patch, E width of the tower, R rows, D width of the LLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from omni.keys import ConfigError, Rules, at_least, one_of
from omni.llm_config import RECOMPUTE
from omni.llm_sections import LoraConfig
from omni.models.blocks import Embed, EncoderPart, FinalNorm, Merged
from omni.models.encoders.qwen_stem import InterpolatedTable, QwenStem, Reordered
from omni.models.encoders.qwen_tower import QwenTower
from omni.models.encoders.transformer import TransformerEncoder
from omni.models.encoders.vit import window_positions
from omni.models.layer_sizes import ANEW_ALONE, INPUTS_ALONE, LayerSizes
from omni.models.registry import ItemArrays
from omni.models.towers.folder import NO_FOLDER, open_tower, weights_of
from omni.models.towers.images import GridImages
from omni.open_models.folder import Folder
from parallel.work import Block

if TYPE_CHECKING:
    from omni.models.encoders.transformer_module import TransformerModule
    from parallel.megatron import ProcessGroupCollection
    from parallel.packed import PackedTokens, Sharding


@dataclass
class QwenViTConfig:
    """The keys. `folder` has `config.json`, the processor and, unless `weights` is false, which draws them,
    the weights, of a tower or of a whole model. With `lora` adapters of linears of its layers learn alone. A
    `row_break` is the id of a token between neighbouring lines of rows.
    """

    folder: str = ""
    weights: bool = True
    recompute: str = one_of(RECOMPUTE, "none")
    lora: LoraConfig = field(default_factory=LoraConfig)
    row_break: int | None = at_least(0, None)
    offload: int | None = at_least(0, None)
    keep_attention: bool | None = None

    rules: ClassVar[Rules] = (INPUTS_ALONE, ANEW_ALONE)


class QwenViT(GridImages, TransformerEncoder):
    """The encoder: patches of pictures, `merge` by `merge` of which become a row."""

    Config = QwenViTConfig

    def __init__(self, config: QwenViTConfig) -> None:
        if not config.folder:
            raise ConfigError(NO_FOLDER)
        self.begins_with_weights, self.row_break = config.weights, config.row_break
        self.tower = own = QwenTower.of(open_tower(config.folder, None))
        if own.windows and config.recompute == "selective":
            raise ConfigError(
                "encoder.recompute=selective: costs count attention that is made anew by squared lengths, "
                "and that of windows has none; choose full or none"
            )
        shape = replace(
            own.shape,
            recompute=config.recompute,
            offload=config.offload,
            keep_attention=config.keep_attention,
            lora=config.lora,
        )
        super().__init__(shape, values=own.values, row_tokens=own.merge**2, axes=2)
        self.axes = 4  # beside row and column the sides of their grid, which interpolation asks for
        if own.windows:
            self.unit = None  # windows would be cut
        values = self.open_images(own.tower, own.merge)
        if values != own.values:
            raise own.tower.refused(
                f"its processor makes {values} numbers of a patch, and it takes {own.values}"
            )

    def layers(self) -> LayerSizes:
        """As transformers computes them."""
        own = self.tower
        return replace(
            super().layers(),
            norm_eps=own.norm_eps,
            activation=own.activation,
            window=(own.window_rows * own.merge) ** 2,
            windowed=len(own.windows),
        )

    def preprocess(self, array: np.ndarray) -> ItemArrays:
        """uint8 [H, W, C] → patches float32 [T, V] window by window, and (row, column, rows, columns)."""
        _, rows, columns = self.grid(array.shape[:2])
        where = window_positions(rows, columns, self.side)
        positions = np.concatenate([where, np.broadcast_to((rows, columns), where.shape)], axis=1)
        values = self.patches(array)
        if self.tower.windows:
            order, _ = in_windows(rows // self.side, columns // self.side, self.tower.window_rows)
            values, positions = (
                own.reshape(len(order), self.row_tokens, -1)[order].reshape(own.shape)
                for own in (values, positions)
            )
        return ItemArrays(values, positions)

    def stem(self, dtype: torch.dtype) -> torch.nn.Module:
        """A linear, and a table if there is one."""
        own = self.tower
        return QwenStem(own.patch_shape, self.config.hidden, own.patch_bias, own.table_side, dtype)

    def stem_work(self, element: int) -> tuple[Block, ...]:
        """The same as work."""
        c, own = self.config, self.tower
        table = (InterpolatedTable(own.table_side, c.hidden, element),) if own.table_side else ()
        return (Embed(self.values, c.hidden, element, own.patch_bias), *table)

    def tap_norm(self) -> Block:
        """Taps norm neighbours together."""
        merged = self.config.hidden * self.row_tokens
        return Merged(FinalNorm(merged, self.config.norm), self.row_tokens)

    def work(self, width: int, element: int, tp: int = 1) -> EncoderPart:
        """State the work; rows of windows are put back in order.

        Raises:
            ConfigError: for rows that are not as wide as the LLM.
        """
        own = self.tower
        if own.out != width:
            raise ConfigError(
                f"{own.tower.key}: {own.tower.kind.__name__} makes rows of {own.out} numbers, and "
                f"model.llm.hidden={width}: take an LLM of this width, or name=grid_tower with a projector"
            )
        part = super().work(width, element, tp)
        ordered = (Reordered(self.row_tokens, width, element),) if own.windows else ()
        return replace(part, tail=(*part.tail, *ordered))

    def published(self) -> Folder | None:
        """The folder's weights by our names, None where they are drawn.

        Raises:
            ConfigError: if it has none, or others.
        """
        return weights_of(self.tower.tower, self.tower.rules()) if self.begins_with_weights else None

    def pack(
        self, sharding: "Sharding", positions: torch.Tensor, dtype: torch.dtype, device: torch.device
    ) -> "PackedTokens":
        """Each item attends to itself, and in layers with windows each window."""
        where = positions[:, :2]
        packed = super().pack(sharding, where, dtype, device)
        if not self.tower.windows:
            return packed
        from omni.models.encoders.qwen_module import InWindows
        from parallel.packed import Sharding

        assert not sharding.tail, "items that stay whole"
        lengths, order = self._windows(sharding.grids)
        windowed = super().pack(Sharding.whole(lengths, sharding.tp), where, dtype, device)
        known = {own.name: getattr(packed, own.name) for own in fields(packed)}
        known["windowed"] = replace(windowed, rotary=packed.rotary)
        return InWindows(**known, order=torch.from_numpy(order))

    def _windows(self, grids: Sequence[tuple[int, ...]]) -> tuple[list[int], np.ndarray]:
        """Tokens of each window of items whose rows have these grids, and which of the rows that come out is
        the first, the second, and so on.
        """
        lengths, orders, before = list[int](), [np.zeros(0, np.int64)], 0
        for _, rows, columns in grids:
            order, sizes = in_windows(rows, columns, self.tower.window_rows)
            lengths += [size * self.row_tokens for size in sizes]
            orders.append(before + np.argsort(order))
            before += len(order)
        return lengths, np.concatenate(orders)

    def build(
        self, width: int, dtype: torch.dtype, device: torch.device, groups: "ProcessGroupCollection"
    ) -> "TransformerModule":
        """Build the module on `device`."""
        from omni.models.encoders.qwen_module import QwenViTModule

        module = QwenViTModule(
            self.config,
            self.stem(dtype),
            self.row_tokens,
            width,
            dtype,
            groups,
            sizes=self.layers(),
            windowed=self.tower.windows,
            norms_rows=True,
            device=device,
        )
        return module.to(device)


@lru_cache(maxsize=4096)
def in_windows(rows: int, columns: int, side: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """The order, int64 [rows · columns], in which windows of `side` by `side` cover a grid, row by row of
    windows and within each, and how many of its places each window has: fewer at the last sides.
    """
    places = np.arange(rows * columns).reshape(rows, columns)
    windows = [
        places[top : top + side, left : left + side].ravel()
        for top in range(0, rows, side)
        for left in range(0, columns, side)
    ]
    return np.concatenate(windows), tuple(map(len, windows))
