"""Encoded images to pixels. What encoders do with the pixels (patches, normalisation) is theirs.

Shapes: H rows and W columns of pixels, upright; C channels.
"""

import io
import warnings

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, UnidentifiedImageError

from dataloader.format import Item, SampleError
from dataloader.image_header import least_bytes, read_jpeg_frame

try:
    import simplejpeg
except ImportError:  # no wheel for this machine: Pillow decodes the same files, about three times slower
    simplejpeg = None

# Pillow warns of pictures half as large as those it refuses; which are too large is the encoder's to say.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

_FORMATS = {"JPEG": "jpeg", "PNG": "png", "WEBP": "webp"}
_GRAY_MODES = ("1", "L", "LA")
_SEEN_ON_WHITE = 16  # how much darker than a white ground something of a transparent picture must be
_SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations whose stored rows are columns
_RARE = "subsampling"  # libjpeg-turbo's plain interface knows the usual ones; Pillow decodes the others


def decode_image(item: Item) -> npt.NDArray[np.uint8]:
    """Pixels uint8 [H, W, C] of a JPEG, PNG or WebP item, as a viewer shows them: C is 1 for grayscale,
    else 3 (RGB).

    The EXIF orientation is applied. Of an animation it is the first picture. What is transparent is laid on
    white, or on black where nothing of the picture would be seen on white. 16-bit grayscale keeps its upper 8
    bits. Raises SampleError if the data is corrupt, cut short, or not of the format and size that the item
    states; these, and whether so few bytes can hold so many pixels, are compared before anything is decoded.
    A JPEG file has no checksum: damage is found where libjpeg names it.
    """
    frame = read_jpeg_frame(item.data) if simplejpeg is not None else None
    # Pillow takes a fifth of the time of decoding to say what a bare JPEG's header says at once.
    bare = frame is not None and frame.bare and frame.pixels <= (Image.MAX_IMAGE_PIXELS or 0)
    image = None if bare else _open(item.data)
    if frame is not None and image is None:
        _check_header("JPEG", frame.size, item)
    elif image is not None:
        _check_header(image.format, image.size[::-1], item)
    pixels = None
    if item.format == "jpeg" and simplejpeg is not None:
        pixels = _decode_jpeg(item.data)
    if pixels is None:
        image = image or _open(item.data)
        pixels = _decode_pillow(image)
    pixels = _upright(pixels, 1 if image is None else _orientation(image))
    if pixels.shape[:2] != item.size:
        raise _other_size(pixels.shape[:2], item)
    return pixels


def _check_header(found: str | None, size: tuple[int, int], item: Item) -> None:
    """Raise SampleError if an image of a format and of (height, width) as it is stored is not the item's, or
    has too few bytes to be one.
    """
    if _FORMATS.get(found or "") != item.format:
        raise SampleError(f"the image is {found}, its metadata says {item.format}")
    # Which side is up may stand behind the pixels, in a PNG.
    if sorted(size) != sorted(item.size):
        raise _other_size(size, item)
    least = least_bytes(item.data, size)
    if len(item.data) < least:
        raise SampleError(
            f"the image's header says {size[0]}x{size[1]} pixels, which take {least} bytes at least, and it "
            f"has {len(item.data)}: it is cut short, or made to fill memory"
        )


def _other_size(found: tuple[int, ...], item: Item) -> SampleError:
    return SampleError(
        f"the image is {found} (height, width, upright), its metadata says {item.size}: state its size as it "
        "is shown, after its EXIF orientation"
    )


def _decode_jpeg(data: bytes) -> npt.NDArray[np.uint8] | None:
    """Pixels as they are stored, or None where Pillow should try: CMYK and rare encodings. Damage that
    libjpeg names is an error, though Pillow would show what it finds.
    """
    space = ""
    try:
        space = simplejpeg.decode_jpeg_header(data)[2]
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(
            data, colorspace="GRAY" if space == "Gray" else "RGB"
        )
    except ValueError as error:
        if space in ("CMYK", "YCCK") or _RARE in str(error):
            return None
        raise SampleError(f"the image cannot be decoded: {error}") from error
    return pixels


def _decode_pillow(image: Image.Image) -> npt.NDArray[np.uint8]:
    """Pixels as they are stored."""
    try:
        image.load()
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, struct.error, …
        raise SampleError(f"the image cannot be decoded: {error}") from error
    mode = "L" if image.mode in _GRAY_MODES else "RGB"
    if image.mode.startswith("I"):
        pixels = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
    elif image.has_transparency_data:
        pixels = _on_ground(np.array(image.convert("LA" if mode == "L" else "RGBA"), dtype=np.uint8))
    else:
        pixels = np.array(image.convert(mode), dtype=np.uint8)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def _on_ground(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Lay [H, W, C + 1], the last of them alpha, on white, or on black: [H, W, C]. Opaque pixels keep their
    values.
    """
    alpha = pixels[..., -1:].astype(np.uint32)
    shown = pixels[..., :-1] * alpha
    white = ((shown + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
    seen = white.min(initial=255) <= 255 - _SEEN_ON_WHITE
    return white if seen or bool((alpha == 255).all()) else ((shown + 127) // 255).astype(np.uint8)


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation of an image, 1 (upright) to 8; 1 if it says none, or nothing that can be read."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged metadata raises many kinds, and a picture is shown without them
        return 1
    return orientation if orientation in range(1, 9) else 1


def _upright(pixels: npt.NDArray[np.uint8], orientation: int) -> npt.NDArray[np.uint8]:
    """Turn stored pixels so that they stand as the EXIF orientation says (Exif 2.3, tag 274)."""
    if orientation in _SIDEWAYS:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def read_image_size(data: bytes) -> tuple[str, tuple[int, int]]:
    """Format name and (height, width) of the upright image; SampleError if it is no JPEG, PNG or WebP."""
    image = _open(data)
    if image.format not in _FORMATS:
        raise SampleError(f"the image is {image.format}: convert it to PNG, JPEG or WebP")
    size = (image.height, image.width)
    return _FORMATS[image.format], size[::-1] if _orientation(image) in _SIDEWAYS else size


def _open(data: bytes) -> Image.Image:
    if not data:
        raise SampleError("the image has no bytes: its file is empty")
    try:
        return Image.open(io.BytesIO(data))
    except UnidentifiedImageError:  # its message names our buffer
        raise SampleError(f"not an image that can be read: it begins with {data[:8]!r}") from None
    except Exception as error:  # unknown formats, damaged headers and decompression bombs alike
        raise SampleError(f"not an image that can be read: {error}") from error
