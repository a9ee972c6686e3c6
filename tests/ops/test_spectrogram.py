"""Spectrograms against formulations that share no code with them."""

import math

import numpy as np
import pytest
import torch
from sound import chirp, tone

from ops.spectrogram import hz_to_mel, log_mel, mel_filters, mel_to_hz


def test_the_mel_scale() -> None:
    assert hz_to_mel(0) == 0
    assert hz_to_mel(200) == pytest.approx(3)
    assert hz_to_mel(1000) == pytest.approx(15)
    assert hz_to_mel(6400) == pytest.approx(15 + 27)
    for hz in (0.0, 66.7, 999.0, 1000.0, 1001.0, 7999.0):
        assert mel_to_hz(hz_to_mel(hz)) == pytest.approx(hz)


def test_filters_are_those_of_librosa() -> None:
    """Against values of librosa.filters.mel(sr=22050, n_fft=2048), 128 bands, that are published with it."""
    filters = mel_filters(22050, 2048, 128)
    assert filters.shape == (128, 1025)
    first = [0, 0.016182853208219942, 0.032365706416439884, 0.028990088037379964, 0.012807234829160026, 0]
    second = [0, 0, 0, 0.009779235793639925, 0.025962089001859864, 0.035393705451959974, 0.01921085224374004]
    assert filters[0, :6].tolist() == pytest.approx(first, rel=1e-6, abs=1e-12)
    assert filters[1, :7].tolist() == pytest.approx(second, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(("rate", "n_fft", "mels"), [(16000, 400, 80), (8000, 128, 16)])
def test_filters_are_triangles_that_cover_all_frequencies(rate: int, n_fft: int, mels: int) -> None:
    filters = mel_filters(rate, n_fft, mels)
    assert (filters >= 0).all()
    assert (filters.sum(1) > 0).all()
    assert (filters[:, 1:-1].sum(0) > 0).all()
    peaks = filters.argmax(1)
    assert (peaks.diff() >= 0).all()


def by_definition(samples: np.ndarray, rate: int, n_fft: int, hop: int, mels: int) -> np.ndarray:
    """The same spectrogram from the definition of the Fourier transform, frame by frame, in float64."""
    silence = np.zeros(n_fft // 2)
    surrounded = np.concatenate([silence, samples.astype(np.float64), silence])
    time = np.arange(n_fft)
    window = np.sin(np.pi * time / n_fft) ** 2
    dft = np.exp(-2j * np.pi * np.outer(np.arange(n_fft // 2 + 1), time) / n_fft)
    top = hz_to_mel(rate / 2)
    edges = [mel_to_hz(m * top / (mels + 1)) for m in range(mels + 2)]
    decades = np.empty((len(samples) // hop, mels))
    for f in range(len(decades)):
        power = np.abs(dft @ (window * surrounded[f * hop : f * hop + n_fft])) ** 2
        for m in range(mels):
            low, peak, high = edges[m : m + 3]
            band = 0.0
            for k, p in enumerate(power):
                hz = k * rate / n_fft
                if low < hz <= peak:
                    band += p * (hz - low) / (peak - low) * 2 / (high - low)
                elif peak < hz < high:
                    band += p * (high - hz) / (high - peak) * 2 / (high - low)
            decades[f, m] = math.log10(max(band, 1e-10))
    return (np.maximum(decades, decades.max() - 8) + 4) / 4


@pytest.mark.parametrize(("rate", "n_fft", "hop", "mels"), [(16000, 400, 160, 80), (8000, 128, 64, 16)])
def test_against_the_definition(rate: int, n_fft: int, hop: int, mels: int) -> None:
    sound = chirp(100, rate / 3, 20 * hop, rate) + tone(700, 20 * hop, rate, 0.2)
    noise = np.random.default_rng(0).normal(0, 0.01, len(sound))
    sound = (sound + noise).astype(np.float32)
    found = log_mel(torch.from_numpy(sound), mel_filters(rate, n_fft, mels), n_fft, hop)
    assert found.shape == (20, mels)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), by_definition(sound, rate, n_fft, hop, mels), atol=2e-4)


@pytest.mark.parametrize("hz", [150, 440, 1000, 2500, 6000])
def test_a_tone_is_in_its_band(hz: float) -> None:
    mels = 80
    found = log_mel(torch.from_numpy(tone(hz, 16000, 16000)), mel_filters(16000, 400, mels), 400, 160)
    top = hz_to_mel(8000)
    centres = np.array([mel_to_hz((m + 1) * top / (mels + 1)) for m in range(mels)])
    loudest = found[10:-10].argmax(1).unique().tolist()
    nearest = int(np.abs(centres - hz).argmin())
    # One band off where frequencies are coarser than bands: 40 Hz apart, against 37.
    assert all(abs(band - nearest) <= 1 for band in loudest), (loudest, nearest)
    far = np.abs(centres - hz) > 500
    assert found[10:-10, far].max() < found[10:-10].max() - 1  # a unit is four decades


def test_silence_is_flat_and_finite() -> None:
    found = log_mel(torch.zeros(1600), mel_filters(16000, 400, 80), 400, 160)
    assert (found == -1.5).all()
