"""An encoder of multivariate time series: a transformer on packed patches of consecutive steps.

A series is normalised channel by channel, padded with zeros at its end to whole merge windows and cut into
patches; each patch, all channels of `patch` steps, is one token. `merge` tokens become one row for the LLM.

`TimeSeriesEncoder` describes the encoder to the platform, without weights: plans are made from it. Its
`build` makes `TimeSeriesTransformer` (module.py), a plain torch module: put a model of your own in its place.

Shapes: S steps, C channels, T tokens, P values of a token.
"""

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from omni.encoders import (
    Attention,
    ConfigError,
    Embed,
    EncoderPart,
    FinalNorm,
    Item,
    ItemArrays,
    LayerSizes,
    Projector,
    Rule,
    Rules,
    SampleError,
    Stack,
    at_least,
    value_bytes,
)

if TYPE_CHECKING:
    from omni.encoder_modules import PackedTokens, ProcessGroupCollection, Sharding
    from omni_timeseries.module import TimeSeriesTransformer


@dataclass
class TimeSeriesConfig:
    """The keys of `model.encoders.<name>`. A series may have fewer channels than `channels`, never more."""

    layers: int = at_least(1, 2)
    hidden: int = at_least(1, 64)
    heads: int = at_least(1, 4)
    ffn: int = at_least(1, 192)
    channels: int = at_least(1, 3)
    patch: int = at_least(1, 4)
    merge: int = at_least(1, 4)
    rotary_base: float = at_least(1, 1000.0)

    rules: ClassVar[Rules] = (
        Rule(
            "heads",
            lambda own: own.hidden % (2 * own.heads) == 0,
            "hidden={hidden} must divide into heads of even size, for rotation",
        ),
    )


class TimeSeriesEncoder:
    """The description: takes items of modality "timeseries" and format "npy", of size (steps, channels)."""

    Config = TimeSeriesConfig
    modality = "timeseries"
    attach = ("llm.embed",)

    def __init__(self, config: TimeSeriesConfig) -> None:
        self.config = config
        self.unit = config.merge

    def count(self, size: tuple[int, ...]) -> tuple[int, int]:
        """Return (tokens, rows) of a series of (steps, channels)."""
        c = self.config
        if len(size) != 2 or size[1] > c.channels:
            raise SampleError(
                f"a series has size {size}, the encoder takes (steps, channels) with at most "
                f"encoder.channels={c.channels}: raise it"
            )
        rows = -(-size[0] // (c.patch * c.merge))
        return rows * c.merge, rows

    def work(self, width: int, element: int, tp: int = 1) -> EncoderPart:
        """What the module takes, in front of an LLM of `width`, with `element` bytes a number."""
        c = self.config
        return EncoderPart(
            stem=(Embed(c.patch * c.channels, c.hidden, element),),
            stack=Stack.of(layer_sizes(c), element, tp),
            tail=(FinalNorm(c.hidden, "RMSNorm"), Projector(c.hidden, c.merge, width, element)),
            width=width,
            token_bytes=value_bytes(c.patch * c.channels, 1),
        )

    def attention(self) -> Attention:
        """Every token sees all of its series: what sharing a long series among ranks is planned from."""
        c = self.config
        return Attention(c.layers, c.heads, c.heads, c.hidden // c.heads, causal=False)

    def check_tp(self, key: str, tp: int) -> None:
        """The module's layers are torch's own, whole on every rank; megatron-core's would divide."""
        if tp > 1:
            raise ConfigError(f"{key}={tp}: the layers of this encoder are not divided; leave it at 1")

    def decode(self, item: Item) -> np.ndarray:
        """The bytes of a .npy file → float32 [S, C]."""
        try:
            series = np.lib.format.read_array(io.BytesIO(item.data), allow_pickle=False)
        except Exception as error:  # damaged headers raise many kinds: ValueError, EOFError, MemoryError, …
            raise SampleError(f"not a .npy array that can be read: {error}") from error
        if series.shape != item.size:
            raise SampleError(f"the array has shape {series.shape}, its metadata says {item.size}")
        if series.dtype.kind not in "fiu":
            raise SampleError(f"the series holds {series.dtype}: store real numbers")
        with np.errstate(over="ignore"):
            series = series.astype(np.float32)
        if not np.isfinite(series).all():
            raise SampleError("the series holds values that are not finite, or too large for float32")
        return series

    def blank(self) -> np.ndarray:
        """One step of one channel."""
        return np.zeros((1, 1), np.float32)

    def preprocess(self, array: np.ndarray) -> ItemArrays:
        """float32 [S, C] → normalised patches [T, P] with positions [T, 1]. Missing channels are zero."""
        c = self.config
        steps, channels = array.shape
        tokens, _ = self.count(array.shape)
        series = array.astype(np.float64)
        mean, deviation = series.mean(0), series.std(0)
        # A constant channel becomes zeros, not its rounding errors enlarged.
        scale = np.maximum(deviation, 1e-6 * np.abs(mean) + 1e-30)
        padded = np.zeros((tokens * c.patch, c.channels), np.float32)
        padded[:steps, :channels] = (series - mean) / scale
        return ItemArrays(padded.reshape(tokens, c.patch * c.channels), np.arange(tokens)[:, None])

    def pack(
        self, sharding: "Sharding", positions: torch.Tensor, dtype: torch.dtype, device: torch.device
    ) -> "PackedTokens":
        """Each series attends to itself alone."""
        from omni.encoder_modules import pack_tokens

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
    ) -> "TimeSeriesTransformer":
        """Build the module on `device`, whole on every rank. Attention exchanges the parts of series that
        several ranks share over `groups.pool`.
        """
        from omni_timeseries.module import TimeSeriesTransformer

        return TimeSeriesTransformer(self.config, width, dtype, groups).to(device)


def layer_sizes(config: TimeSeriesConfig) -> LayerSizes:
    """The layers of the module: what its work is stated from, and its megatron `config`."""
    return LayerSizes(
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.heads,
        ffn=config.ffn,
        gated=False,
        causal=False,
        bias=True,
        qkv_bias=True,
        norm="RMSNorm",
        recompute="none",
    )
