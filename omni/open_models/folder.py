"""A folder of published weights: what its `config.json` means, which tensors its files hold, and where.

Only headers are read here. A file of safetensors is the length of a header (8 bytes, little-endian), the
header as JSON, and the tensors' bytes one after the other.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from typing import Any

from dataloader.storage import Storage
from omni.config import ConfigError
from omni.llm_config import LLMConfig
from omni.open_models.family import Family, Said, family_of
from omni.open_models.quantised import FP8, MXFP4, Quantised, quantised_of
from omni.open_models.rules import VOCABULARY, Rule

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SIZES = {"F32": 4, "BF16": 2, "F16": 2}
BYTES = {**SIZES, "F8_E4M3": 1, "U8": 1}
"""Of the numbers that files hold, also quantised ones."""
QUANTISED_TYPES: dict[str, tuple[tuple[str, ...], ...]] = {
    FP8: (("F8_E4M3",), ("F32", "BF16")),
    MXFP4: (("U8",), ("U8",)),
}
"""Of numbers and of scales."""
# Keys of model.llm that say how a model is computed or learns, not which it is.
FREE = (
    "vocab_multiple",
    "loss_chunk",
    "recompute",
    "recompute_long",
    "keep_attention",
    "offload",
    "lora.rank",
    "lora.alpha",
    "lora.targets",
)
_LENGTH = 8
_SHOWN = 5


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file: bytes [start, stop) of it."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Stored:
    """How a tensor that a rule takes lies in the files: as it is, or as numbers with `scales`."""

    data: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True)
class Folder:
    """A folder at `url`, whose `config.json` means `keys` of `model.llm`, all but those in `FREE`; those of
    `moe` as "moe.topk". `key` of the configuration names it.
    """

    url: str
    storage: Storage
    family: Family
    keys: Mapping[str, Any]
    quantised: Quantised | None = None
    key: str = "start.weights"

    @cached_property
    def rules(self) -> dict[str, Rule]:
        """The rule of each parameter of ours, by name."""
        forms = [
            {rule.ours: rule for every in of(self.keys) for rule in every.named()}
            for of in (self.family.rules, *self.family.otherwise)
        ]
        if len(forms) == 1:
            return forms[0]
        held = self.tensors.keys()
        return max(
            forms, key=lambda form: len(held & {name for rule in form.values() for name in rule.theirs})
        )

    def rule(self, name: str, shape: tuple[int, ...]) -> Rule | None:
        """The rule of a parameter of ours of this shape, None without: vocabularies may be padded."""
        rule = self.rules.get(name)
        if rule is not None and name in VOCABULARY:
            rule = replace(rule, pad=max(0, shape[0] - sum(rule.rows)))
        return rule if rule is not None and rule.shape == shape else None

    @cached_property
    def names(self) -> dict[str, list[tuple[Rule, int]]]:
        """For each of their tensors the rules that take it, one for each expert that it holds, and its number
        there.
        """
        found: dict[str, list[tuple[Rule, int]]] = {}
        for rule in self.rules.values():
            for number, name in enumerate(rule.theirs):
                found.setdefault(name, []).append((rule, number))
        return found

    @cached_property
    def stored(self) -> dict[str, Stored]:
        """How each of those tensors lies in the files; of those that are there."""
        found = {}
        for name in self.names:
            data, scales = (name, "") if self.quantised is None else self.quantised.names(name)
            if scales in self.tensors and data in self.tensors:
                found[name] = Stored(self.tensors[data], self.tensors[scales])
            elif name in self.tensors:
                found[name] = Stored(self.tensors[name])
        return found

    @cached_property
    def headers(self) -> dict[str, bytes]:
        """The header of each file, its length included.

        Raises:
            ConfigError: for a file that is missing or no safetensors.
        """
        return {name: self._header(name) for name in self._files()}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors of all files, by name; those of a file in the order in which they lie there.

        Raises:
            ConfigError: for a file that is cut short, too.
        """
        found: dict[str, Tensor] = {}
        sizes = self.storage.sizes()
        for file, header in self.headers.items():
            try:
                described = dict(_described(header))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise self._wrong(f"the header of {file} cannot be read ({error}). Fetch it again") from error
            last = 0
            for name, (dtype, shape, begin, end) in sorted(described.items(), key=lambda of: of[1][2:]):
                start, stop = begin + len(header), end + len(header)
                if name in found:
                    raise self._wrong(f"{name} is in {found[name].file} and in {file}")
                found[name] = Tensor(file, dtype, shape, start, stop)
                if not len(header) <= start <= stop <= (sizes.get(file) or 0):
                    raise self._wrong(f"{file} is cut short: it ends before {name} does. Fetch it again")
                if begin != last:
                    raise self._wrong(
                        f"{file} has {name} elsewhere than behind the one before. Fetch it again"
                    )
                last = end
        return found

    def check(self) -> None:
        """Refuse files whose tensors are not those that `config.json` means.

        Raises:
            ConfigError: naming the file or the tensors, and the remedy.
        """
        taken = {id(part) for of in self.stored.values() for part in (of.data, of.scales)}
        unknown = [
            name for name, of in self.tensors.items() if id(of) not in taken and not self.is_copied(name)
        ]
        if unknown:
            raise self._wrong(
                f"it holds {_some(unknown)}, which {CONFIG} does not mean and no rule of its family takes: "
                f"choose a folder without, or a family that knows them (docs/open_models.md)"
            )
        missing = [name for name in self.names if name not in self.stored]
        if missing:
            raise self._wrong(f"it lacks {_some(missing)}, which {CONFIG} means. Fetch the missing files")
        for name, rules in self.names.items():
            self._check_tensor(name, *rules[0])

    def _check_tensor(self, name: str, rule: Rule, number: int) -> None:
        stored, shape = self.stored[name], rule.shapes[number]
        parts = [(stored.data, shape, tuple(SIZES))]
        if stored.scales is not None:
            assert self.quantised is not None
            shapes = self.quantised.shapes(rule, number)
            if shapes is None:
                raise self._wrong(
                    f"{name} in {stored.data.file} is quantised, which {self.quantised.kind} is read for "
                    f"other tensors alone: take a folder in bf16"
                )
            both = (stored.data, stored.scales)
            parts = list(zip(both, shapes, QUANTISED_TYPES[self.quantised.kind], strict=True))
        for tensor, wanted, kinds in parts:
            if tensor.shape != wanted:
                raise self._wrong(
                    f"{name} in {tensor.file} has shape {tensor.shape}, and {CONFIG} means {wanted}: take "
                    f"the {CONFIG} that the weights came with"
                )
            if tensor.dtype not in kinds:
                raise self._wrong(
                    f"{name} in {tensor.file} is of {tensor.dtype}: numbers are read as {', '.join(kinds)}; "
                    f"take a folder that is not quantised"
                )
            if tensor.stop - tensor.start != prod(wanted) * BYTES[tensor.dtype]:
                raise self._wrong(f"the header of {tensor.file} contradicts itself at {name}. Fetch it again")

    def is_copied(self, name: str) -> bool:
        """Whether a tensor is not read, and exported as it was."""
        return any(fnmatchcase(name, pattern) for pattern in self.family.copied)

    def identity(self) -> dict[str, dict[str, Any]]:
        """Say which files these are: of each its bytes, the hash of its header and, where the file system
        knows, when it was changed. All of 140 GB would take minutes to hash; a header names every tensor.
        """
        sizes, found = self.storage.sizes(), {}
        for file, header in self.headers.items():
            found[file] = {
                "bytes": sizes[file],
                "header": hashlib.blake2b(header, digest_size=16).hexdigest(),
            }
            with suppress(NotImplementedError):
                found[file]["modified"] = self.storage.fs.modified(self.storage.path(file)).isoformat()
        return found

    def _files(self) -> list[str]:
        """The files of weights: those of the index, or the one that there is."""
        here = self.storage.sizes()
        if INDEX in here:
            placed = _parsed(self.storage, INDEX, self.url).get("weight_map")
            if not isinstance(placed, dict) or not placed or {*map(type, placed.values())} != {str}:
                raise self._wrong(f"{INDEX} says nothing of where weights are. Fetch it again")
            files = sorted(set(placed.values()))
        else:
            files = [SINGLE]
        if missing := [file for file in files if here.get(file) is None]:
            raise self._wrong(f"it lacks {_some(missing)}. Fetch the missing files, in safetensors")
        return files

    def _header(self, name: str) -> bytes:
        with self.storage.open(name) as file:
            length = file.read(_LENGTH)
            size = int.from_bytes(length, "little")
            header = length + (file.read(size) if size < 2**27 else b"")
        if len(header) != _LENGTH + size or not header[_LENGTH:].startswith(b"{"):
            raise self._wrong(f"{name} is no whole file of safetensors. Fetch it again")
        return bytes(header)

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(f"{self.key}={self.url}: {what}")


