"""What an image's first bytes say, read without decoding, and how much it takes to say so many pixels.

A file of a few hundred bytes may state a picture of gigabytes. No coder makes less of a pixel than what is
counted here, so a file that is shorter is cut, or was made to fill memory.
"""

from typing import NamedTuple

_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_WEBP_EXIF = 0x08  # flag of an extended header
_DEFLATED = 1032  # bytes that deflate makes of one, at most: 258 of two bits (RFC 1951)
# A Huffman code of a block of 64 pixels has at least one bit, in the component that is not subsampled. A
# quarter of it, where components of a file take turns at being so.
_PIXELS_OF_BYTE = 64 * 8 * 4

_START_OF_SCAN = 0xDA
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # markers of a frame (T.81, table B.1)
_HUFFMAN = (0xC0, 0xC1, 0xC2)
# Segments that say nothing of which side is up, and of no other picture: JFIF, comments, Adobe's, tables.
_SILENT = (0xE0, 0xEE, 0xFE, 0xDB, 0xC4, 0xDD)
_PROFILE = (0xE2, b"ICC_PROFILE\0")


class JpegFrame(NamedTuple):
    """What a JPEG's header says: (height, width) in pixels as they are stored, its components, whether they
    are in Huffman codes, and whether it is `bare`: without metadata, so upright, and without other pictures.
    """

    size: tuple[int, int]
    components: int
    huffman: bool
    bare: bool

    @property
    def pixels(self) -> int:
        """Pixels of it."""
        return self.size[0] * self.size[1]

    @property
    def least_bytes(self) -> int:
        """What `least_bytes` says of its file."""
        return self.pixels // _PIXELS_OF_BYTE if self.huffman else 0


def read_jpeg_frame(data: bytes) -> JpegFrame | None:
    """Read a JPEG's header up to its first scan; None if `data` is none, or an unusual one."""
    if data[:2] != b"\xff\xd8":
        return None
    frame: tuple[int, int] | None = None  # where it is, and its marker
    bare, at = True, 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] not in (0x00, 0xFF):
        marker = data[at + 1]
        if marker == _START_OF_SCAN:
            break
        if marker in _FRAMES:
            if frame is not None:
                return None
            frame = (at, marker)
        elif marker not in _SILENT:
            code, name = _PROFILE
            bare &= marker == code and data[at + 4 : at + 4 + len(name)] == name
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    else:
        return None
    if frame is None:
        return None
    start, marker = frame
    height, width, components = (
        int.from_bytes(data[start + first : start + last], "big") for first, last in ((5, 7), (7, 9), (9, 10))
    )
    return JpegFrame((height, width), components, marker in _HUFFMAN, bare)


def read_png_size(data: bytes) -> tuple[int, int] | None:
    """(height, width) of the PNG that `data` begins, None if it is none, may not be upright, or if its
    pixels do not begin in `data`. An orientation that stands behind the pixels is not seen.
    """
    at = 8
    if data[:at] != _PNG:
        return None
    while at + 8 <= len(data):
        kind = data[at + 4 : at + 8]
        if kind == b"IDAT":
            return int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big")
        if kind == b"eXIf":
            return None
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    return None


def read_webp_size(data: bytes) -> tuple[int, int] | None:
    """(height, width) of the WebP that `data` begins, None if it is none, or has an EXIF orientation perhaps:
    that stands behind its pixels.
    """
    if len(data) < 30 or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    kind = data[12:16]
    if kind == b"VP8X" and not data[20] & _WEBP_EXIF:
        return 1 + int.from_bytes(data[27:30], "little"), 1 + int.from_bytes(data[24:27], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF)
    if kind == b"VP8 ":
        return int.from_bytes(data[28:30], "little") & 0x3FFF, int.from_bytes(data[26:28], "little") & 0x3FFF
    return None


def least_bytes(data: bytes, size: tuple[int, int]) -> int:
    """Return how many bytes a file that begins with `data` has at least if it is a picture of (height, width)
    pixels: 0 where its format sets no bound.
    """
    pixels = size[0] * size[1]
    if data[:8] == _PNG and len(data) > 25:
        return pixels * data[24] * _PNG_CHANNELS.get(data[25], 1) // 8 // _DEFLATED
    frame = read_jpeg_frame(data)
    return 0 if frame is None else frame.least_bytes
