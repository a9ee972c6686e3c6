"""Packages that tests install for themselves: what pip writes, without pip."""

from collections.abc import Mapping
from pathlib import Path

import pytest


def write_package(folder: Path, module: str, source: str, points: Mapping[str, str]) -> Path:
    """Write a module and the metadata of a package that has it; `points` are lines by entry-point group."""
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(source)
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir()
    name = module.replace("_", "-")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = (f"[{group}]\n{text}\n" for group, text in points.items())
    (metadata / "entry_points.txt").write_text("\n".join(lines).replace('"', ""))
    return folder


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str, points: Mapping[str, str]
) -> None:
    """Install such a package for the length of a test."""
    folder = write_package(folder / module, module, source, points)
    monkeypatch.syspath_prepend(str(folder))
