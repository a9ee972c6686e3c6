"""What the keys of a configuration may be: bounds and rules that stand beside the keys, and who checks them.

    @dataclass
    class ViTConfig:
        patch: int = at_least(1, 14)
        channels: int = one_of((1, 3), 3)
        rules: ClassVar[Rules] = (
            Rule("max_tokens", lambda own: own.max_tokens >= own.merge**2, "must hold a row of {merge}²"),
        )

`check_keys("model.encoders.image", config)` refuses a value outside them, naming key, value and remedy.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from operator import attrgetter
from typing import Any

from omegaconf import MISSING


class ConfigError(ValueError):
    """A mistake in the configuration: the message names the key, the value and the remedy."""


def at_least(least: float, default: Any = MISSING) -> Any:
    """Declare a key whose value is null or a finite number of at least `least`; of a mapping, each value."""
    return field(default=default, metadata={"least": least})


def share(default: Any = MISSING) -> Any:
    """Declare a key whose value is a share, above 0 and at most 1; of a mapping, each value."""
    return field(default=default, metadata={"least": 1e-6, "most": 1})


def one_of(known: Sequence[Any], default: Any = MISSING) -> Any:
    """Declare a key whose value is one of those `known`."""
    return field(default=default, metadata={"known": tuple(known)})


@dataclass(frozen=True)
class Rule:
    """A rule of a section: of which `key` it is, whether it `holds`, and what else the value must be. The
    remedy is formatted with the section's keys.
    """

    key: str
    holds: Callable[[Any], bool]
    remedy: str


Rules = tuple[Rule, ...]


def check_keys(section: str, config: Any) -> None:
    """Refuse a section of a configuration, "" for all of it, with a value that its keys do not allow.

    Raises:
        ConfigError: naming the first such key, its value and the remedy.
    """
    prefix = f"{section}." if section else ""
    for key in fields(config):
        _check_value(prefix + key.name, getattr(config, key.name), key.metadata)
    for rule in getattr(type(config), "rules", ()):
        if not rule.holds(config):
            value = attrgetter(rule.key)(config)
            raise ConfigError(f"{prefix}{rule.key}={value}: {rule.remedy.format(**vars(config))}")


def _check_value(key: str, value: Any, bounds: Mapping[str, Any]) -> None:
    if is_dataclass(value):
        check_keys(key, value)
    elif isinstance(value, dict):
        for name, entry in value.items():
            _check_value(f"{key}.{name}", entry, bounds)
    elif isinstance(value, list) and any(map(is_dataclass, value)):
        for number, entry in enumerate(value):
            check_keys(f"{key}[{number}]", entry)
    elif "least" in bounds and value is not None:
        _check_number(key, value, bounds["least"], bounds.get("most", math.inf))
    elif "known" in bounds and value not in bounds["known"]:
        raise ConfigError(f"{key}={value}: choose one of {', '.join(map(str, bounds['known']))}")


def _check_number(key: str, value: float, least: float, most: float) -> None:
    if not math.isfinite(value):
        raise ConfigError(f"{key}={value}: must be a finite number")
    if value < least:
        raise ConfigError(f"{key}={value}: must be at least {least:g}")
    if value > most:
        raise ConfigError(f"{key}={value}: is a share: at most {most:g}")
