"""What items are, from their first bytes: nothing is decoded, and little is read of a picture."""

from collections.abc import Callable

from isal.isal_zlib import crc32

from dataloader.audio import read_audio_size
from dataloader.decode import read_image_size
from dataloader.format import SampleError
from dataloader.image_header import least_bytes, read_jpeg_frame, read_png_size, read_webp_size
from dataloader.sources.recipe import FoundItem, Range

HEAD = 1024
"""Bytes that are read of a picture first, and that an item's CRC is of."""
_MORE = 64 << 10

MODALITIES = {
    "jpg": "image", "jpeg": "image", "png": "image", "webp": "image",
    "wav": "audio", "flac": "audio", "mp3": "audio", "ogg": "audio",
}  # fmt: skip
"""What a file is whose name ends so, of those that can be decoded."""

FOREIGN = frozenset(
    (
        *("gif", "bmp", "tif", "tiff", "avif", "heic", "jxl", "npy", "npz"),
        *("opus", "m4a", "aac", "mp4", "m4v", "mkv", "avi", "mov", "webm"),
    )
)
"""How the names of items end that cannot be decoded yet: a sample that has one is not whole without it."""


def crc_of(content: bytes) -> int:
    """CRC-32 of the first bytes of an item."""
    return crc32(content[:HEAD])


def found_item(modality: str, place: Range, read: Callable[[int], bytes]) -> FoundItem:
    """An item of a place, of which `read` reads so many first bytes, or all if there are fewer.

    Raises SampleError if it is none that can be decoded.
    """
    head = read(HEAD)
    if not head:
        raise SampleError("it has no bytes")
    if modality == "image":
        frame = read_jpeg_frame(head)
        if frame is not None and frame.bare:
            kind, size, least = "jpeg", frame.size, frame.least_bytes
        else:
            kind, size = _image_size(head, place.bytes, read)
            least = least_bytes(head, size)
        if place.bytes < least:
            raise SampleError(
                f"its header says {size[0]}x{size[1]} pixels, which take {least} bytes; it has {place.bytes}"
            )
    else:
        kind, size = read_audio_size(read(place.bytes))
    return FoundItem(modality, kind, size, place, crc_of(head))


def _image_size(head: bytes, size: int, read: Callable[[int], bytes]) -> tuple[str, tuple[int, int]]:
    """Format and (height, width) of the upright image whose file has `size` bytes and begins with `head`."""
    for count in (HEAD, _MORE, size):
        content = head if count == HEAD else read(count)
        for kind, size_of in (("png", read_png_size), ("webp", read_webp_size)):
            upright = size_of(content)
            if upright is not None:
                return kind, upright
        try:
            if count >= size or content[:2] == b"\xff\xd8":
                return read_image_size(content)
        except SampleError:  # its header may go on behind what was read
            if count >= size:
                raise
    raise AssertionError("the whole file was read")
