"""What plans take and the engine cannot compute yet: refused where modules are made, before ranks start."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from omni.config import Config, ConfigError
from omni.models.layer_sizes import TransformerEncoderConfig
from omni.models.registry import make_encoder
from ops.names import LOWER


@dataclass(frozen=True)
class Missing:
    """A key, which of its values the engine lacks what for, and the value to train with."""

    key: str
    lacks: Callable[[Any], bool]
    what: str
    instead: str


def _is_set(value: Any) -> bool:
    return bool(value)


OF_RUN = (
    Missing("train.precision", LOWER.__contains__, "matrix products of that precision", "bf16"),
    Missing("model.llm.mla.kv_rank", _is_set, "latent attention", "0, and all of model.llm.mla"),
    Missing("model.llm.mtp", _is_set, "prediction of further tokens", "0"),
)
OF_ENCODER = (Missing("window", _is_set, "attention with windows", "null"),)


def check_trainable(config: Config) -> None:
    """Refuse a configuration that states work for which the engine has no module.

    Raises:
        ConfigError: naming key, value and remedy.
    """
    for missing, key, value in (*_of_run(config), *_of_encoders(config)):
        if missing.lacks(value):
            raise ConfigError(
                f"{key}={str(value).lower()}: the engine has no {missing.what} yet; omni plan takes it. To "
                f"train, set {key}={missing.instead}"
            )


def _of_run(config: Config) -> Iterator[tuple[Missing, str, Any]]:
    for missing in OF_RUN:
        yield missing, missing.key, attrgetter(missing.key)(config)


def _of_encoders(config: Config) -> Iterator[tuple[Missing, str, Any]]:
    """Keys of encoders that are transformers of ours; others know what their modules compute."""
    for name, options in config.model.encoders.items():
        own = getattr(make_encoder(name, options), "config", None)
        if isinstance(own, TransformerEncoderConfig):
            for missing in OF_ENCODER:
                yield missing, f"model.encoders.{name}.{missing.key}", getattr(own, missing.key)
