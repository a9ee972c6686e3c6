"""Checkpoints that are whole or not there.

All ranks write their files into `step_N.partial`. Only when every rank has succeeded does the first one
write the manifest, with the size of every file, and rename the folder: the rename is the commit. A save that
is cut short, by a signal or a full disk, leaves the last good checkpoint untouched and is swept away later.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

MANIFEST = "checkpoint.json"
_PREFIX = "step_"
_PARTIAL = ".partial"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which file, why and what is still good."""


def save_checkpoint(
    root: Path,
    step: int,
    write: Callable[[Path], None],
    describe: Mapping[str, Any],
    keep: int,
    group: dist.ProcessGroup,
) -> Path:
    """Write the checkpoint of `step` and keep the newest `keep`. Every rank of the CPU `group` calls it.

    `write` saves this rank's state to the file it is given; `describe` goes into the manifest.

    Raises:
        CheckpointError: on every rank, if the file of any rank could not be written.
    """
    rank = group.rank()
    final = root / f"{_PREFIX}{step:08d}"
    partial = final.with_name(final.name + _PARTIAL)
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    problem = _attempt(lambda: partial.mkdir(parents=True, exist_ok=True)) if rank == 0 else None
    problem = _first_problem(problem, group)
    if problem is None:
        file = partial / _file_of(rank)
        problem = _first_problem(_attempt(lambda: _write_durably(file, write)), group)
    if problem is None:
        problem = _first_problem(
            _attempt(lambda: _commit(partial, final, step, describe, group.size())) if rank == 0 else None,
            group,
        )
    if problem is not None:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        good = latest_checkpoint(root)
        raise CheckpointError(
            f"the checkpoint of step {step} could not be saved in {root}: {problem}. "
            f"The last good one is {good.name if good else 'none'}; free space and resume."
        )
    if rank == 0:
        for old in [*_complete(root)[:-keep], *root.glob(f"*{_PARTIAL}")]:
            shutil.rmtree(old, ignore_errors=True)
    return final


def latest_checkpoint(root: Path) -> Path | None:
    """Return the newest complete checkpoint under `root`, None if there is none."""
    complete = _complete(root)
    return complete[-1] if complete else None


def read_manifest(path: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest. Raises CheckpointError if a file is missing or cut short."""
    manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    for name, size in manifest["files"].items():
        file = path / name
        actual = file.stat().st_size if file.exists() else None
        if actual != size:
            found = "is missing" if actual is None else f"has {actual} bytes"
            raise CheckpointError(
                f"{file} {found}, the manifest says {size}: the checkpoint is damaged; "
                f"restore the file, or remove {path.name} to continue from an older one"
            )
    return manifest


def _file_of(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _complete(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    found = (p for p in root.iterdir() if p.name.startswith(_PREFIX) and not p.name.endswith(_PARTIAL))
    return sorted(p for p in found if (p / MANIFEST).is_file())


def _attempt(action: Callable[[], object]) -> str | None:
    try:
        action()
    except Exception as error:
        cause = _cause(error)
        return f"{type(cause).__name__}: {cause}"
    return None


def _cause(error: BaseException) -> BaseException:
    """The operating system's error behind others: torch's writer hides a full disk behind a failed check."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, OSError):
            return at
        at = at.__cause__ or at.__context__
    return error


def _first_problem(problem: str | None, group: dist.ProcessGroup) -> str | None:
    """Tell every rank of the first problem that any rank had; ranks also meet here."""
    if group.size() == 1:
        return problem
    problems: list[str | None] = [None] * group.size()
    dist.all_gather_object(problems, problem, group=group)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None), None)


def _write_durably(file: Path, write: Callable[[Path], None]) -> None:
    write(file)
    _sync(file)


def _commit(partial: Path, final: Path, step: int, describe: Mapping[str, Any], ranks: int) -> None:
    files = {p.name: p.stat().st_size for p in sorted(partial.iterdir())}
    expected = {_file_of(rank) for rank in range(ranks)}
    if set(files) != expected:
        odd = sorted(set(files) ^ expected)[:3]
        raise CheckpointError(f"{partial} should hold the files of {ranks} ranks: {', '.join(odd)} differ")
    manifest = partial / MANIFEST
    manifest.write_text(json.dumps({"step": step, "files": files, **describe}, indent=2))
    _sync(manifest)
    _sync(partial)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
