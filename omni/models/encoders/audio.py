"""An audio encoder: a transformer on log-mel spectrograms of recordings, packed and of any length.

A recording is brought to the encoder's sampling rate and padded with silence to whole merge windows. Two
frames of its spectrogram are a token: the stem (two convolutions over time, as in Whisper) has stride two, so
a token's values are the two frames it stands on, and the stem runs inside the module, where its weights are.
Its three-frame kernels read one frame beyond a token. So that they never read another recording, the module
puts an empty token before each one; what is packed together then gives the same rows as alone, with nothing
padded to the longest. The frames are the tokens' values and nothing else: no frame is stored or sent twice.

Positions are sinusoidal and, in attention, rotary. `merge` neighbouring tokens become one row.

Shapes: S recordings, T tokens, M mel bands, E width of the encoder, R rows, D width of the LLM.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dataloader.audio import decode_audio, resample, resampled_length
from dataloader.format import Item
from omni.config import ConfigError, require
from omni.models.layers import (
    check_divisible,
    check_transformer,
    layer_submodules,
    layer_work,
    transformer_config,
)
from omni.models.registry import Attention, ItemArrays
from ops.linear import linear_flops
from ops.norm import Norm
from ops.spectrogram import log_mel, mel_filters
from parallel.costs import PartWork
from parallel.megatron import ProcessGroupCollection, TransformerBlock
from parallel.packed import PackedTokens, Sharding, pack_tokens

_FRAMES = 2  # of the spectrogram in a token: the stem's stride


@dataclass
class AudioConfig:
    """Sizes. `sample_rate` is in Hz, `n_fft` and `hop` in samples; `merge` tokens become one row.

    The defaults of the spectrogram give 100 frames, 50 tokens and 12.5 rows a second.
    """

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    ffn: int = 192
    sample_rate: int = 16000
    n_fft: int = 400
    hop: int = 160
    mels: int = 80
    merge: int = 4
    rotary_base: float = 10000.0
    norm: str = "RMSNorm"
    recompute: str = "none"


class AudioEncoder:
    """The description of the audio encoder that every policy reads; `build` makes its module."""

    Config = AudioConfig
    modality = "audio"

    def __init__(self, config: AudioConfig) -> None:
        check_transformer("encoder", config, rotary_axes=1)
        require("encoder", config, "sample_rate", "n_fft", "hop", "mels", "merge", "rotary_base")
        if config.hop > config.n_fft:
            raise ConfigError(
                f"encoder.hop={config.hop}, n_fft={config.n_fft}: samples between frames would be lost; "
                "choose hop at most n_fft"
            )
        self.config = config
        # The stem of a shard would have to see its neighbours' frames.
        self.unit = None
        self.window = config.hop * _FRAMES * config.merge  # samples of a row
        self.filters = mel_filters(config.sample_rate, config.n_fft, config.mels)
        empty = int((self.filters.sum(1) == 0).sum())
        if empty:
            raise ConfigError(
                f"encoder.mels={config.mels}: {empty} of them lie between the frequencies of "
                f"n_fft={config.n_fft} and would stay silent; lower mels or raise n_fft"
            )

    def count(self, size: tuple[int, ...]) -> tuple[int, int]:
        """Return (tokens, rows) of a recording of (samples, sampling rate)."""
        rows = -(-resampled_length(size[0], size[1], self.config.sample_rate) // self.window)
        return rows * self.config.merge, rows

    def work(self, element: int, tp: int = 1) -> PartWork:
        """Work of stem, layers and the projector's first layer; its second is small beside them."""
        c = self.config
        layer = layer_work(
            hidden=c.hidden,
            heads=c.heads,
            kv_heads=c.heads,
            head_dim=c.hidden // c.heads,
            ffn=c.ffn,
            gated=False,
            causal=False,
            element=element,
            tp=tp,
        )
        merged = c.hidden * c.merge
        ends = linear_flops(_FRAMES, 3 * c.mels, c.hidden) + linear_flops(1, 3 * c.hidden, c.hidden)
        ends += linear_flops(1, merged, merged) // c.merge
        return PartWork(
            flops_per_token=c.layers * layer.flops_per_token + ends,
            flops_per_square=c.layers * layer.flops_per_square,
            bytes_per_token=c.layers * layer.bytes_per_token,
            weight_bytes=c.layers * layer.weight_bytes,
            recomputed=c.recompute == "full",
        )

    def attention(self) -> Attention:
        """Every token sees all of its item."""
        c = self.config
        return Attention(c.layers, c.heads, c.heads, c.hidden // c.heads, causal=False)

    def check_tp(self, key: str, tp: int) -> None:
        """Heads and feed-forward are what tensor parallelism divides."""
        check_divisible("encoder", self.config, key, tp, "heads", "ffn")

    def decode(self, item: Item) -> np.ndarray:
        """Decode to float32 [samples] at the encoder's sampling rate, one channel."""
        return resample(decode_audio(item), item.size[1], self.config.sample_rate)

    def blank(self) -> np.ndarray:
        """One silent sample."""
        return np.zeros(1, np.float32)

    def preprocess(self, array: np.ndarray) -> ItemArrays:
        """float32 [samples] at the encoder's rate → pairs of frames [T, 2·M], with positions [T, 1]."""
        c = self.config
        padded = np.pad(array, (0, -len(array) % self.window))
        frames = log_mel(torch.from_numpy(padded), self.filters, c.n_fft, c.hop)
        values = frames.reshape(-1, _FRAMES * c.mels).numpy()
        return ItemArrays(values, np.arange(len(values))[:, None])

    def pack(
        self, sharding: Sharding, positions: torch.Tensor, dtype: torch.dtype, device: torch.device
    ) -> PackedTokens:
        """Each recording attends to itself alone."""
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
        self, width: int, dtype: torch.dtype, device: torch.device, groups: ProcessGroupCollection
    ) -> "AudioTransformer":
        """Build the module on `device`."""
        return AudioTransformer(self.config, width, dtype, groups).to(device)


