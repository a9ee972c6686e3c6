"""How an encoder joins the platform: it describes itself, and from that alone it takes part in every policy.

An encoder lives wherever its author likes. It is found by name through the entry-point group
`omni.encoders`, or by `_target_` in a configuration; no file here changes for it.

    model.encoders.image: {name: vit, hidden: 64, ...}            # a registered encoder
    model.encoders.radar: {_target_: mypkg.RadarEncoder, ...}     # any importable one
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dataloader.format import SampleError
from omni.keys import ConfigError, check_keys
from parallel.installed import installed
from parallel.work import Part

if TYPE_CHECKING:
    import torch

    from dataloader.format import Item
    from omni.open_models.folder import Folder
    from parallel.megatron import ProcessGroupCollection
    from parallel.packed import PackedTokens, Sharding

GROUP = "omni.encoders"
_OWN_KEY = re.compile(r"(?<![\w.])encoder\.(?=\w)")


@dataclass(frozen=True)
class ItemArrays:
    """An item ready for its encoder: `values` [T, ...] float32, or of any type that its `transfer` takes, and
    integer `positions` [T, A].
    """

    values: np.ndarray
    positions: np.ndarray

    def part(self, start: int, stop: int) -> "ItemArrays":
        """Return tokens [start, stop)."""
        return ItemArrays(self.values[start:stop], self.positions[start:stop])


@dataclass(frozen=True)
class Attention:
    """The attention of a component: what sharing its sequences among ranks must move and divide."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool


class Encoder(Protocol):
    """The contract. An object is made from the encoder's configuration and holds no weights; it raises
    ConfigError for one that cannot be, calling its keys `encoder.<key>`: what an encoder is called in a model
    it does not know, and `naming` puts there.

    `attach` names the attach points of its rows: ("llm.embed",), where they replace the embeddings of an
    item's placeholders, or several such as ("llm.embed", "llm.layers.2"). It puts out as many rows for each
    of them, one point after the other; those of a layer are added to its input.

    What `preprocess` returns goes to the device as it is, unless the encoder has `transfer(values, device)`,
    which makes values [T, ...] of several items what its module takes: bytes, for one, are a quarter of what
    they become. What it computes `later` is computed on the device.

    An encoder whose rows are a grid may have `row_grid(size)`: (frames, rows, columns) of an item of this
    size, as many in all as `count` says, row after row and frame after frame. An LLM with `rotary.sections`
    takes the places of its rows from it; rows of others count on as text does. `pack` finds the grids of the
    items of a pass in `sharding.grids`, as planned, also of those that could not be decoded.

    Between the rows of an item tokens may stand: `row_layout(size)` tells its runs, each a number of rows and
    the ids of the tokens that follow them, of as many rows in all as `count` says. () for none.

    What a user should know when a run starts, or is planned, an encoder may say by `notes()`, in sentences.

    An encoder may begin with published weights: `published()` returns their folder, whose rules give its
    parameters by their names, or None.

    `Config` is a dataclass of the encoder's keys; `modality` names the items it takes; `unit` is the number
    of tokens that must stay together when an item is split, None if items are never split.
    """

    Config: type
    modality: str
    unit: int | None
    attach: tuple[str, ...]

    def count(self, size: tuple[int, ...]) -> tuple[int, int]:
        """Return (tokens in, LLM rows out) of an item of this size, from metadata alone.

        Raises SampleError, saying which `encoder.<key>` to change, for an item that the encoder cannot take:
        `data.on_long` says what happens to its sample.
        """
        ...

    def work(self, width: int, element: int, tp: int = 1) -> Part:
        """State the work of a rank, in front of an LLM of `width`, with `element` bytes a number, where `tp`
        ranks share the encoder's layers: FLOPs, collectives, memory. `EncoderPart` composes it from blocks.
        """
        ...

    def attention(self) -> Attention:
        """Return what sharing its items among ranks is planned from."""
        ...

    def check_tp(self, key: str, tp: int) -> None:
        """Raise ConfigError, naming `key`, if `tp` ranks cannot share the encoder's layers."""
        ...

    def decode(self, item: "Item") -> np.ndarray:
        """Turn an item's encoded bytes into an array. Raises SampleError for bytes that are no such item."""
        ...

    def blank(self) -> np.ndarray:
        """Return the smallest decoded item there can be: it stands in for items that cannot be decoded."""
        ...

    def preprocess(self, array: np.ndarray) -> ItemArrays:
        """Turn a decoded item into exactly `count(size)[0]` tokens. Like `decode` it is called by several
        threads at once, and raises SampleError for an item that is bad.
        """
        ...

    def pack(
        self, sharding: "Sharding", positions: "torch.Tensor", dtype: "torch.dtype", device: "torch.device"
    ) -> "PackedTokens":
        """Describe items, one sequence each, to attention. Runs ahead of the step, with `positions` on the
        host. Tensors of what it returns are brought to `device`, with all other inputs of the step.
        """
        ...

    def build(
        self, width: int, dtype: "torch.dtype", device: "torch.device", groups: "ProcessGroupCollection"
    ) -> "torch.nn.Module":
        """Build the module. Called with (values [T, ...], positions [T, A], packed), it returns the rows
        [R, width] of all items in order. Its attribute `config` is a megatron TransformerConfig, which the
        reduction of its gradients reads.
        """
        ...


