"""Images to patches: as bytes until the device, and there what arithmetic in floats makes of them."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from omni.models.encoders.vit import ViTConfig, ViTEncoder

CPU = torch.device("cpu")


def oracle(config: ViTConfig, image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Patches of an image that becomes (height, width) pixels, in floats from first to last: [T, P]."""
    x = torch.from_numpy(image).float().div(255.0)
    x = x.mean(2, keepdim=True) if config.channels == 1 else x.expand(-1, -1, 3)
    x = x.sub(config.mean).div(config.std).permute(2, 0, 1)[None]
    if (height, width) != image.shape[:2]:
        x = F.interpolate(x, (height, width), mode="bilinear", antialias=True, align_corners=False)
    p, m = config.patch, config.merge
    rows, columns = (math.ceil(side / (p * m)) * m for side in (height, width))
    x = F.pad(x, (0, columns * p - width, 0, rows * p - height))[0]
    patches = [
        x[:, r * p : (r + 1) * p, c * p : (c + 1) * p].reshape(-1)
        for window_r in range(0, rows, m)
        for window_c in range(0, columns, m)
        for r in range(window_r, window_r + m)
        for c in range(window_c, window_c + m)
    ]
    return torch.stack(patches).numpy()


def random_image(height: int, width: int, channels: int) -> np.ndarray:
    return np.random.default_rng(height).integers(0, 256, (height, width, channels), dtype=np.uint8)


@pytest.mark.parametrize("size", [(480, 640), (28, 28), (1, 1), (27, 57), (300, 14)])
@pytest.mark.parametrize("of_file", [1, 3])
@pytest.mark.parametrize("mean, std", [(0.5, 0.5), (0.3, 0.37)])
def test_patches_are_those_of_floats_to_the_bit(
    size: tuple[int, int], of_file: int, mean: float, std: float
) -> None:
    config = ViTConfig(mean=mean, std=std)
    image = random_image(*size, of_file)
    encoder = ViTEncoder(config)
    ready = encoder.preprocess(image)
    assert ready.values.dtype == np.uint8
    values = encoder.transfer(ready.values, CPU).numpy()
    assert values.tobytes() == oracle(config, image, *size).tobytes()
    # Items and parts of them, one after the other, as ranks transfer them.
    half = len(ready.values) // 8 * 4
    parts = np.concatenate([ready.part(half, len(ready.values)).values, ready.values])
    assert encoder.transfer(parts, CPU).numpy().tobytes() == values[half:].tobytes() + values.tobytes()


def test_grey_of_grey_is_exact_and_that_of_colours_but_for_rounding() -> None:
    config = ViTConfig(channels=1, patch=4)
    encoder = ViTEncoder(config)
    for channels, most in ((1, 0.0), (3, 1e-6)):
        image = random_image(30, 50, channels)
        values = encoder.transfer(encoder.preprocess(image).values, CPU).numpy()
        assert np.abs(values - oracle(config, image, 30, 50)).max() <= most


@pytest.mark.parametrize("size", [(1500, 2000), (333, 222), (64, 2000)])
@pytest.mark.parametrize("of_file, channels", [(3, 3), (1, 3), (1, 1), (3, 1)])
def test_what_is_shrunk_is_a_level_off_at_most(size: tuple[int, int], of_file: int, channels: int) -> None:
    config = ViTConfig(max_tokens=256, channels=channels)
    encoder = ViTEncoder(config)
    image = random_image(*size, of_file)
    values = encoder.transfer(encoder.preprocess(image).values, CPU).numpy()
    expected = oracle(config, image, *encoder._scaled(size))
    assert values.shape == expected.shape
    assert np.abs(values - expected).max() * 255 * config.std <= 1.001
    assert not values[expected == 0].any()  # the padding


def test_a_bad_image_is_zeros() -> None:
    encoder = ViTEncoder(ViTConfig())
    blank = encoder.preprocess(encoder.blank()).values
    assert not encoder.transfer(np.zeros_like(blank), CPU).any()
