"""Log-mel spectrograms: how loud a recording is, over time, in bands as wide as the ear resolves.

Shapes: S samples, F frames, M mel bands, B = n_fft // 2 + 1 frequencies.
"""

import math

import numpy as np
import torch

# Slaney's scale: linear below 1 kHz, 3 mels to 200 Hz, and above it 27 mels to a factor of 6.4.
_LINEAR_HZ = 200.0 / 3.0
_CORNER_HZ = 1000.0
_CORNER_MEL = _CORNER_HZ / _LINEAR_HZ
_LOG_STEP = math.log(6.4) / 27.0


def hz_to_mel(hz: float) -> float:
    """Frequency in Hz → mel, on Slaney's scale (Auditory Toolbox, Interval Research report 1998-010)."""
    if hz < _CORNER_HZ:
        return hz / _LINEAR_HZ
    return _CORNER_MEL + math.log(hz / _CORNER_HZ) / _LOG_STEP


def mel_to_hz(mel: float) -> float:
    """The inverse of `hz_to_mel`."""
    if mel < _CORNER_MEL:
        return mel * _LINEAR_HZ
    return _CORNER_HZ * math.exp((mel - _CORNER_MEL) * _LOG_STEP)


def mel_filters(sample_rate: int, n_fft: int, mels: int) -> torch.Tensor:
    """Weights [M, B] of each frequency in each band, from 0 Hz to half the sampling rate.

    Bands are triangles between neighbouring points that are evenly spaced in mels, each of area 1 over Hz
    (Slaney, as above; the filters that librosa makes by default and Whisper uses).
    """
    top = hz_to_mel(sample_rate / 2)
    points = np.array([mel_to_hz(top * k / (mels + 1)) for k in range(mels + 2)])
    low, peak, high = (points[k : k + mels, None] for k in range(3))
    hz = np.arange(n_fft // 2 + 1) * sample_rate / n_fft
    triangles = np.minimum((hz - low) / (peak - low), (high - hz) / (high - peak)).clip(min=0.0)
    return torch.from_numpy(2.0 / (high - low) * triangles).float()


def log_mel(samples: torch.Tensor, filters: torch.Tensor, n_fft: int, hop: int) -> torch.Tensor:
    """float32 [S], S a multiple of `hop` → [F, M], F = S / hop, frame f centred on sample f·hop.

    Power of a Hann-windowed Fourier transform in mel bands, in log10; 8 decades below the loudest value and
    less count as silence; then (x + 4) / 4, which brings speech near -1 … 1. The normalisation is Whisper's
    (Radford et al., 2022, and its `log_mel_spectrogram`). Before and after the recording there is silence.
    """
    window = torch.hann_window(n_fft)
    spectrum = torch.stft(samples, n_fft, hop, window=window, pad_mode="constant", return_complex=True)
    power = spectrum[:, : len(samples) // hop].abs().square()
    decades = (filters @ power).clamp(min=1e-10).log10()
    return ((decades.clamp(min=float(decades.max()) - 8.0) + 4.0) / 4.0).T.contiguous()