class AudioTransformer(torch.nn.Module):
    """Frames to rows: convolutional stem, transformer, merging over time, two-layer projector."""

    def __init__(
        self, config: AudioConfig, width: int, dtype: torch.dtype, groups: ProcessGroupCollection
    ) -> None:
        super().__init__()
        self.sizes = config
        self.width = width
        self.dtype = dtype
        self.config = transformer_config(
            layers=config.layers,
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.heads,
            ffn=config.ffn,
            norm=config.norm,
            norm_eps=1e-5,
            gated=False,
            bias=True,
            qkv_bias=True,
            recompute=config.recompute,
            dtype=dtype,
            tp=groups.tp.size(),
        )
        merged = config.hidden * config.merge
        self.stem_in = torch.nn.Conv1d(config.mels, config.hidden, 3, padding=1, dtype=dtype)
        self.stem_out = torch.nn.Conv1d(
            config.hidden, config.hidden, 3, stride=_FRAMES, padding=1, dtype=dtype
        )
        self.block = TransformerBlock(
            self.config,
            layer_submodules(config.layers, config.norm, causal=False),
            post_layer_norm=False,
            pg_collection=groups,
        )
        self.final_norm = Norm(self.config, config.hidden)
        self.projector_in = torch.nn.Linear(merged, merged, dtype=dtype)
        self.projector_out = torch.nn.Linear(merged, width, dtype=dtype)

    def forward(self, values: torch.Tensor, positions: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        """values [T, 2·M], positions [T, 1] of packed recordings → rows [R, D], recording by recording."""
        c = self.sizes
        hidden: Any = self._stem(values.to(self.dtype), packed)
        hidden = hidden + sinusoids(positions[:, 0], c.hidden).to(self.dtype)
        hidden = self.block(hidden.unsqueeze(1), None, packed_seq_params=packed).squeeze(1)
        merged = self.final_norm(hidden).reshape(-1, c.hidden * c.merge)
        rows: torch.Tensor = self.projector_out(F.gelu(self.projector_in(merged)))
        return rows

    def _stem(self, values: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        """[T, 2·M] → [T, E], computed with an empty token before each recording.

        The first convolution's bias and its neighbours fill the empty tokens, so they are emptied again
        before the second: at each edge both read zeros, as their own padding would give them.
        """
        where = spaced(packed.packing.cu_seqlens, len(values))
        size = len(values) + len(packed.packing.lengths)
        frames = values.new_zeros(size, values.shape[1]).index_copy(0, where, values)
        full = values.new_zeros(size).index_fill(0, where, 1.0).repeat_interleave(_FRAMES)
        hidden = F.gelu(self.stem_in(frames.reshape(_FRAMES * size, -1).T.unsqueeze(0))) * full
        return F.gelu(self.stem_out(hidden))[0].T.index_select(0, where)


def spaced(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Where each of `tokens` goes, int64 [T], when an empty token is put before each sequence.

    `cu_seqlens` [S+1] holds the edges of the sequences. All on their device: nothing waits for the host.
    """
    index = torch.arange(tokens, device=cu_seqlens.device)
    return index + torch.searchsorted(cu_seqlens.long(), index, right=True)


def sinusoids(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Sines, then cosines, float32 [T, width], of positions [T] (Vaswani et al., 2017, section 3.5)."""
    half = width // 2
    exponent = torch.arange(half, device=positions.device, dtype=torch.float32) / half
    angles = positions.float().unsqueeze(1) * torch.exp(-math.log(10000.0) * exponent)
    return torch.cat([angles.sin(), angles.cos()], dim=1)
