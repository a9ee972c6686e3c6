"""Faults that are done to the newest checkpoint of a run that goes on afterwards.

Each function does one to a trial. Its docstring says what, and after "Must:" what must come of it. The run
is a copy of the reference, as if its job had been lost after its last save.
"""

import pickle
import shutil
from pathlib import Path
from typing import Any

from fault_reference import check
from fault_runs import SAVE_EVERY, STEPS, Trial

from infra.checkpoint import DAMAGED, MANIFEST, file_of, folder_of

FAILED, MISTAKE = 1, 2
GOOD = STEPS - SAVE_EVERY  # the checkpoint before the newest


class Trap:
    """Unpickling it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def torn(trial: Trial) -> None:
    """A file is cut short. Must: passed over with a warning; exact from the checkpoint before."""
    _, path = _random_file(trial)
    content = path.read_bytes()
    path.write_bytes(content[: trial.rng.randrange(len(content))])
    _passed_over(trial)


def missing(trial: Trial) -> None:
    """A rank's file is missing. Must: passed over with a warning; exact from the checkpoint before."""
    folder = trial.copy_reference()
    (folder / file_of(trial.rng.randrange(2))).unlink()
    _passed_over(trial)


def flipped(trial: Trial) -> None:
    """A single bit of a file is another. Must: passed over with a warning; exact from the one before."""
    _, path = _random_file(trial)
    content = bytearray(path.read_bytes())
    at = trial.rng.randrange(len(content))
    content[at] ^= 1 << trial.rng.randrange(8)
    path.write_bytes(content)
    trial.moment = f"byte {at} of {path.name}"
    _passed_over(trial)


def swapped_ranks(trial: Trial) -> None:
    """The files of the two ranks have each other's names. Must: passed over with a warning."""
    folder = trial.copy_reference()
    one, two = folder / file_of(0), folder / file_of(1)
    one.rename(folder / "aside")
    two.rename(one)
    (folder / "aside").rename(two)
    _passed_over(trial)


def swapped_steps(trial: Trial) -> None:
    """A file is that of the checkpoint before. Must: passed over with a warning; exact from that one."""
    folder, path = _random_file(trial)
    shutil.copy(folder.parent / folder_of(GOOD) / path.name, path)
    _passed_over(trial)


def foreign(trial: Trial) -> None:
    """The checkpoint is that of another run. Must: passed over with a warning; exact from the one before."""
    other = trial.folder / "other"
    trial.train("train.seed=7", f"run.dir={other}")
    trial.ends_with(0)
    folder = trial.copy_reference()
    shutil.rmtree(folder)
    shutil.copytree(other / "checkpoints" / folder.name, folder)
    _passed_over(trial)


def executable(trial: Trial) -> None:
    """A file is a pickle that does something, of the same size. Must: passed over, and nothing executed."""
    folder, path = _random_file(trial)
    trap = pickle.dumps(Trap(trial.folder / "executed"))
    path.write_bytes(trap.ljust(path.stat().st_size, b"\0"))
    _passed_over(trial)
    check(not (trial.folder / "executed").exists(), f"{path.name} in {folder.name} was executed")


def half_saved(trial: Trial) -> None:
    """A later save was cut short before its manifest. Must: no word, exact from the newest complete one."""
    folder = trial.copy_reference()
    shutil.move(folder / MANIFEST, folder / f"{MANIFEST}.tmp")
    trial.train()
    trial.ends_with(0)
    trial.says(f"continued after step {GOOD}")
    check("is damaged" not in trial.log, "a warning of damage")
    trial.is_exact()


def all_damaged(trial: Trial) -> None:
    """Every checkpoint has a flipped bit. Must: refused with exit code 1, and the next time by the launcher
    with 2; nothing is lost: with the bits as they were it ends exactly.
    """
    newest = trial.copy_reference()
    folders = (newest, newest.parent / folder_of(GOOD))
    paths = [folder / file_of(0) for folder in folders]
    for path in paths:
        _flip(path)
    for code in (FAILED, MISTAKE):
        trial.train()
        trial.ends_with(code)
        trial.says("no checkpoint in", "is good", "Restore one of them")
    for folder, path in zip(folders, paths, strict=True):
        _flip(path)
        (folder / DAMAGED).rename(folder / MANIFEST)
    trial.train()
    trial.ends_with(0)
    trial.is_exact()


def _random_file(trial: Trial) -> tuple[Path, Path]:
    """The newest checkpoint, and one of its files."""
    folder = trial.copy_reference()
    path = folder / trial.rng.choice([MANIFEST, file_of(0), file_of(1)])
    trial.moment = path.name
    return folder, path


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)


def _passed_over(trial: Trial) -> None:
    """Go on: the newest checkpoint is passed over with a warning, and the end is that of the reference."""
    trial.train()
    trial.ends_with(0)
    trial.says(f"warning: {folder_of(STEPS)}", "is damaged")
    trial.says(f"continued after step {GOOD}")
    trial.is_exact()


KINDS = (
    torn,
    missing,
    flipped,
    swapped_ranks,
    swapped_steps,
    foreign,
    executable,
    half_saved,
    all_damaged,
)
