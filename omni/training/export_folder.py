"""The weights of a checkpoint as a folder of published ones: what another folder is, with other numbers.

Files, headers and hence names, types and shapes are those of the source. Everything beside its weights, such
as its tokenizer, is copied.
"""

import shutil
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from infra.storage import Storage
from omni.config import ConfigError
from omni.models.llm import NAME as LLM
from omni.models.regions import Region
from omni.open_models.folder import INDEX, Folder, Tensor
from omni.rank.folder_weights import DTYPES
from omni.rank.state import pieces_of
from omni.training.export import readers, whole

# Weights in other forms would be those from before training, and code is not ours to hand on.
_LEFT = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".py")


def export_folder(storage: Storage, manifest: Mapping[str, Any], source: Folder, out: Path) -> int:
    """Write the LLM of a checkpoint as `source` holds it, to a folder that is new or empty; the index comes
    last. One parameter of ours at a time is in memory. Returns how many tensors there are.

    Raises:
        ConfigError: if the checkpoint holds another model, or the folder is not empty.
        DamagedError: if what is read is not what was written.
        OSError: if something cannot be written.
    """
    source.check()
    pieces = pieces_of(manifest["index"])
    _check_model(source, {key: of[0][1].region.shape for key, of in pieces.items()})
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out} is not empty: name a folder that is new")
    out.mkdir(parents=True, exist_ok=True)
    with readers(storage, manifest) as reader:

        @lru_cache(maxsize=1)  # queries, keys and values are cut out of one
        def ours(name: str) -> torch.Tensor:
            flat = whole(f"{LLM}/{name}", pieces[f"{LLM}/{name}"], reader)
            return torch.from_numpy(flat).view(source.rules[name].shape)

        for name, header in source.headers.items():
            with (out / name).open("wb") as file, source.storage.open(name) as before:
                file.write(header)
                held = [(key, of) for key, of in source.tensors.items() if of.file == name]
                for key, of in sorted(held, key=lambda pair: pair[1].start):
                    before.seek(of.start)
                    copied = source.is_copied(key)
                    file.write(before.read(of.stop - of.start) if copied else _theirs(source, key, of, ours))
    _copy_rest(source, out)
    return len(source.tensors)


def _check_model(source: Folder, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint whose LLM is not what the folder's rules make."""
    held = {key.removeprefix(f"{LLM}/"): of for key, of in shapes.items() if key.startswith(f"{LLM}/")}
    for name in sorted(held.keys() | source.rules.keys()):
        means = source.rules[name].shape if name in source.rules else None
        if held.get(name) != means:
            raise ConfigError(
                f"{source.url} has another model than the checkpoint: {name} has shape {held.get(name)} in "
                f"the checkpoint, and {means} there. Name with --like the folder that the weights came from"
            )


def _theirs(source: Folder, name: str, tensor: Tensor, ours: Callable[[str], torch.Tensor]) -> Any:
    """The bytes of one of their tensors, cut out of ours."""
    rule, number = source.names[name]
    part = Region(rule.shape, 0, rule.runs[number]).cut(ours(rule.ours))
    return part.to(DTYPES[tensor.dtype]).contiguous().view(-1).view(torch.uint8).numpy().data


def _copy_rest(source: Folder, out: Path) -> None:
    sizes = source.storage.sizes()
    for name in sorted(sizes, key=lambda name: (name == INDEX, name)):
        if sizes[name] is not None and not name.endswith(_LEFT):
            with source.storage.open(name) as before, (out / name).open("wb") as file:
                shutil.copyfileobj(before, file)
