"""The weights of a checkpoint as a folder of published ones: what another folder is, with other numbers.

Files, headers and hence names, types and shapes are those of the source. Everything beside its weights, such
as its tokenizer, is copied. Encoders that lie in it, too, are written from the checkpoint as the LLM is. Of a
source that is quantised, what was so is bf16, and neither headers, index
nor configuration know it any more.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch

from dataloader.storage import Storage
from omni.config import ConfigError
from omni.models.llm import NAME as LLM
from omni.models.regions import Region
from omni.open_models.decode import into_slab
from omni.open_models.folder import BYTES, CONFIG, INDEX, Folder, Tensor, header_of
from omni.open_models.rules import Rule
from omni.rank.folder_weights import DTYPES
from omni.rank.state import pieces_of
from omni.training.export import merged, readers, shapes_of

# Weights in other forms would be those from before training, and code is not ours to hand on.
_LEFT = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".py")


def export_folder(
    storage: Storage,
    manifest: Mapping[str, Any],
    source: Folder,
    out: Path,
    encoders: Mapping[str, Folder] | None = None,
    component: str = LLM,
) -> int:
    """Write a component of a checkpoint as `source` holds it, to a folder that is new or empty; the index
    comes last. So are `encoders`, by component, whose rules name tensors of the same folder. Adapters are
    merged. One parameter of ours at a time is in memory. Returns how many tensors there are.

    Raises:
        ConfigError: if the checkpoint holds another model, or the folder is not empty.
        DamagedError: if what is read is not what was written.
        OSError: if something cannot be written.
    """
    source.check()
    pieces = pieces_of(manifest["index"])
    shapes = shapes_of(pieces)
    parts = {component: source, **(encoders or {})}
    for name, folder in parts.items():
        _check_model(
            name, folder, _of_component(shapes, name), manifest["fingerprint"].get("model.llm.vocab")
        )
    taken = {name: (component, of) for component, part in parts.items() for name, of in part.names.items()}
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out} is not empty: name a folder that is new")
    out.mkdir(parents=True, exist_ok=True)
    with readers(storage, manifest) as reader:

        @lru_cache(maxsize=1)  # queries, keys and values are cut out of one
        def ours(name: str) -> torch.Tensor:
            return torch.from_numpy(merged(name, manifest, pieces, reader)).view(shapes[name])

        held = plain_tensors(source)
        for name, header in source.headers.items():
            with (out / name).open("wb") as file, source.storage.open(name) as before:
                described = [(key, of.dtype, of.shape) for key, of in held[name]]
                file.write(header if source.quantised is None else header_of(described))
                for key, of in held[name]:
                    if key not in taken:
                        before.seek(of.start)
                        file.write(before.read(of.stop - of.start))
                        continue
                    component, rules = taken[key]
                    for rule, number in rules:
                        file.write(_theirs(rule, number, of, ours(f"{component}/{rule.ours}")))
    _copy_rest(source, out)
    return sum(map(len, held.values()))


def _of_component(shapes: Mapping[str, tuple[int, ...]], component: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a component's parameters, by their names in it."""
    start = f"{component}/"
    return {key.removeprefix(start): shape for key, shape in shapes.items() if key.startswith(start)}


def plain_tensors(source: Folder) -> dict[str, list[tuple[str, Tensor]]]:
    """Return the tensors of each file of a folder by name, in their order; in place of what is quantised the
    same in bf16, where its numbers are.
    """
    plain = {id(of.data): name for name, of in source.stored.items()}
    scales = {id(of.scales) for of in source.stored.values() if of.scales is not None}
    held: dict[str, list[tuple[str, Tensor]]] = {name: [] for name in source.headers}
    for key, of in source.tensors.items():
        name = plain.get(id(of), key)
        if id(of) in scales:
            continue
        if name in source.stored and source.stored[name].scales is not None:
            rule, number = source.names[name][0]
            of = replace(of, dtype="BF16", shape=rule.shapes[number])
        held[of.file].append((name, of))
    return held


def _check_model(
    component: str, source: Folder, held: Mapping[str, tuple[int, ...]], vocab: int | None
) -> None:
    """Refuse a checkpoint whose LLM of `vocab` ids, or whose encoder, is not what the folder's rules make."""
    for name in sorted(held.keys() | source.rules.keys()):
        rule = source.rules.get(name)
        if component == LLM and rule is not None and name in held and vocab == source.keys["vocab"]:
            rule = source.rule(name, held[name]) or rule  # padded as the run had it
        means = None if rule is None else rule.shape
        if component != LLM and means is None:
            raise ConfigError(
                f"{name} of {component} is our own, and {source.url} has no place for it: omni checkpoint "
                f"export without --as writes all weights"
            )
        if held.get(name) != means:
            whose = name if component == LLM else f"{name} of {component}"
            raise ConfigError(
                f"{source.url} has another model than the checkpoint: {whose} has shape {held.get(name)} in "
                f"the checkpoint, and {means} there. Name with --like the folder that the weights came from"
            )


def _theirs(rule: Rule, number: int, tensor: Tensor, ours: torch.Tensor) -> Any:
    """The bytes of one of their tensors, or of its slab for one expert, cut out of ours."""
    part = Region(rule.shape, 0, rule.runs[number]).cut(ours)
    if rule.slab is not None:
        part = into_slab(part, rule.slab)
    return part.to(DTYPES[tensor.dtype]).contiguous().view(-1).view(torch.uint8).numpy().data


def _plain(source: Folder, name: str) -> dict[str, Any]:
    """What configuration or index of a quantised folder say, of the same in bf16."""
    said: dict[str, Any] = json.loads(source.storage.read(name))
    if name == CONFIG:
        return {key: value for key, value in said.items() if key != "quantization_config"}
    held = plain_tensors(source)
    total = sum(prod(of.shape) * BYTES[of.dtype] for file in held.values() for _, of in file)
    placed = {key: file for file, tensors in held.items() for key, _ in tensors}
    return {**said, "metadata": {**said.get("metadata", {}), "total_size": total}, "weight_map": placed}


def left_behind(source: Folder) -> list[str]:
    """What of a folder an export does not have: folders in it, code, and weights in other forms."""
    sizes = source.storage.sizes()
    left = [name for name in sizes if name.endswith(_LEFT) and name not in source.headers]
    return sorted([*left, *(f"{name}/" for name in sizes if sizes[name] is None)])


def _copy_rest(source: Folder, out: Path) -> None:
    sizes = source.storage.sizes()
    for name in sorted(sizes, key=lambda name: (name == INDEX, name)):
        if source.quantised is not None and name in (CONFIG, INDEX):
            (out / name).write_text(json.dumps(_plain(source, name), indent=2) + "\n")
        elif sizes[name] is not None and not name.endswith(_LEFT):
            with source.storage.open(name) as before, (out / name).open("wb") as file:
                shutil.copyfileobj(before, file)
