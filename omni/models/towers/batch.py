"""Towers that take items of one shape in a batch: squares of pixels, or spectrograms of so many seconds."""

from collections.abc import Sequence
from dataclasses import replace
from math import isqrt, prod
from typing import Any

import numpy as np
import torch

from dataloader.audio import decode_audio, resample, resampled_length
from dataloader.decode import decode_image
from dataloader.format import Item, SampleError
from omni.keys import ConfigError
from omni.models.item_layout import Grid, lines
from omni.models.registry import ItemArrays
from omni.models.towers.attention import WHOLE
from omni.models.towers.calls import BatchCalls, ConnectedCalls, Given
from omni.models.towers.encoder import TowerConfig, WrappedTower
from omni.models.towers.folder import BATCHES, GRIDS
from omni.models.towers.processors import open_processor, processed
from ops.attention import make_packing
from pipeline.domain_plan import RowRuns


class BatchTower(WrappedTower):
    """A tower of images that become one square or several (tiles), or of recordings that become spectrograms
    of one length. Its tokens go through a projector, and `merge` neighbours become a row.

    Of an image of several squares these follow one another, each row by row.
    """

    calls: BatchCalls

    def __init__(self, config: TowerConfig) -> None:
        super().__init__(config)
        own = self.tower
        name = next((name for name in BATCHES if name in own.takes), None)
        if name is None or {*GRIDS} & {*own.takes}:
            raise own.refused(f"its forward takes no batch ({', '.join(BATCHES)}) alone: try name=grid_tower")
        if config.projector is False and not config.connector:
            raise ConfigError(
                f"encoder.projector=false: {own.kind.__name__} makes no rows for an LLM; leave the key out"
            )
        self.name, self.audio = name, name == BATCHES[1]
        self.modality = "audio" if self.audio else "image"
        self.processor: Any = open_processor(
            config.folder, self.audio, own.model if config.connector else None
        )
        shape = self._squares(self.blank())[0].shape
        self.calls = ConnectedCalls(name, shape) if config.connector else BatchCalls(name, shape)
        self.tokens, self.sides = 1, (1, 1)
        self._try()
        self.values = prod(self.calls.shape) // self.tokens
        if config.connector:
            self._check_connected()
            return
        self.projected = config.merge if self.audio else config.merge**2
        self.rows = self.tokens // self.projected
        if any(side % config.merge for side in self.sides if side > 1) or self.tokens % self.projected:
            raise ConfigError(
                f"encoder.merge={config.merge}: {own.kind.__name__} makes {self.sides[0]} rows of "
                f"{self.sides[1]} tokens, which it must divide"
            )

    def _try(self) -> None:
        """Run the tower once without storage: how many tokens come out, and how many of them are patches."""
        own, shape = self.tower, self.calls.shape
        self.tokens = prod(shape)  # of one number each, until it is known
        tried = self.tried(1, 4)[1]
        found, self.out = tried.out.shape
        self.freeze(tried)
        if self.audio:
            self.tokens, self.sides = found, (1, found)
        else:
            patch = own.config.patch_size
            height, width = (patch, patch) if isinstance(patch, int) else patch
            self.sides = shape[-2] // height, shape[-1] // width
            self.tokens = prod(self.sides)
        ahead = tried.attended[0][0] - self.tokens if self.config.connector else found - self.tokens
        if ahead < 0 or prod(shape) % self.tokens:
            raise own.refused(f"of {shape} it makes {found} tokens, where {self.tokens} patches are planned")
        self.calls = replace(self.calls, ahead=ahead)
        self.rows = found

    def _check_connected(self) -> None:
        """The connector makes the LLM's rows: as many as the model's configuration says."""
        own, config = self.tower, self.config
        self.projected = 0
        if config.projector or config.merge > 1:
            raise ConfigError(
                f"encoder.connector=true with projector={config.projector} and merge={config.merge}: the "
                f"connector of {own.folder} makes the rows; leave these out"
            )
        said = getattr(own.model, "image_seq_length", self.rows)
        if said != self.rows:
            raise ConfigError(
                f"{own.key}: config.json says image_seq_length={said}, and of a square of its processor come "
                f"{self.rows} rows: take config.json and preprocessor_config.json that the weights came with"
            )

    def _squares(self, array: np.ndarray) -> np.ndarray:
        """A decoded item → what the processor makes of it: float32 [squares, …]."""
        if not self.audio:
            found = processed(self.processor, array)[self.name]
            return found.reshape(-1, *found.shape[-3:]).astype(np.float32)
        try:
            out = self.processor(
                array, sampling_rate=self.processor.sampling_rate, return_tensors="np", padding="max_length"
            )
        except ValueError as error:
            raise SampleError(f"{type(self.processor).__name__} refuses the recording: {error}") from error
        return np.asarray(out[self.name], np.float32)

    def sample(self, tokens: int, element: int) -> tuple[int, torch.Tensor, Given]:
        """One item, or as many as have so many tokens."""
        items = max(1, tokens // self.tokens)
        values = torch.empty(items * prod(self.calls.shape), device="meta")
        return items * self.tokens, values, Given()

    def count(self, size: tuple[int, ...]) -> tuple[int, int]:
        """Return (tokens, rows) of an image of (height, width), or a recording of (samples, rate)."""
        squares = self._count(size)
        return squares * self.tokens, squares * self.rows

    def _count(self, size: tuple[int, ...]) -> int:
        """Squares of an item."""
        if self.audio:
            samples = resampled_length(size[0], size[1], self.processor.sampling_rate)
            if samples > self.processor.n_samples:
                raise SampleError(
                    f"a recording of {size[0] / size[1]:.1f} s is longer than the "
                    f"{self.processor.n_samples / self.processor.sampling_rate:g} s that "
                    f"{self.tower.kind.__name__} takes: cut it, or let data.on_long drop it"
                )
            return 1
        counts = getattr(self.processor, "get_number_of_image_patches", None)
        return int(counts(size[0], size[1], {})) if counts is not None else 1

    def row_grid(self, size: tuple[int, ...]) -> Grid:
        """Return (squares, rows, columns) of the LLM rows of an item."""
        rows, columns = self.sides
        merge = self.config.merge if self.audio else isqrt(self.tokens // self.rows)
        return self._count(size), max(1, rows // merge), columns // merge

    def row_layout(self, size: tuple[int, ...]) -> RowRuns:
        """Return the lines of the LLM rows of an item, with tokens between them if there is one."""
        token = self.config.row_break
        return () if token is None else lines(self.row_grid(size), token)

    def decode(self, item: Item) -> np.ndarray:
        """Decode to uint8 [H, W, channels of the file], or to float32 [samples] at the processor's rate."""
        if self.audio:
            return resample(decode_audio(item), item.size[1], self.processor.sampling_rate)
        return decode_image(item)

    def blank(self) -> np.ndarray:
        """A dark picture, or one silent sample."""
        return np.zeros(1, np.float32) if self.audio else np.zeros((32, 32, 3), np.uint8)

    def preprocess(self, array: np.ndarray) -> ItemArrays:
        """A decoded item → values [T, V], those of its squares in order."""
        values = self._squares(array).reshape(-1, self.values)
        return ItemArrays(values, np.zeros((len(values), 0), np.int64))

    def given(self, grids: Sequence[Grid], dtype: torch.dtype, device: torch.device) -> Given:
        """How squares attend, and which of their tokens are neighbours."""
        squares = sum(grid[0] for grid in grids)
        each = self.tokens + self.calls.ahead
        packing = make_packing((each,) * squares, False, self.tower.hidden, device, dtype)
        places = {}
        if self.config.merge > 1 and not self.audio:
            merge, (rows, columns) = self.config.merge, self.sides
            one = np.arange(self.tokens).reshape(rows // merge, merge, columns // merge, merge)
            order = one.transpose(0, 2, 1, 3).ravel()
            every = (np.arange(squares)[:, None] * self.tokens + order).ravel()
            places["neighbours"] = torch.from_numpy(every)
        return Given({WHOLE: packing}, places=places)
