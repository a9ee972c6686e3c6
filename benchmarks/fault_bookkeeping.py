"""Faults done to what a run writes about itself, and to what shows it.

Each function does one to a trial. Its docstring says what, and after "Must:" what must come of it.
"""

import json
import os
import shutil
from pathlib import Path

from fault_reference import check
from fault_runs import SAVE_EVERY, STEPS, Trial

from infra.checkpoint import MANIFEST, RUN, _hash, complete, folder_of
from infra.run_folder import RunFolder

FAILED, MISTAKE = 1, 2


def blank_metrics_lines(trial: Trial) -> None:
    """Blank lines and garbage stand in metrics.jsonl. Must: left out with a warning; goes on, exact."""
    _lose_last_save(trial)
    lines = trial.run.metrics.read_text().splitlines(keepends=True)
    at = trial.rng.randrange(1, 40)
    trial.run.metrics.write_text("".join([*lines[:at], "\n", '{"cut\n', *lines[at:]]))
    trial.train()
    trial.ends_with(0)
    trial.says("lines cannot be read and are left out")
    trial.is_exact()


def slowest_gone(trial: Trial) -> None:
    """slowest.jsonl is removed under the run. Must: nothing; exact."""
    _reach_step(trial)
    trial.run.slowest.unlink()
    trial.ends_with(0)
    trial.is_exact()


def removed_run_folder(trial: Trial) -> None:
    """The whole run folder is removed under the run. Must: named at the next save, exit code 1."""
    _reach_step(trial)
    shutil.rmtree(trial.run.path)
    trial.ends_with(FAILED)
    trial.says("was removed or replaced while the run writes to it")


def removed_run_id(trial: Trial) -> None:
    """run_id is removed from the checkpoints under the run. Must: nothing is lost: later saves are good."""
    _reach_step(trial)
    (trial.run.checkpoints / RUN).unlink()
    trial.ends_with(0)
    trial.is_exact()
    check((trial.run.checkpoints / RUN).exists(), "run_id was not written again")


def removed_checkpoints(trial: Trial) -> None:
    """The folder of checkpoints is removed under the run. Must: later saves are good; it goes on by hand."""
    _reach_step(trial, STEPS - 4 * SAVE_EVERY)
    shutil.rmtree(trial.run.checkpoints, ignore_errors=True)
    trial.ends_with(0)
    trial.is_exact()


def other_run_id(trial: Trial) -> None:
    """The checkpoints are said to be another run's. Must: refused by name; with its own id it goes on."""
    _lose_last_save(trial)
    path = trial.run.checkpoints / RUN
    own = path.read_text()
    path.write_text("0123456789abcdef")
    trial.train()
    trial.ends_with(MISTAKE)
    trial.says("run_id says 0123456789abcdef")
    path.write_text(own)
    trial.train()
    trial.ends_with(0)
    trial.is_exact()


def two_runs_on_one_folder(trial: Trial) -> None:
    """Two new runs begin at once with one train.checkpoint_dir. Must: one trains to its end, as if alone;
    the other is refused by name.
    """
    kept, other = trial.folder / "kept", trial.folder / "other"
    trial.train(f"train.checkpoint_dir={kept}")
    trial.train(f"train.checkpoint_dir={kept}", f"run.dir={other}")
    codes = trial.end()
    check(sorted(codes) in ([0, 1], [0, 2]), f"exit codes {codes}")
    trial.says("another run")
    ran = trial.run if codes[0] == 0 else RunFolder(other)
    check(complete_in(kept)[-1:] == [STEPS], f"checkpoints {complete_in(kept)}")
    check(ran.samples.read_text() == trial.reference.samples, "other samples")


def chained_paths(trial: Trial) -> None:
    """The folder of checkpoints has :: in its name, and its namesake stands beside it. Must: exact, in a
    folder of its own.
    """
    kept = trial.folder / "a::kept"
    trial.train(f'train.checkpoint_dir="{kept}"')
    trial.ends_with(0)
    check(complete_in(kept)[-1:] == [STEPS], f"{sorted(trial.folder.iterdir())}")


def closed_pipe(trial: Trial) -> None:
    """Whoever reads what the run prints goes away. Must: exact; the folder says that it is dropped."""
    read, write = os.pipe()
    trial.train(out=write)
    os.close(write)
    trial.wait_until(lambda: trial.rows() >= SAVE_EVERY, "a step")
    os.close(read)
    trial.ends_with(0)
    trial.is_exact()
    check("Broken pipe" in (trial.run.errors / "screen.txt").read_text(), "nothing says so")


def full_log(trial: Trial) -> None:
    """The disk of the log is full (/dev/full). Must: exact; the folder says so."""
    with open("/dev/full", "wb") as full:
        trial.train(out=full.fileno())
    trial.ends_with(0)
    trial.is_exact()
    check("No space left" in (trial.run.errors / "screen.txt").read_text(), "nothing says so")


def manifest_without_files(trial: Trial) -> None:
    """The newest manifest lacks a key, with a hash that is right. Must: passed over with a warning; exact."""
    path = trial.copy_reference() / MANIFEST
    body = json.loads(path.read_text())
    key = trial.rng.choice(["files", "index", "run", "step"])
    del body["hash"], body[key]
    path.write_text(json.dumps({"hash": _hash(body), **body}))
    trial.moment = key
    trial.train()
    trial.ends_with(0)
    trial.says(f"warning: {folder_of(STEPS)}", f"has no {key}")
    trial.is_exact()


def garbage_records(trial: Trial) -> None:
    """samples.jsonl and slowest.jsonl get lines of garbage before a resume. Must: left out; exact."""
    _lose_last_save(trial)
    for path in (trial.run.samples, trial.run.slowest):
        with path.open("a") as file:
            file.write('[1]\n\0\0\n{"step"\n')
    trial.train()
    trial.ends_with(0)
    trial.is_exact()


def complete_in(path: Path) -> list[int]:
    """The steps of the checkpoints in a folder."""
    from dataloader.storage import Storage

    return complete(Storage.at(path))


def _reach_step(trial: Trial, last: int = STEPS - 3 * SAVE_EVERY) -> None:
    """Start a run, and wait for a step that is drawn."""
    trial.train()
    step = trial.rng.randint(SAVE_EVERY + 1, last)
    trial.wait_until(lambda: trial.rows() >= step, f"step {step}")
    trial.moment = f"after step {step}"


def _lose_last_save(trial: Trial) -> None:
    """Have the reference as if its job had been lost before its last save, to go on from the one before."""
    shutil.rmtree(trial.copy_reference())


KINDS = (
    blank_metrics_lines,
    slowest_gone,
    removed_run_folder,
    removed_run_id,
    removed_checkpoints,
    other_run_id,
    two_runs_on_one_folder,
    chained_paths,
    closed_pipe,
    full_log,
    manifest_without_files,
    garbage_records,
)
