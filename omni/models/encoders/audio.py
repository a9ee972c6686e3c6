"""An audio encoder as plans and loaders see it: log-mel spectrograms of recordings, packed and of any length.

A recording is brought to the encoder's sampling rate and padded with silence to whole merge windows. Two
frames of its spectrogram are a token; `merge` neighbouring tokens become one row.

Shapes: T tokens, M mel bands.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from dataloader.audio import decode_audio, resample, resampled_length
from dataloader.format import Item
from omni.keys import ConfigError, Rule, Rules, at_least
from omni.models.encoders.audio_stem import FRAMES, ConvStem, ConvWork
from omni.models.encoders.transformer import TransformerEncoder
from omni.models.layer_sizes import TransformerEncoderConfig
from omni.models.registry import ItemArrays
from ops.spectrogram import log_mel, mel_filters
from parallel.work import Block


@dataclass
class AudioConfig(TransformerEncoderConfig):
    """Sizes. `sample_rate` is in Hz, `n_fft` and `hop` in samples; `merge` tokens become one row.

    The defaults of the spectrogram give 100 frames, 50 tokens and 12.5 rows a second.
    """

    sample_rate: int = at_least(1, 16000)
    n_fft: int = at_least(1, 400)
    hop: int = at_least(1, 160)
    mels: int = at_least(1, 80)
    merge: int = at_least(1, 4)

    rules: ClassVar[Rules] = (
        *TransformerEncoderConfig.rules,
        Rule(
            "hop",
            lambda own: own.hop <= own.n_fft,
            "samples between frames would be lost; choose at most n_fft={n_fft}",
        ),
    )


class AudioEncoder(TransformerEncoder):
    """The audio encoder: pairs of frames of a spectrogram, `merge` of which become a row."""

    Config = AudioConfig
    modality = "audio"
    config: AudioConfig

    def __init__(self, config: AudioConfig) -> None:
        super().__init__(config, values=FRAMES * config.mels, row_tokens=config.merge)
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

    def stem(self, dtype: torch.dtype) -> torch.nn.Module:
        """Two convolutions over time, and where tokens stand."""
        return ConvStem(self.config.mels, self.config.hidden, dtype)

    def stem_work(self, element: int) -> tuple[Block, ...]:
        """Two convolutions."""
        return (ConvWork(self.config.mels, self.config.hidden, element),)
