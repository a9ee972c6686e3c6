"""An audio encoder as plans and loaders see it: log-mel spectrograms of recordings, packed and of any length.

A recording is brought to the encoder's sampling rate and padded with silence to whole merge windows. Two
frames of its spectrogram are a token; `merge` neighbouring tokens become one row.

Shapes: T tokens, M mel bands.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from dataloader.audio import decode_audio, resample, resampled_length
from dataloader.format import Item
from omni.config import ConfigError, require
from omni.models.blocks import EncoderPart, FinalNorm, Projector, encoder_stack, value_bytes
from omni.models.layer_sizes import check_divisible, check_transformer
from omni.models.registry import Attention, ItemArrays
from omni.models.stack import linear_weights
from ops.linear import linear_flops
from ops.spectrogram import log_mel, mel_filters
from parallel.work import INDEX, Grad, Load, Weight, Work

if TYPE_CHECKING:
    from omni.models.encoders.audio_module import AudioTransformer
    from parallel.megatron import ProcessGroupCollection
    from parallel.packed import PackedTokens, Sharding

FRAMES = 2  # of the spectrogram in a token: the stem's stride


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


@dataclass(frozen=True)
class Stem:
    """The work of two convolutions over time, of three frames each, from mel bands to the stream [T, E]."""

    mels: int
    hidden: int
    element: int

    def weights(self) -> tuple[Weight, ...]:
        """Kernels and biases."""
        first = linear_weights(3 * self.mels, self.hidden, self.hidden)
        return (*first, *linear_weights(3 * self.hidden, self.hidden, self.hidden))

    def forward(self, load: Load) -> Work:
        """With an empty token before each recording: frames, the mask of empty tokens, what the convolutions
        put out, the second one's input and where tokens stand are kept, and the stream.
        """
        flops = linear_flops(FRAMES * load.tokens, 3 * self.mels, self.hidden)
        spaced = load.tokens + load.sequences
        of_spaced = FRAMES * (self.mels + 1 + 2 * self.hidden) + self.hidden
        return Work(
            flops=flops + linear_flops(load.tokens, 3 * self.hidden, self.hidden),
            kept=(spaced * of_spaced + load.tokens * self.hidden) * self.element + load.tokens * INDEX,
        )

    def backward(self, load: Load, grad: Grad) -> Work:
        """Twice the forward, as if frames had gradients too. It needs most where gradients of the second
        convolution's input are made and masked.
        """
        if grad is Grad.WEIGHT:
            return Work()
        most = (load.tokens + load.sequences) * self.hidden * (1 + 2 * FRAMES) * self.element
        return Work(flops=2 * self.forward(load).flops, workspace=most)


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
        self.window = config.hop * FRAMES * config.merge  # samples of a row
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

    def work(self, width: int, element: int, tp: int = 1) -> EncoderPart:
        """Stem, layers, projector."""
        c = self.config
        return EncoderPart(
            stem=(Stem(c.mels, c.hidden, element),),
            stack=encoder_stack(c, element, tp),
            tail=(FinalNorm(c.hidden, c.norm == "LayerNorm"), Projector(c.hidden, c.merge, width, element)),
            width=width,
            token_bytes=value_bytes(FRAMES * c.mels, 1),
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
        values = frames.reshape(-1, FRAMES * c.mels).numpy()
        return ItemArrays(values, np.arange(len(values))[:, None])

    def pack(
        self, sharding: "Sharding", positions: torch.Tensor, dtype: torch.dtype, device: torch.device
    ) -> "PackedTokens":
        """Each recording attends to itself alone."""
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
    ) -> "AudioTransformer":
        """Build the module on `device`."""
        from omni.models.encoders.audio_module import AudioTransformer

        return AudioTransformer(self.config, width, dtype, groups).to(device)
