"""Encoded images to pixels. What encoders do with the pixels (patches, normalisation) is theirs."""

import io

import numpy as np
import numpy.typing as npt
from PIL import Image

from dataloader.format import Item, SampleError

try:
    import simplejpeg
except ImportError:  # no wheel for this machine: Pillow decodes the same files, about three times slower
    simplejpeg = None

_FORMATS = {"JPEG": "jpeg", "PNG": "png"}
_GRAY_MODES = ("1", "L", "LA")


def decode_image(item: Item) -> npt.NDArray[np.uint8]:
    """Pixels uint8 [H, W, C] of a JPEG or PNG item: C is 1 for grayscale, else 3 (RGB; alpha is dropped).

    16-bit grayscale keeps its upper 8 bits. Raises SampleError if the data is corrupt, cut short, or not of
    the size that the item states.
    """
    pixels = None
    if item.format == "jpeg" and simplejpeg is not None:
        pixels = _decode_jpeg(item.data)
    if pixels is None:
        pixels = _decode_pillow(item.data, item.format)
    if pixels.shape[:2] != item.size:
        raise SampleError(f"the image is {pixels.shape[:2]} (height, width), its metadata says {item.size}")
    return pixels


def _decode_jpeg(data: bytes) -> npt.NDArray[np.uint8] | None:
    """Pixels, or None where Pillow should try: CMYK, rare encodings, damage (which Pillow then names)."""
    try:
        gray = simplejpeg.decode_jpeg_header(data)[2] == "Gray"
        return simplejpeg.decode_jpeg(data, colorspace="GRAY" if gray else "RGB")
    except ValueError:
        return None


def _decode_pillow(data: bytes, expected: str) -> npt.NDArray[np.uint8]:
    image = _open(data)
    try:
        image.load()
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, struct.error, …
        raise SampleError(f"the image cannot be decoded: {error}") from error
    if _FORMATS.get(image.format or "") != expected:
        raise SampleError(f"the image is {image.format}, its metadata says {expected}")
    if image.mode.startswith("I"):
        pixels = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
    else:
        pixels = np.array(image.convert("L" if image.mode in _GRAY_MODES else "RGB"), dtype=np.uint8)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def read_image_size(data: bytes) -> tuple[str, tuple[int, int]]:
    """Format name and (height, width) from an image's header; SampleError if it is no JPEG or PNG."""
    image = _open(data)
    if image.format not in _FORMATS:
        raise SampleError(f"the image is {image.format}: convert it to PNG or JPEG")
    return _FORMATS[image.format], (image.height, image.width)


def _open(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data))
    except Exception as error:  # unknown formats, damaged headers and decompression bombs alike
        raise SampleError(f"not an image that can be read: {error}") from error
