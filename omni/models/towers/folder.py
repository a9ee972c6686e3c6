"""Which tower of transformers a folder means: its class, its configuration, and its weights by their names.

`config.json` is of a tower alone, or of a whole model that has one. Nothing of the folder is run as code.
"""

import copy
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from dataloader.storage import Storage
from omni.keys import ConfigError
from omni.open_models.family import Family
from omni.open_models.folder import CONFIG, Folder
from omni.open_models.rules import Rule

GRIDS = ("grid_thw", "spatial_shapes")
"""What the forward of a tower calls the grids of its items: (frames, rows, columns), or (rows, columns)."""
BATCHES = ("pixel_values", "input_features")
"""What the forward of a tower calls a batch of items of one shape."""
NO_FOLDER = "encoder.folder is not set: give the folder of a tower, or of a model with one"
_PARTS = ("vision_config", "audio_config")
_LAYERS = ("num_hidden_layers", "depth", "encoder_layers")
_HEADS = ("num_attention_heads", "num_heads", "encoder_attention_heads")
_WIDTHS = ("hidden_size", "embed_dim", "d_model")


@dataclass(frozen=True)
class Tower:
    """A class of transformers with the configuration that a folder gives it. `key` names it in messages.

    `model` is the configuration of the whole model that it is of, None for a tower alone; with `connected` it
    is built with all that the model has between it and its LLM.
    """

    folder: str
    key: str
    kind: Any
    config: Any
    model: Any = None
    connected: bool = False

    @property
    def layers(self) -> int:
        """Its layers."""
        return self._size(_LAYERS)

    @property
    def heads(self) -> int:
        """Heads of a layer's attention."""
        return self._size(_HEADS)

    @property
    def hidden(self) -> int:
        """Width of its stream."""
        return self._size(_WIDTHS)

    def _size(self, names: tuple[str, ...]) -> int:
        for name in names:
            if isinstance(found := getattr(self.config, name, None), int) and found > 0:
                return found
        raise self.refused(f"{CONFIG} says none of {', '.join(names)}, by which its work is planned")

    @property
    def takes(self) -> tuple[str, ...]:
        """Names of what its forward takes."""
        return takes(self.kind)

    def refused(self, why: str) -> ConfigError:
        """Return the error for a tower that cannot be run as it is."""
        return ConfigError(
            f"{self.key}: {self.kind.__name__} is not taken as it is: {why}. Choose another tower, or write "
            f"an encoder of your own (docs/encoders.md)"
        )

    def build(self, dtype: torch.dtype, *, draw: bool) -> torch.nn.Module:
        """Build it in `dtype` on the current device, with weights that transformers draws or with none."""
        from transformers.initialization import no_init_weights

        if not draw:
            with no_init_weights():
                return self.build(dtype, draw=True)
        kind, config = (self.of_model, self.model) if self.connected else (self.kind, self.config)
        own = copy.deepcopy(config)  # as it writes into what it is given
        if self.connected:
            _shorten(own.text_config)
        made: torch.nn.Module = kind._from_config(own, dtype=dtype, attn_implementation="eager")
        if self.connected:
            del made.language_model
        return made

    @property
    def of_model(self) -> Any:
        """The class of the whole model."""
        from transformers.models.auto.modeling_auto import MODEL_MAPPING

        return MODEL_MAPPING.get(type(self.model), None)


