"""What docs/extending.md prints: files by their path, and commands in order."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/extending.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PATH = re.compile(r"^# ([\w/]+\.\w+)$", re.MULTILINE)


@dataclass(frozen=True)
class Walk:
    """Files by path, and command lines as a shell would split them."""

    files: dict[str, str]
    commands: list[list[str]]


def read_walk(page: str) -> Walk:
    """Take a page apart: each file has a comment that is its path."""
    files, commands = {}, []
    for language, text in _BLOCK.findall(page):
        if language == "bash":
            commands += [shlex.split(line) for line in text.replace("\\\n", " ").splitlines()]
        else:
            path = _PATH.search(text)
            assert path, f"no path in {text[:80]}"
            files[path[1]] = text
    return Walk(files, commands)


def write_files(walk: Walk, folder: Path) -> None:
    """Write the files of a walk into a folder."""
    for name, text in walk.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
