"""Encoded recordings to samples of one channel, and to another sampling rate.

What encoders do with the samples (spectrograms, normalisation) is theirs.
"""

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from dataloader.format import Item, SampleError
from dataloader.mp3_frames import counted_samples

_FORMATS = {"WAV": "wav", "WAVEX": "wav", "FLAC": "flac", "MP3": "mp3", "OGG": "ogg"}
_KNOWN = "WAV, FLAC, MP3 or Ogg"
_UNHEARD = 4  # frames of an MP3 that are silence around the recording, and its header, at most
_LONGEST = 2**31 - 1  # sizes are stored as int32
_NOT_STATED = 2**32 - 1  # bytes of samples, as programs write it that do not know yet how many will come


def decode_audio(item: Item) -> npt.NDArray[np.float32]:
    """Samples float32 [samples] of a WAV, FLAC, MP3 or Ogg item, about -1 … 1: the mean of its channels.

    `item.size` is (samples of a channel, sampling rate in Hz). Raises SampleError if the data is corrupt, cut
    short, or not of the size and format that the item states. WAV and MP3 have no checksum: damage that
    leaves header and length as they were is not found, unless it makes samples that are no numbers. A WAV
    whose header says more bytes of samples than it holds is cut short; so is an MP3 that says more samples.
    """
    with _open(item.data) as file:
        found = _FORMATS.get(file.format)
        if found != item.format:
            raise SampleError(f"the recording is {file.format}, its metadata says {item.format}")
        # Before reading, which allocates what the header claims.
        _check_size((_length(file, item.data), file.samplerate), item.size)
        try:
            channels = file.read(dtype="float32", always_2d=True)
        except Exception as error:  # libsndfile's own errors and what its callbacks raise
            raise SampleError(f"the recording cannot be decoded: {_reason(error)}") from error
    _check_size((len(channels), file.samplerate), item.size)
    samples: npt.NDArray[np.float32] = np.ascontiguousarray(channels.mean(axis=1))
    if not np.isfinite(samples).all():
        raise SampleError("the recording holds samples that are no finite numbers")
    return samples


def read_audio_size(data: bytes) -> tuple[str, tuple[int, int]]:
    """Format name and (samples of a channel, sampling rate) from a recording's header.

    Raises SampleError if it is no WAV, FLAC, MP3 or Ogg, or does not say how long it is.
    """
    with _open(data) as file:
        if file.format not in _FORMATS:
            raise SampleError(f"the recording is {file.format}: convert it to {_KNOWN}")
        length = _length(file, data)
        if not 0 < length <= _LONGEST:
            raise SampleError(
                f"the recording's header says {length} samples, it must be 1 to {_LONGEST}: "
                "write it anew with its length, or cut it"
            )
        return _FORMATS[file.format], (length, file.samplerate)


def resampled_length(samples: int, rate: int, new_rate: int) -> int:
    """Samples that `resample` makes of `samples` at `rate` Hz: the nearest number, halves up, at least 1."""
    return max(1, (2 * samples * new_rate + rate) // (2 * rate))


def resample(samples: npt.NDArray[np.float32], rate: int, new_rate: int) -> npt.NDArray[np.float32]:
    """Bring float32 [samples] from `rate` to `new_rate` Hz, band-limited (soxr, quality HQ).

    The result has exactly `resampled_length` samples, whatever soxr's floating-point rounding gave.
    """
    if rate == new_rate:
        return samples
    length = resampled_length(len(samples), rate, new_rate)
    changed = np.asarray(soxr.resample(samples, rate, new_rate), np.float32)[:length]
    return np.pad(changed, (0, length - len(changed)))


def _check_size(found: tuple[int, int], stated: tuple[int, ...]) -> None:
    if found != stated:
        raise SampleError(f"the recording is {found} (samples, sampling rate), its metadata says {stated}")


def _check_whole(data: bytes) -> None:
    """Raise SampleError if a WAV file says that it holds more than it does, which libsndfile passes over."""
    at = 12 if data[:4] in (b"RIFF", b"RIFX") else len(data)
    while at + 8 <= len(data):
        stated = int.from_bytes(data[at + 4 : at + 8], "little" if data[:4] == b"RIFF" else "big")
        held = len(data) - at - 8
        if data[at : at + 4] == b"data":
            if held < stated != _NOT_STATED:
                raise SampleError(
                    f"the recording is cut short: its header says {stated} bytes of samples, it holds {held}"
                )
            return
        at += 8 + stated + stated % 2


def _length(file: soundfile.SoundFile, data: bytes) -> int:
    """Samples of a channel that a recording has: of an MP3, no more than its frames hold.

    Raises SampleError if an MP3 is cut short, or holds more than would be read.
    """
    if file.format != "MP3":
        return int(file.frames)
    held, each = counted_samples(data)
    # Without a header that says the length, libsndfile guesses: well where frames are alike.
    if not -each < held - file.frames <= _UNHEARD * each:
        raise SampleError(
            f"the recording's frames hold {held} samples, and {file.frames} would be read: it is cut short "
            "or damaged, or has no header that says how long it is; write it anew"
        )
    return min(held, int(file.frames))


def _open(data: bytes) -> soundfile.SoundFile:
    _check_whole(data)
    try:
        return soundfile.SoundFile(io.BytesIO(data))
    except Exception as error:  # unknown formats and damaged headers alike
        raise SampleError(f"not a recording that can be read: {_reason(error)}") from error


def _reason(error: Any) -> str:
    """What libsndfile says, without the address of our buffer."""
    return str(getattr(error, "error_string", error))
