"""Datasets that a command names, and what an index of them left out."""

import json
from collections import Counter
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


def left_out_of(folder: Path) -> list[tuple[str, int, str]]:
    """What was left out when a source was indexed: each reason, how often, and the first of it by file and
    key. The most frequent come first; nothing of a dataset of its own.
    """
    from dataloader.sources.tables import LEFT_OUT

    if not (folder / LEFT_OUT).exists():
        return []
    counts, firsts = Counter[str](), dict[str, str]()
    with open(folder / LEFT_OUT, encoding="utf-8") as lines:
        for of in map(json.loads, lines):
            counts[of["reason"]] += 1
            firsts.setdefault(of["reason"], f"{of['file']} {of['key']}: {of['detail']}")
    return [(reason, count, firsts[reason]) for reason, count in counts.most_common()]