def other_file(before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The first file of an `identity` from before whose size or header is another now, None if none is."""
    return next(
        (
            name
            for name, file in before.items()
            if any(now.get(name, {}).get(key) != file.get(key) for key in ("bytes", "header"))
        ),
        None,
    )


def open_folder(url: str) -> Folder:
    """Open a folder of published weights, a path or a URL; of its files only `config.json` is read yet.

    Raises:
        ConfigError: naming what is missing, or which key cannot be trained.
    """
    try:
        storage = Storage.at(url)
    except ValueError as error:
        raise ConfigError(f"start.weights={url}: {error}") from error
    said = _parsed(storage, CONFIG, url)
    path = f"start.weights={url}: {CONFIG}"
    quantised = quantised_of(said.pop("quantization_config", None), path)
    family = family_of(said, path)
    reader = Said(said, path)
    try:
        keys = default_keys() | family.keys(reader)
    except ConfigError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise reader.unclear(error) from error
    reader.end()
    return Folder(url, storage, family, keys, quantised)


def default_keys() -> dict[str, Any]:
    """Keys of `model.llm` that say which model it is, with their defaults."""
    return {key: value for key, value in flat_keys(LLMConfig()) if key not in FREE}


def header_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The header of a file of safetensors that holds these, by name, type and shape, one after the other."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        size = prod(shape) * BYTES[dtype]
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH)
    return len(text).to_bytes(_LENGTH, "little") + text


def config_of(keys: Mapping[str, Any], **more: Any) -> LLMConfig:
    """Return the `model.llm` that flat keys mean, with `more` of its keys."""
    config = LLMConfig(**{key: value for key, value in keys.items() if "." not in key}, **more)
    for key, value in keys.items():
        section, dot, name = key.rpartition(".")
        if dot:
            setattr(getattr(config, section), name, value)
    return config


def flat_keys(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys and values of a configuration, those of sections under it by names with dots."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from flat_keys(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def check_same(folder: Folder, config: LLMConfig) -> None:
    """Refuse a model that is another one than the folder's.

    Raises:
        ConfigError: naming the keys and both values.
    """
    given = dict(flat_keys(config))
    for key, value in folder.keys.items():
        if given[key] != value:
            raise contradiction(folder, key, given[key], value)


def contradiction(folder: Folder, key: str, given: Any, value: Any) -> ConfigError:
    """Return the error for a key of `model.llm` that is not the folder's."""
    return ConfigError(
        f"model.llm.{key}={given} contradicts start.weights={folder.url}, whose {CONFIG} means {value}: "
        f"leave the key out, and the choice of model, model/llm or experiment that sets it"
    )


def _described(header: bytes) -> Iterator[tuple[str, tuple[str, tuple[int, ...], int, int]]]:
    """Yield each tensor's name, type, shape, and where its bytes begin and end after the header."""
    for name, of in json.loads(header[_LENGTH:]).items():
        if name != "__metadata__":
            begin, end = map(int, of["data_offsets"])
            yield name, (str(of["dtype"]), tuple(map(int, of["shape"])), begin, end)


def _parsed(storage: Storage, name: str, url: str) -> dict[str, Any]:
    try:
        found = json.loads(storage.read(name))
    except FileNotFoundError as error:
        raise ConfigError(
            f"start.weights={url}: there is no {name} in it. Give a folder of a published model, with "
            f"{CONFIG} and safetensors; a checkpoint of a run is given by start.checkpoint"
        ) from error
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"start.weights={url}: {name} cannot be read ({error}). Fetch it again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"start.weights={url}: {name} is no JSON object. Fetch it again")
    return found


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
