"""The weights of a checkpoint put together in one file, whatever layout wrote it.

Adapters are merged: what is written is the model that has none, with W + alpha / rank · B A, made in fp32, in
the place of each W that has one.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dataloader.storage import Storage
from infra.checkpoint import file_of, folder_of, open_shard
from infra.run_folder import replacing
from infra.shard_file import ShardReader
from omni.llm_sections import LoraConfig
from omni.models.adapters import A, B
from omni.models.llm import NAME as LLM
from omni.rank.state import BUFFERS, DTYPES, Piece, pieces_of

_SIZE = 4  # bytes of an fp32 element
Pieces = Mapping[str, list[tuple[int, Piece]]]
"""By parameter the ranks whose files have some of it, and what."""


def export(storage: Storage, manifest: Mapping[str, Any], out: Path) -> int:
    """Write all weights, in fp32 and under canonical names, to a file in the layout of safetensors; adapters
    are merged. One parameter at a time is in memory. What was there before stays until all is written.
    Returns how many tensors the file has.

    Raises:
        DamagedError: if what is read is not what was written.
        OSError: if the file cannot be written.
    """
    index = manifest["index"]
    pieces = pieces_of(index)
    buffers = {
        name: (rank, size) for rank, held in enumerate(index) for name, size in held["buffers"].items()
    }
    shapes = shapes_of(pieces)
    parameters = list(shapes)
    shapes |= {f"{BUFFERS}/{name}": (size,) for name, (_, size) in buffers.items()}
    with readers(storage, manifest) as reader, replacing(out, "wb") as file:
        file.write(_header(shapes, {"run": manifest["run"], "step": str(manifest["step"])}))
        for key in parameters:
            file.write(merged(key, manifest, pieces, reader).data)
        for name, (rank, size) in buffers.items():
            ((_, data),) = reader(rank).read([(f"{BUFFERS}/{name}", 0, size * _SIZE)])
            file.write(data.data)
    return len(shapes)


def _header(shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str]) -> bytes:
    end, described = 0, {}
    for key, shape in shapes.items():
        start, end = end, end + prod(shape) * _SIZE
        described[key] = {"dtype": "F32", "shape": shape, "data_offsets": (start, end)}
    header = json.dumps({"__metadata__": metadata, **described}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


@contextlib.contextmanager
def readers(storage: Storage, manifest: Mapping[str, Any]) -> Iterator[Callable[[int], ShardReader]]:
    """Yield what opens the file of a rank in a checkpoint, once."""
    opened: dict[int, ShardReader] = {}
    with contextlib.ExitStack() as stack:

        def reader(rank: int) -> ShardReader:
            if rank not in opened:
                name = file_of(rank)
                of_rank = storage.open(f"{folder_of(manifest['step'])}/{name}")
                opened[rank] = open_shard(manifest, stack.enter_context(of_rank), name)
            return opened[rank]

        yield reader


def shapes_of(pieces: Pieces) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of a checkpoint, of those that are left when adapters are merged."""
    return {key: of[0][1].region.shape for key, of in pieces.items() if not key.endswith((A, B))}


def merged(
    key: str, manifest: Mapping[str, Any], pieces: Pieces, reader: Callable[[int], ShardReader]
) -> np.ndarray:
    """Put a parameter together, and add its adapter if it has one: fp32, flat."""
    weight = whole(key, pieces[key], reader)
    stem = key.removesuffix("weight")
    if f"{stem}{A}" not in pieces:
        return weight
    a, b = (
        whole(f"{stem}{name}", of := pieces[f"{stem}{name}"], reader).reshape(of[0][1].region.shape)
        for name in (A, B)
    )
    return weight + np.float32(_scale(key.partition("/")[0], manifest["fingerprint"])) * (b @ a).reshape(-1)


def _scale(component: str, fingerprint: Mapping[str, Any]) -> float:
    """alpha / rank of the adapters of a component."""
    section = "model.llm.lora" if component == LLM else f"model.encoders.{component}.lora"
    alpha = fingerprint.get(f"{section}.alpha")  # not there where it is the default
    return float(LoraConfig().alpha if alpha is None else alpha) / int(fingerprint[f"{section}.rank"])


def whole(key: str, pieces: list[tuple[int, Piece]], reader: Callable[[int], ShardReader]) -> np.ndarray:
    """Put a parameter together: fp32, flat."""
    whole = np.full(prod(pieces[0][1].region.shape), np.nan, np.float32)
    for rank, piece in pieces:
        ((_, data),) = reader(rank).read([(f"{key}/main", 0, piece.count * piece.size)])
        values = torch.from_numpy(data).view(DTYPES[piece.size]).float().numpy()
        for here, place, length in _runs(piece):
            whole[place : place + length] = values[here : here + length]
    assert not np.isnan(whole).any(), f"{key} is not all there"
    return whole


def _runs(piece: Piece) -> Iterator[tuple[int, int, int]]:
    yield from zip(*piece.region.elements(piece.start, piece.start + piece.count), strict=True)
