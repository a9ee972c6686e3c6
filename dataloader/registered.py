"""What packages register under an entry point, made by its name and keys: tokenizers, recipes of sources."""

import inspect
from collections.abc import Mapping
from typing import Any

from parallel.installed import installed


def registered(group: str) -> list[str]:
    """Return the names of all that installed packages register under an entry point."""
    return sorted({point.name for point in installed(group)})


def make(group: str, what: str, chosen: str | Mapping[str, Any]) -> Any:
    """What is registered under the entry point `group` by a name, or by a mapping of `name` and its own keys.
    `what` is what messages call it.

    Raises:
        ValueError: if none is registered by the name, it cannot be imported, or does not take the keys.
    """
    if not isinstance(chosen, str | Mapping):
        raise ValueError(f"{chosen!r} is neither a name nor a mapping of name and keys")
    keys = {"name": chosen} if isinstance(chosen, str) else dict(chosen)
    name = keys.pop("name", None)
    points = [point for point in installed(group) if point.name == name]
    if not points:
        raise ValueError(
            f"unknown {what} {name!r}: known are {', '.join(registered(group))}; a package adds its own "
            f"under the entry point {group}"
        )
    try:
        kind = points[0].load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{what} {name}: {points[0].value} cannot be imported: {error}") from error
    takes = inspect.signature(kind)
    try:
        takes.bind(**keys)
    except TypeError as error:
        raise ValueError(
            f"{what} {name}: {error} (its keys are {', '.join(takes.parameters) or 'none'}; give them as "
            f"{{name: {name}, key: value}})"
        ) from None
    return kind(**keys)
