"""Read a W&B run back from its `.wandb` file, with no server and no key.

The file is a LevelDB log. It begins with 7 bytes: ":W&B", a 16-bit magic number, a version. Blocks of 32
KiB follow (the first one counts those 7 bytes). A block holds chunks, each with its own 7-byte head: CRC-32
of type and data, 16-bit length, 8-bit type. A record is one "full" chunk, or a first, any number of middle
ones and a last. No chunk begins in the last 6 bytes of a block. Each record is a protobuf message.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

FILE_HEAD = struct.Struct("<4sHB")
FILE_IDENTITY = (b":W&B", 0xBEE1, 0)
CHUNK_HEAD = struct.Struct("<IHB")
BLOCK = 32 * 1024
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class OfflineRun:
    """A W&B run as logged, without W&B's own keys: config and summary nested, one dict a history record.

    `group` is empty if it is in none, `alerts` are titles and texts, `references` what artifacts refer to.
    """

    id: str = ""
    name: str = ""
    group: str = ""
    tags: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    alerts: list[tuple[str, str]] = field(default_factory=list)
    references: list[str] = field(default_factory=list)


def read_offline_run(path: Path) -> OfflineRun:
    """Read a `.wandb` file, the folder it is in, or the newest run below a `wandb` folder or a run folder.

    A last record that a crash cut short is left out. Raises ValueError for no run or a wrong checksum.
    """
    from wandb.proto import wandb_internal_pb2  # takes a second, of whoever imports this file

    run = OfflineRun()
    for data in _records(_find(Path(path))):
        message = wandb_internal_pb2.Record.FromString(data)  # type: ignore[attr-defined]
        match message.WhichOneof("record_type"):
            case "run":
                run.id, run.name = message.run.run_id, message.run.display_name
                run.group, run.tags = message.run.run_group, tuple(message.run.tags)
                _apply(run.config, message.run.config)
                _apply(run.summary, message.run.summary)
            case "config":
                _apply(run.config, message.config)
            case "summary":
                _apply(run.summary, message.summary)
            case "alert":
                run.alerts.append((message.alert.title, message.alert.text))
            case "artifact":
                run.references += [entry.ref for entry in message.artifact.manifest.contents if entry.ref]
            case "history":
                run.history.append(_items(message.history.item))
    history = [_public(row) for row in run.history]
    return replace(run, config=_public(run.config), history=history, summary=_public(run.summary))


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    found = [
        file
        for pattern in ("*.wandb", "*run-*/*.wandb", "wandb/*run-*/*.wandb")
        for file in path.glob(pattern)
        if file.parent.name != "latest-run"
    ]
    if not found:
        raise ValueError(f"{path} holds no .wandb file: give a run folder whose run used tracking=wandb")
    # Folders are called [offline-]run-<date>_<time>-<id>.
    return max(found, key=lambda file: file.parent.name.removeprefix("offline-"))


def _records(path: Path) -> Iterator[bytes]:
    data = path.read_bytes()
    if len(data) < FILE_HEAD.size or FILE_HEAD.unpack_from(data) != FILE_IDENTITY:
        raise ValueError(f"{path} is not a .wandb file of a known version: it begins with {data[:7]!r}")
    parts: list[bytes] = []
    for kind, chunk in _chunks(path, data):
        if kind in (FULL, FIRST):
            parts = []
        parts.append(chunk)
        if kind in (FULL, LAST):
            yield b"".join(parts)


def _chunks(path: Path, data: bytes) -> Iterator[tuple[int, bytes]]:
    position = FILE_HEAD.size
    while True:
        left_in_block = BLOCK - position % BLOCK
        if left_in_block < CHUNK_HEAD.size:
            position += left_in_block
        if position + CHUNK_HEAD.size > len(data):
            return
        checksum, length, kind = CHUNK_HEAD.unpack_from(data, position)
        end = position + CHUNK_HEAD.size + length
        if kind == 0 or end > len(data):  # preallocated, or cut short by a crash
            return
        body = data[position + CHUNK_HEAD.size : end]
        if zlib.crc32(body, zlib.crc32(bytes([kind]))) != checksum:
            raise ValueError(
                f"{path}: wrong checksum at byte {position}: the file is damaged, read metrics.jsonl"
            )
        yield kind, body
        position = end


def _items(items: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for item in items:
        _put(tree, list(item.nested_key) or [item.key], json.loads(item.value_json))
    return tree


def _apply(tree: dict[str, Any], change: Any) -> None:
    for item in change.update:
        _put(tree, list(item.nested_key) or [item.key], json.loads(item.value_json))
    for item in change.remove:
        *parents, last = list(item.nested_key) or [item.key]
        inner = tree
        for key in parents:
            inner = inner.get(key, {})
        inner.pop(last, None)


def _put(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    *parents, last = keys
    for key in parents:
        tree = tree.setdefault(key, {})
    tree[last] = value


def _public(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if not key.startswith("_")}
