"""Recordings for tests: sines and chirps as WAV and FLAC."""

import io

import numpy as np
import soundfile

from dataloader.format import Item


def tone(hz: float, samples: int, rate: int, loudness: float = 0.5) -> np.ndarray:
    return (loudness * np.sin(2 * np.pi * hz * np.arange(samples) / rate)).astype(np.float32)


def chirp(start_hz: float, stop_hz: float, samples: int, rate: int) -> np.ndarray:
    """A sine whose frequency rises (or falls) evenly."""
    hz = np.linspace(start_hz, stop_hz, samples)
    return (0.5 * np.sin(2 * np.pi * np.cumsum(hz) / rate)).astype(np.float32)


def encoded(samples: np.ndarray, rate: int, kind: str = "wav", subtype: str | None = None) -> bytes:
    """A file of samples [S] or [S, channels]; `kind` is libsndfile's name of the format, in any case."""
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=kind.upper(), subtype=subtype)
    return out.getvalue()


def recording(samples: np.ndarray, rate: int, kind: str = "wav", subtype: str | None = None) -> Item:
    return Item("audio", kind, (len(samples), rate), encoded(samples, rate, kind, subtype))
