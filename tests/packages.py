"""Packages that tests install for themselves: by pip into a folder, or what pip would write."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest


def pip_install(source: Path, folder: Path) -> Path:
    """Install the package in `source` into a folder, as pip would into an environment."""
    copy = shutil.copytree(source, folder / "source")  # a build leaves files beside the sources
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if _setuptools_version() >= 77:  # else pip fetches one
        command.append("--no-build-isolation")
    done = subprocess.run(
        [*command, "--target", str(folder / "packages"), str(copy)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder / "packages"


def _setuptools_version() -> int:
    try:
        return int(version("setuptools").partition(".")[0])
    except PackageNotFoundError:
        return 0


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
