"""How a family of published models joins the platform: the keys that its `config.json` means, and its rules.

A family is found by the `model_type` that a `config.json` names, as the entry point of an installed package:

    [project.entry-points."omni.families"]
    mymodel = "mypackage.families:MYMODEL"

No code of a model's folder is ever run. What a family does not know is refused: a key that nobody read could
mean another model.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from omni.config import ConfigError
from omni.open_models.rules import Rule
from parallel.installed import installed

GROUP = "omni.families"
_NEVER = object()
_COUNT = re.compile(r"^num_|_size$|_dim$|_heads$")  # keys that count
_MOST = 2**31
_SHOWN = 200  # characters of a value
Rules = Callable[[Mapping[str, Any]], tuple[Rule, ...]]


class Said:
    """What a `config.json` says, read key by key; `end` refuses what nobody has asked for.

    `path` is what messages call it. Errors are ConfigErrors that name key, value and remedy.
    """

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values = dict(values)
        self.path = path
        self.last: tuple[str, Any] = ("model_type", None)  # that was taken

    def take(self, key: str, default: Any = _NEVER) -> Any:
        """Return the value of a key; `default` where it is not there or null."""
        value = self.values.pop(key, None)
        self.last = key, value
        if value is not None:
            least = int(key.endswith("_heads"))
            if _COUNT.search(key) and (type(value) is not int or not least <= value < _MOST):
                raise ConfigError(
                    f"{self.path}: {key}={value!r} must be a whole number of at least {least}: take the file "
                    f"that the weights came with"
                )
            return value
        if default is _NEVER:
            raise ConfigError(f"{self.path} says no {key}: take the file that the weights came with")
        return default

    def must(self, key: str, *allowed: Any) -> None:
        """Refuse a key that has another value than those; the first is what it means to say nothing."""
        value = self.take(key, allowed[0])
        if value not in allowed:
            raise self.refused(key, value, f"the layers of this family have {allowed[0]}")

    def skip(self, *keys: str) -> None:
        """Pass over keys that do not change what is computed."""
        for key in keys:
            self.values.pop(key, None)

    def refused(self, key: str, value: Any, why: str) -> ConfigError:
        """Return the error for a value that cannot be trained."""
        return ConfigError(f"{self.path}: {key}={value!r} is not trained: {why}. Choose another model")

    def unclear(self, error: Exception) -> ConfigError:
        """Return the error for values of a kind that a family does not expect, of which it took one last."""
        key, value = self.last
        told = repr(value) if len(repr(value)) <= _SHOWN else f"{repr(value)[:_SHOWN]}…"
        return ConfigError(
            f"{self.path} says what its family cannot read ({type(error).__name__}: {error}), at or before "
            f"{key}={told}: take the file that the weights came with"
        )

    def end(self) -> None:
        """Refuse keys that nobody has taken, unless they switch something off."""
        for key, value in self.values.items():
            if value is not None and value is not False and value != [] and value != {}:
                raise ConfigError(
                    f"{self.path}: {key}={value!r} means nothing to this family, and might mean another "
                    f"model: use a family that knows it (docs/open_models.md)"
                )


@dataclass(frozen=True)
class Family:
    """`keys` takes what `config.json` says and returns keys of `model.llm`, those of `moe` as "moe.topk"; any
    that it does not return has its default. `rules` takes all keys of `model.llm` and returns the rules; so
    do `otherwise` for folders of the same models in another form, such as all experts of a layer in one
    tensor: those are taken that name most of what the folder holds. Tensors whose names match a pattern of
    `copied` (with * for anything) are no weights: they are not read, and exported as they were.

    `encoders` are keys of `model.encoders` by name, for `model=from_folder`: those of the towers that lie in
    the same folder, without the folder.
    """

    keys: Callable[[Said], dict[str, Any]]
    rules: Rules
    copied: tuple[str, ...] = ()
    otherwise: tuple[Rules, ...] = ()
    encoders: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


# Keys by which models say, of themselves or of their text, what no layer here computes.
_NOT_COMPUTED = {
    "kv_lora_rank": "latent attention, which is planned (model.llm.mla.kv_rank) and not trained",
    "hidden_size_per_layer_input": "embeddings for each layer",
    "num_kv_shared_layers": "layers that share keys and values",
    "attention_k_eq_v": "keys that are values, too",
    "global_head_dim": "heads of two sizes",
}


def family_of(said: Mapping[str, Any], path: str) -> Family:
    """Return the family that an installed package registers for the `model_type` that a `config.json` says.

    Raises:
        ConfigError: if there is none; `path` says whose it is.
    """
    points = {point.name: point for point in installed(GROUP)}
    model_type = str(said.get("model_type"))
    if model_type not in points:
        every = {**dict(said.get("text_config") or {}), **said}
        for key, what in _NOT_COMPUTED.items():
            if every.get(key):
                raise ConfigError(
                    f"{path}: model_type={model_type!r} is not trained: {key}={every[key]!r} means {what}, "
                    f"and no layer here computes that. Choose another model, or install a package that "
                    f"registers its family"
                )
        raise ConfigError(
            f"{path}: model_type={model_type!r} is no family that is known here "
            f"({', '.join(sorted(points))}): install a package that registers it under the entry point "
            f"{GROUP} (docs/open_models.md)"
        )
    family: Family = points[model_type].load()
    return family