def prepare_item(
    encoder: Encoder, item: "Item", change: Callable[[np.ndarray], np.ndarray] | None = None
) -> ItemArrays:
    """Turn an item's encoded bytes, changed once they are decoded, into what its encoder takes in. Raises
    SampleError for a bad item, and for one whose values are not all finite: a single such number would make
    the loss of a whole step NaN.
    """
    array = encoder.decode(item)
    arrays = encoder.preprocess(array if change is None else change(array))
    if arrays.values.dtype.kind == "f" and not np.isfinite(arrays.values).all():
        raise SampleError("what its encoder makes of it holds numbers that are not finite")
    return arrays


def transferred(encoder: Encoder, values: np.ndarray, device: "torch.device") -> "torch.Tensor":
    """Return values [T, ...] that `preprocess` made as the encoder's module takes them, to be brought to
    `device`.
    """
    import torch

    own = getattr(encoder, "transfer", None)
    tensor: torch.Tensor = own(values, device) if own else torch.from_numpy(values)
    return tensor


def published(component: str, encoder: Encoder) -> "Folder | None":
    """Return the folder whose weights the encoder of `component` begins with, None if they are drawn.

    Raises:
        ConfigError: if the folder lacks them, or has others.
    """
    own = getattr(encoder, "published", None)
    with naming(component):
        folder: Folder | None = own() if own else None
        if folder is not None:
            folder.check()
    return folder


def notes_of(encoders: Mapping[str, Encoder]) -> list[str]:
    """Return what encoders have to say when a run starts, or is planned, under their names."""
    return [f"{name}: {note}" for name, own in encoders.items() for note in getattr(own, "notes", list)()]


def make_encoder(component: str, options: Mapping[str, Any]) -> Encoder:
    """Make the encoder of `component` from its configuration.

    Raises:
        ConfigError: if it is not registered, cannot be imported, or has keys or values it does not know.
    """
    options = dict(options)
    target, name = options.pop("_target_", None), options.pop("name", None)
    key = f"model.encoders.{component}"
    if (target is None) == (name is None):
        raise ConfigError(f"{key}: give either name (registered: {', '.join(registered())}) or _target_")
    cls = _import(target, key) if target else _registered(name, key)
    if not hasattr(cls, "Config"):
        chosen = f"_target_={target}" if target else f"name={name}"
        raise ConfigError(f"{key}.{chosen} is no encoder: it has no Config (see docs/encoders.md)")
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls.Config), options))
    except OmegaConfBaseException as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"{key}: {first} (the encoder's keys are {_keys(cls)})") from error
    with naming(component):
        check_keys("encoder", config)
        encoder: Encoder = cls(config)
    if not hasattr(encoder, "attach"):
        raise ConfigError(f'{key}: {cls.__name__} does not say where its rows enter: attach = ("llm.embed",)')
    return encoder


@contextlib.contextmanager
def naming(component: str) -> Iterator[None]:
    """Say `model.encoders.<component>.<key>` in an error of an encoder that says `encoder.<key>`."""
    try:
        yield
    except (ConfigError, SampleError) as error:
        raise named(error, component) from error


def named(error: ConfigError | SampleError, component: str) -> ConfigError | SampleError:
    """Return an encoder's error with the encoder's own keys in it."""
    section = f"encoders.{component}"
    message = _OWN_KEY.sub(f"model.{section}.", str(error))
    kind = ConfigError if isinstance(error, ConfigError) else SampleError
    return kind(message if section in message else f"model.{section}: {message}")


def registered() -> list[str]:
    """Return the names of all encoders that installed packages register."""
    return sorted(point.name for point in installed(GROUP))


def _registered(name: str, key: str) -> Any:
    for point in installed(GROUP):
        if point.name == name:
            return point.load()
    known = ", ".join(registered()) or "none"
    raise ConfigError(
        f"{key}.name={name}: no encoder of this name is registered (known: {known}). Install the package "
        f"that declares it under the entry point {GROUP}, or name the class with _target_."
    )


def _import(target: str, key: str) -> Any:
    module, _, name = target.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}._target_={target}: cannot be imported: {error}") from error


def _keys(cls: Any) -> str:
    return ", ".join(cls.Config.__dataclass_fields__)
