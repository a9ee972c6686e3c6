"""Checkpoints in tests: of components alone, and what files hold, read by code that owes nothing to ours."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dataloader.storage import Storage
from infra.checkpoint import (
    Keep,
    claim,
    complete,
    file_of,
    folder_of,
    open_shard,
    read_manifest,
    save_checkpoint,
)
from omni.rank.state import read_state, snapshot, spread_weights
from parallel.control_of_run import connected

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}


def save_components(folder: Path, components: Any, names: Any, stage: Any) -> None:
    """Save what all ranks hold as step 1."""
    storage = Storage.at(folder)
    control = connected(dist.get_rank(), dist.get_world_size(), 60)
    run = control.broadcast("run", claim(storage, None, adopt=True) if control.rank == 0 else None)
    shard = snapshot(components, names, stage)
    save_checkpoint(storage, run, 1, shard, {}, Keep(1), control)


def load_components(folder: Path, components: Any, names: Any, stage: Any, moments: bool = True) -> None:
    """Load what `save_components` saved, under any layout, without `moments` weights alone."""
    manifest = read_manifest(Storage.at(folder), 1)

    def read(rank: int, ranges: Sequence[tuple[str, int, int]]) -> Iterator[Any]:
        with (folder / folder_of(1) / file_of(rank)).open("rb") as file:
            yield from open_shard(manifest, file, file_of(rank)).read(ranges)

    read_state(manifest["index"], read, components, names, stage, dist.get_rank(), moments)
    spread_weights(components)


def newest_folder(checkpoints: Path) -> Path:
    return checkpoints / folder_of(complete(Storage.at(checkpoints))[-1])


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((checkpoint / "checkpoint.json").read_text())
    return manifest


def tensors_of(file: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of a file in the layout of safetensors."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    return {
        name: torch.from_numpy(np.frombuffer(data[slice(*of["data_offsets"])], np.uint8).copy())
        .view(DTYPES[of["dtype"]])
        .reshape(of["shape"])
        for name, of in header.items()
        if name != "__metadata__"
    }
