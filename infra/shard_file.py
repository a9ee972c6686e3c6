"""The file of one rank in a checkpoint: named tensors, and a hash of every piece of them.

The layout is that of safetensors: the length of a header (8 bytes, little-endian), the header as JSON, then
the tensors one after the other. So reading executes nothing, and any range can be read by itself. The
header's metadata hold the hashes of the data, chunk by chunk, so a range is verified without the rest; the
header's own hash is kept by whoever keeps the file, in the checkpoint's manifest.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch

from dataloader.storage import Storage

CHUNK = 256 * 1024  # bytes that are hashed together: what a read of any range is rounded to
REQUEST = 64 * 1024 * 1024  # bytes of neighbouring ranges that are read at once, at most
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}
_LENGTH = 8


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which file, why and what is still good."""


class DamagedError(CheckpointError):
    """A checkpoint is not what was written: something in it is missing, or has changed."""


class NotFiniteError(CheckpointError):
    """What is to be saved holds a number that is not finite."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in the data of its file: bytes [start, stop)."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Shard:
    """What a rank saves: tensors in host memory, one after the other in `data` [bytes] of uint8.

    `held` says in plain values what they are, for the checkpoint's index. `ready` returns once `data` is
    whole.
    """

    entries: Mapping[str, Entry]
    data: torch.Tensor
    held: Mapping[str, Any]
    ready: Callable[[], object] = field(default=lambda: None)

    def read(self) -> np.ndarray:
        """Return `data` once it is whole."""
        self.ready()
        array: np.ndarray = self.data.numpy()
        return array


def pack(
    tensors: Mapping[str, torch.Tensor], held: Mapping[str, Any], room: torch.Tensor | None = None
) -> Shard:
    """Copy tensors into host memory: into `room`, a flat uint8 tensor, if it is large enough.

    On a GPU the copies are queued into pinned memory, and the host goes on.
    """
    # Those with larger elements first, so that each lies at a multiple of the size of its own.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    entries, end = {}, 0
    for name, tensor in ordered:
        size = tensor.numel() * tensor.element_size()
        entries[name] = Entry(_DTYPES[tensor.dtype], tuple(tensor.shape), end, end + size)
        end += size
    device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    if room is None or len(room) < end:
        room = torch.empty(end, dtype=torch.uint8)
        room = room if device is None else room.pin_memory()
    data = room[:end]
    for name, tensor in ordered:
        entry = entries[name]
        data[entry.start : entry.stop].copy_(tensor.reshape(-1).view(torch.uint8), non_blocking=True)
    if device is None:
        return Shard(entries, data, held)
    copied = torch.cuda.Event()
    copied.record()
    return Shard(entries, data, held, copied.synchronize)


def write_shard(
    storage: Storage,
    name: str,
    shard: Shard,
    bound: Mapping[str, str],
    going_on: Callable[[], object] = lambda: None,
) -> tuple[int, str]:
    """Write a file that is `bound` to what these words say. Returns its bytes and the hash of its header.
    `going_on` is called before each piece that is hashed or handed to the storage.

    Raises:
        NotFiniteError: if a number of a float tensor is not finite.
        OSError: if it cannot be written.
    """
    data = shard.read()
    _check_finite(shard.entries, data)
    hashes = "".join(map(_hash, _pieces(data, CHUNK, going_on)))
    described = {
        key: {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (entry.start, entry.stop)}
        for key, entry in shard.entries.items()
    }
    text = json.dumps({"__metadata__": {**bound, "chunk": str(CHUNK), "hashes": hashes}, **described})
    header = text.encode()
    header += b" " * (-len(header) % 8)
    head = len(header).to_bytes(_LENGTH, "little") + header
    storage.write(name, chain((head,), _pieces(data, 16 * CHUNK, going_on)))
    return len(head) + len(data), _hash(head)


def _pieces(data: np.ndarray, size: int, going_on: Callable[[], object]) -> Iterator[np.ndarray]:
    for start in range(0, len(data), size):
        going_on()
        yield data[start : start + size]


def _check_finite(entries: Mapping[str, Entry], data: np.ndarray) -> None:
    for key, entry in entries.items():
        if entry.dtype == "F32" and entry.stop > entry.start:
            values = data[entry.start : entry.stop].view(np.float32)
            if not np.isfinite(values.min()) or not np.isfinite(values.max()):
                raise NotFiniteError(f"{key} is not finite everywhere: the run has diverged")


def _hash(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class ShardReader:
    """Reads an open file of a checkpoint; whatever it returns is what was written.

    `name` is what messages call it; `size` in bytes and the hash of its header are those that were kept.

    Raises:
        DamagedError: here and from every method, if the file is not what was written.
    """

    def __init__(self, file: Any, name: str, size: int, head_hash: str) -> None:
        self.file = file
        self.name = name
        length = self._exactly(_LENGTH, "header")
        self.data_start = _LENGTH + int.from_bytes(length, "little")
        if self.data_start > size:  # before so much is read
            raise self._damaged("its header")
        header = self._exactly(self.data_start - _LENGTH, "header")
        if _hash(length + header) != head_hash:
            raise self._damaged("its header")
        # Only what its hash vouches for is parsed.
        described = json.loads(header)
        self.metadata: dict[str, str] = described.pop("__metadata__")
        self.entries = {
            key: Entry(of["dtype"], tuple(of["shape"]), *of["data_offsets"]) for key, of in described.items()
        }
        self.chunk = int(self.metadata["chunk"])
        hashes = self.metadata["hashes"]
        self.hashes = [hashes[at : at + 32] for at in range(0, len(hashes), 32)]
        self.size = size - self.data_start
        assert self.size == max((entry.stop for entry in self.entries.values()), default=0)

    def read(self, ranges: Sequence[tuple[str, int, int]]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the number and the bytes of each of `ranges` (tensor, first byte, last + 1), in order of
        place.

        Neighbours are read at once.
        """
        spans = []
        for number, (key, start, stop) in enumerate(ranges):
            entry = self.entries.get(key)
            if entry is None or entry.start + stop > entry.stop:
                raise DamagedError(f"{self.name} does not hold {key} as the manifest says")
            spans.append((entry.start + start, entry.start + stop, number))
        for request in self._requests(sorted(spans)):
            first = request[0][0] // self.chunk
            data = self._chunks(first, -(-max(stop for _, stop, _ in request) // self.chunk))
            for start, stop, number in request:
                yield number, data[start - first * self.chunk : stop - first * self.chunk]

    def verify(self) -> None:
        """Read all there is."""
        whole = -(-self.size // self.chunk)
        step = max(1, REQUEST // self.chunk)
        for first in range(0, whole, step):
            self._chunks(first, min(first + step, whole))
        if self.file.read(1):
            raise DamagedError(f"{self.name} is longer than it was written")

    def _requests(self, spans: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
        """Put spans together that lie in the same or in neighbouring chunks, up to REQUEST bytes."""
        cuts = [0]
        for at, (before, after) in enumerate(pairwise(spans), start=1):
            apart = after[0] // self.chunk > -(-before[1] // self.chunk)
            if apart or after[1] - spans[cuts[-1]][0] > REQUEST:
                cuts.append(at)
        for low, high in pairwise([*cuts, len(spans)]):
            if low < high:
                yield spans[low:high]

    def _chunks(self, first: int, last: int) -> np.ndarray:
        """Read chunks [first, last), and verify each."""
        start, stop = first * self.chunk, min(last * self.chunk, self.size)
        self.file.seek(self.data_start + start)
        data = np.frombuffer(self._exactly(stop - start, "data"), np.uint8)
        for number in range(first, last):
            at = (number - first) * self.chunk
            if _hash(data[at : at + self.chunk]) != self.hashes[number]:
                raise self._damaged(f"chunk {number} of its data")
        return data

    def _exactly(self, count: int, what: str) -> bytearray:
        data = bytearray(count)
        view, got = memoryview(data), 0
        while got < count:
            more = self.file.readinto(view[got:])
            if not more:
                raise DamagedError(f"{self.name} ends inside its {what}")
            got += more
        return data

    def _damaged(self, what: str) -> DamagedError:
        return DamagedError(f"{self.name}: {what} is not what was written (another hash)")
