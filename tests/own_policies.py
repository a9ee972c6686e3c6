"""Our own policies as pyproject.toml registers them, whatever is installed."""

import tomllib
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path

from parallel.policy import Policy, PolicyKind

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


@cache
def entry_points_of(pyproject: Path, group: str) -> dict[str, str]:
    """What each name of a group of entry points stands for, in a project's own words."""
    table: dict[str, str] = tomllib.loads(pyproject.read_text())["project"]["entry-points"][group]
    return table


def own(kind: type[PolicyKind], pyproject: Path = PYPROJECT) -> dict[str, PolicyKind]:
    """Our policies of a kind by name, or those of another project."""
    table: dict[str, Policy] = {
        name: EntryPoint(name, value, kind.group).load()
        for name, value in entry_points_of(pyproject, kind.group).items()
    }
    assert all(isinstance(policy, kind) for policy in table.values())
    return table  # type: ignore[return-value]
