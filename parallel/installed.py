"""What installed packages register: entry points by their group, read once for each path of imports."""

import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points


def installed(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group that packages on `sys.path` register. None is imported."""
    return _on(group, tuple(sys.path))


@lru_cache(maxsize=64)
def _on(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Reading the metadata of all packages takes milliseconds each time."""
    return tuple(entry_points(group=group))
