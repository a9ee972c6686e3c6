import io
from dataclasses import replace

import numpy as np
import pytest
from dataset_samples import image_item
from PIL import Image

from dataloader import decode
from dataloader.decode import decode_image, read_image_size
from dataloader.format import Item, SampleError


def pillow_item(image, kind):
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return Item("image", kind.lower(), (image.height, image.width), buffer.getvalue())


@pytest.mark.parametrize("gray", [True, False])
def test_png_is_exact(gray):
    shape = (12, 20) if gray else (12, 20, 3)
    pixels = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    decoded = decode_image(pillow_item(Image.fromarray(pixels), "PNG"))
    assert decoded.shape == (12, 20, 1 if gray else 3)
    assert decoded.dtype == np.uint8
    np.testing.assert_array_equal(decoded, pixels.reshape(decoded.shape))


@pytest.mark.parametrize("gray", [True, False])
def test_jpeg_by_simplejpeg_and_by_pillow(gray, monkeypatch):
    ramp = np.linspace(0, 255, 24 * 40).reshape(24, 40).astype(np.uint8)
    item = pillow_item(Image.fromarray(ramp if gray else np.stack([ramp, ramp[::-1], ramp], -1)), "JPEG")
    fast = decode_image(item)
    monkeypatch.setattr(decode, "simplejpeg", None)
    slow = decode_image(item)
    assert fast.shape == slow.shape == (24, 40, 1 if gray else 3)
    assert np.abs(fast.astype(int) - slow.astype(int)).max() <= 4
    assert np.abs(fast[..., 0].astype(int) - ramp).max() < 40


@pytest.mark.parametrize(
    "mode, channels", [("1", 1), ("L", 1), ("LA", 1), ("P", 3), ("RGB", 3), ("RGBA", 3), ("I;16", 1)]
)
def test_png_modes(mode, channels):
    image = Image.new(mode, (6, 4))
    assert decode_image(pillow_item(image, "PNG")).shape == (4, 6, channels)


def test_16_bit_gray_keeps_its_upper_bits():
    image = Image.fromarray(np.full((4, 4), 0xAB12, dtype=np.uint16))
    assert (decode_image(pillow_item(image, "PNG")) == 0xAB).all()


def test_cmyk_jpeg_falls_back():
    assert decode_image(pillow_item(Image.new("CMYK", (16, 8)), "JPEG")).shape == (8, 16, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("keep", [0.9, 0.5, 0.1])
def test_a_truncated_image_is_a_sample_error(kind, keep):
    item = image_item(64, 64, kind, gray=False)
    with pytest.raises(SampleError):
        decode_image(replace(item, data=item.data[: int(keep * len(item.data))]))


def test_corrupt_wrong_size_and_wrong_format():
    item = image_item(16, 24)
    with pytest.raises(SampleError, match=r"\(16, 24\).*metadata says \(24, 16\)"):
        decode_image(replace(item, size=(24, 16)))
    with pytest.raises(SampleError, match="not an image"):
        decode_image(replace(item, data=b"\x89PNG garbage"))
    with pytest.raises(SampleError, match="is PNG, its metadata says jpeg"):
        decode_image(replace(item, format="jpeg"))
    middle = len(item.data) // 2
    with pytest.raises(SampleError):
        decode_image(replace(item, data=item.data[:middle] + b"\0" * 9 + item.data[middle + 9 :]))


def test_read_image_size():
    assert read_image_size(image_item(16, 24).data) == ("png", (16, 24))
    assert read_image_size(image_item(16, 24, "JPEG", gray=False).data) == ("jpeg", (16, 24))
    with pytest.raises(SampleError, match="GIF: convert it"):
        read_image_size(pillow_item(Image.new("L", (2, 2)), "GIF").data)
    with pytest.raises(SampleError, match="not an image"):
        read_image_size(b"hello")
