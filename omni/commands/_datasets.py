"""Datasets that a command names."""

from pathlib import Path


def datasets_in(paths: list[str]) -> list[Path]:
    """The dataset folders among `paths`; a folder that is no dataset itself stands for those in it."""
    from dataloader.manifest import MANIFEST

    found = []
    for path in map(Path, paths):
        inside = (
            [] if (path / MANIFEST).exists() else sorted(file.parent for file in path.glob(f"*/{MANIFEST}"))
        )
        inside = [folder for folder in inside if folder.suffix not in (".partial", ".old")]
        found += inside or [path]  # opening a folder without a dataset says so
    return found
