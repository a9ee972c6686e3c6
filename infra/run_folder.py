"""A run is a folder: its names, and writing into it so that a crash never leaves half a file.

`metrics.jsonl`, `samples.jsonl` and `slowest.jsonl` hold one JSON object a line. Floats are written with
Python's repr, so they read back bitwise. JSON has no NaN or infinity: they are written as the strings "NaN",
"Infinity" and "-Infinity", which `float()` turns back into the number.
"""

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Self

STEP_KEYS = ("progress/step", "step")
logger = logging.getLogger(__name__)

TAIL_BYTES = 2**22  # of a metrics.jsonl: some thousand steps
NOT_FINITE = ("NaN", "Infinity", "-Infinity")


@dataclass(frozen=True)
class RunFolder:
    """The files of one run, by name. Constructing it touches nothing; `create` makes the folders."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> Self:
        """Make the folder and its `checkpoints/`; an existing one is kept as it is."""
        folder = cls(Path(path).absolute())
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def config(self) -> Path:
        """The resolved configuration, YAML."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One line a step, the source of truth of every tracker."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """One line a step: which samples it trained on."""
        return self.path / "samples.jsonl"

    @property
    def slowest(self) -> Path:
        """One line a step: the sample that was planned to take longest."""
        return self.path / "slowest.jsonl"

    @property
    def summary(self) -> Path:
        """The final numbers of the run, JSON."""
        return self.path / "summary.json"

    @property
    def profile(self) -> Path:
        """The folder of traces: `profile.steps` says of which steps."""
        return self.path / "profile"

    @property
    def errors(self) -> Path:
        """The folder of tracebacks: `rank-N.txt` holds those of rank N, with their times."""
        return self.path / "errors"

    @property
    def timelines(self) -> Path:
        """The folder of recorded timelines, with a folder for each recorded step."""
        return self.path / "timelines"

    @property
    def weights(self) -> Path:
        """Which files of published weights the run began with, JSON."""
        return self.path / "weights.json"

    @property
    def hashes(self) -> Path:
        """The folder of their hashes."""
        return self.path / "weights"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def last_checkpoint(self) -> Path:
        """Where the checkpoint lies that was there last, one line."""
        return self.path / "last_checkpoint"


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` atomically: a reader, even after a crash, sees the old or the new file."""
    with replacing(path) as file:
        file.write(text)


def write_json(path: Path, obj: object) -> None:
    """Replace `path` by `obj` as indented JSON, atomically."""
    write_text(path, json.dumps(_encode(obj), indent=2, allow_nan=False) + "\n")


def line_of(obj: object) -> str:
    """Return `obj` as one JSON line."""
    return json.dumps(_encode(obj), allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The records of a metrics.jsonl, non-finite values as floats again. A missing file has none; lines that
    cannot be read are left out, with a warning unless it is the last one, which a crash cuts short.
    """
    if not path.exists():
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        return [_decoded(record) for _, record in _whole_lines(file, path)]


def tail_metrics(path: Path) -> list[dict[str, float]]:
    """The last records of a metrics.jsonl, those of its last 4 MiB: however long a run is, it takes no longer
    to begin and to end. Otherwise as `read_metrics`.
    """
    if not path.exists():
        return []
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - TAIL_BYTES)
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    return [_decoded(record) for _, record in _whole_lines(lines[bool(start) :], path)]


def read_summary(path: Path) -> dict[str, Any]:
    """What a summary.json holds, its numbers that are not finite as floats again."""
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {key: float(v) if v in NOT_FINITE else v for key, v in values.items()}


def truncate_after(path: Path, step: int) -> None:
    """Drop from a JSONL file, atomically, the lines of steps above `step`, and those that
    cannot be read: a cut-short last line, and with a warning any other.

    A resumed run calls it with the checkpoint's step before it appends. A line's step is its "progress/step"
    (metrics) or "step" (the others). A missing file is left missing.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as old, replacing(path) as new:
        for line, record in _whole_lines(old, path):
            if step_of(record) <= step:
                new.write(line.rstrip("\n") + "\n")


def set_aside(path: Path) -> Path | None:
    """Rename a file or folder, if it exists, to the first free of `<name>.1`, `<name>.2`, ...: return it."""
    if not path.exists():
        return None
    number = 1
    while (free := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(free)
    return free


@contextmanager
def replacing(path: Path, mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any]]:
    """A file of text or bytes to write: its content replaces `path` when the block ends, and vanishes when it
    raises.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open(mode, encoding="utf-8" if mode == "w" else None) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    # The rename is durable only once the folder itself is on disk.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def step_of(record: Mapping[str, Any]) -> float:
    """The step that a line of a JSONL file is of; infinity if it says none."""
    return float(next((record[key] for key in STEP_KEYS if key in record), math.inf))


def _whole_lines(lines: Iterable[str], path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line of the file `path` with the object it holds, without those that hold none: nothing that was
    recorded of a run may keep it from going on.
    """
    bad: list[int] = []
    number = 0
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            bad.append(number)
            continue
        yield line, record
    if bad and bad != [number]:
        logger.warning("%s: %d lines cannot be read and are left out", path, len(bad))


def _decoded(record: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(v) if v in NOT_FINITE else v for key, v in record.items()}


def _encode(obj: Any) -> Any:
    if isinstance(obj, float) and not math.isfinite(obj):
        return "NaN" if math.isnan(obj) else "Infinity" if obj > 0 else "-Infinity"
    if isinstance(obj, Mapping):
        return {key: _encode(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [_encode(value) for value in obj]
    return obj