def _shorten(text: Any) -> None:
    """Leave one layer and few ids of an LLM that is built and not used."""
    text.num_hidden_layers, text.vocab_size = 1, 8
    for key in ("layer_types", "pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(text, key, None)
        setattr(text, key, value[:1] if key == "layer_types" and value else None)


def freeze(module: torch.nn.Module, names: Collection[str]) -> None:
    """Let parameters of these names learn nothing."""
    for name, own in module.named_parameters():
        if name in names:
            own.requires_grad_(False)


def takes(kind: Any) -> tuple[str, ...]:
    """Names of what the forward of a tower takes."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def open_tower(folder: str, wanted: str | None, connected: bool = False) -> Tower:
    """Find the tower of a folder: the class `wanted`, or the one that its `config.json` means; `connected`
    for one with its model's connector.

    Raises:
        ConfigError: without `config.json` or transformers, for a model that it does not know, for none or
            several towers, for one with dropout, and for a folder that is to have a connector and has none.
    """
    key = f"encoder.folder={folder}"
    whole = _config(folder, key)
    own = next((part for name in _PARTS if (part := getattr(whole, name, None)) is not None), whole)
    module = import_module(type(own).__module__.replace(".configuration_", ".modeling_"))
    found = _towers(module, own)
    if wanted is not None:
        if wanted not in found:
            raise ConfigError(
                f"encoder.tower={wanted}: {module.__name__} has no such tower for the {CONFIG} of {folder} "
                f"(it has {', '.join(found) or 'none'}): leave the key out, or name one of these"
            )
        found = {wanted: found[wanted]}
    if len(found) != 1:
        raise ConfigError(
            f"{key}: {CONFIG} (model_type={own.model_type!r}) means "
            + (f"{', '.join(found)}: name one with encoder.tower" if found else _no_tower(module))
        )
    ((_, kind),) = found.items()
    for name, value in own.to_dict().items():
        if "drop" in name and not name.startswith(("decoder", "classifier")) and value:
            raise ConfigError(
                f"{key}: {CONFIG} says {name}={value}, and towers are trained without dropout: set it to 0 "
                f"there"
            )
    own.vision_use_head = False  # it pools rows into one, and learns nothing of them
    tower = Tower(folder, key, kind, own, None if own is whole else whole, connected)
    if connected and not hasattr(tower.of_model, "get_image_features"):
        raise ConfigError(
            f"encoder.connector=true: {CONFIG} of {folder} (model_type={whole.model_type!r}) is of no model "
            f"of transformers that makes rows of images: leave the key out, for a projector of our own"
        )
    return tower


def _no_tower(module: Any) -> str:
    return (
        f"no tower: no class of {module.__name__} takes a grid ({' or '.join(GRIDS)}) or a batch "
        f"({' or '.join(BATCHES)}). Choose another folder, or write an encoder of your own (docs/encoders.md)"
    )


def _config(folder: str, key: str) -> Any:
    if not (Path(folder) / CONFIG).is_file():
        raise ConfigError(
            f"{key}: there is no {CONFIG} in it. Give the folder of a tower, or of a model that has one"
        )
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{key}: a tower is transformers' own, which is not installed: pip install 'omni-train[open]'"
        ) from error
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what a file of others holds may raise anything
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"{key}: transformers cannot read its {CONFIG} ({type(error).__name__}: {first}). Take the file "
            f"that the weights came with, or a newer transformers"
        ) from error


def _towers(module: Any, config: Any) -> dict[str, Any]:
    """The towers that a file of transformers has for a configuration, by name."""
    from transformers import PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    found = {
        name: kind
        for name, kind in vars(module).items()
        if inspect.isclass(kind)
        and issubclass(kind, PreTrainedModel)
        and kind.__module__ == module.__name__
        and kind.config_class is type(config)
        and {*takes(kind)} & {*GRIDS, *BATCHES}
        and not {"input_ids", "decoder_input_ids"} & {*takes(kind)}
        and "For" not in name
    }
    usual = getattr(MODEL_MAPPING.get(type(config), None), "__name__", None)
    return {str(usual): found[usual]} if usual in found else found


def copied(shapes: Mapping[str, tuple[int, ...]], under: str) -> tuple[Rule, ...]:
    """Rules of parameters of these shapes, each copied from the tensor of its name; ours are called `under`
    and that.
    """
    return tuple(Rule(under + name, (name,), shape[:1], shape[1:] or None) for name, shape in shapes.items())


def weights_of(tower: Tower, rules: Sequence[Rule]) -> Folder:
    """Return the folder's weights of a tower by `rules`, which name tensors as the tower alone does: in the
    folder of a whole model they have a prefix.

    Raises:
        ConfigError: for a folder without weights, or without all those of the tower.
    """
    storage = Storage.at(tower.folder)
    bare = Folder(tower.folder, storage, Family(_no_keys, lambda keys: ()), {}, key="encoder.folder")
    names = [name for rule in rules for name in rule.theirs]
    ends = [name.removesuffix(names[0]) for name in bare.tensors if name.endswith(names[0])]
    lacks = {prefix: [name for name in names if prefix + name not in bare.tensors] for prefix in ends}
    prefix = min(lacks, key=lambda prefix: len(lacks[prefix]), default="")
    if lacks.get(prefix, [names[0]]):
        told = lacks.get(prefix, names)
        raise ConfigError(
            f"{tower.key}: its files lack {', '.join(told[:5])} of {tower.kind.__name__}"
            f"{f' under {prefix}' if prefix else ''}: fetch them, or set encoder.weights=false to draw them"
        )
    own = tuple(replace(rule, theirs=tuple(prefix + name for name in rule.theirs)) for rule in rules)
    return Folder(tower.folder, storage, Family(_no_keys, lambda keys: own, ("*",)), {}, key="encoder.folder")


def _no_keys(said: object) -> dict[str, Any]:
    """A tower means no keys of `model.llm`."""
    return {}


def state_beside_weights(module: torch.nn.Module) -> list[str]:
    """Names of what a tower keeps that is no weight of at least one dimension, which nothing here saves."""
    weights = dict(module.named_parameters())
    beside = [name for name in module.state_dict() if name not in weights]
    return beside + [name for name, own in weights.items() if not own.dim() or not math.prod(own.shape)]
