"""How many samples the frames of an MP3 hold, counted without decoding.

A file says so itself only in a header that encoders may leave out. libsndfile then guesses from the first
frame's bit rate, and hands out no sample beyond its guess: of a file whose bit rate varies, a part.
"""

_ID3 = b"ID3"
_VERSIONS = {3: 1, 2: 2, 0: 2.5}  # of MPEG, by two bits of a frame's header (ISO 11172-3, 13818-3)
_LAYER_III = 1
_KBITS = {
    1: (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    2: (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_HERTZ = {1: (44100, 48000, 32000), 2: (22050, 24000, 16000), 2.5: (11025, 12000, 8000)}
SAMPLES = {1: 1152, 2: 576, 2.5: 576}


def counted_samples(data: bytes) -> tuple[int, int]:
    """Samples of a channel in all frames of layer III from the first one on, as far as one follows the other,
    and in one frame. Both 0 if there is none.
    """
    at = _after_tag(data)
    total = each = 0
    while (frame := _frame(data, at)) is not None:
        length, each = frame
        total += each
        at += length
    return total, each


def _after_tag(data: bytes) -> int:
    """Where an ID3v2 tag ends: its size has seven bits a byte."""
    if data[:3] != _ID3 or len(data) < 10:
        return 0
    size = 0
    for byte in data[6:10]:
        size = size << 7 | byte & 0x7F
    return 10 + size


def _frame(data: bytes, at: int) -> tuple[int, int] | None:
    """Bytes and samples of the frame at a place; None if none is there, or not all of it."""
    head = data[at : at + 4]
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return None
    version = _VERSIONS.get(head[1] >> 3 & 3)
    rate, of_hertz = head[2] >> 4, head[2] >> 2 & 3
    if version is None or head[1] >> 1 & 3 != _LAYER_III or not 0 < rate < 15 or of_hertz == 3:
        return None
    bits = 1000 * _KBITS[1 if version == 1 else 2][rate - 1]
    length = SAMPLES[version] // 8 * bits // _HERTZ[version][of_hertz] + (head[2] >> 1 & 1)
    return (length, SAMPLES[version]) if at + length <= len(data) else None
