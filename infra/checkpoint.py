"""Checkpoints that are whole or not there, and cannot lie.

All ranks write their files into `step_N`. Only when every rank has succeeded does the first one write the
manifest: that is the commit. A save that is cut short leaves a folder without one, which is no checkpoint and
is swept away later. The manifest holds the size of every file and the hash of its header, which holds the
hashes of its data (`shard_file`), the index of what lies where, and the run that it belongs to; it has a hash
of itself.
"""

import errno
import hashlib
import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

from dataloader.storage import Storage
from infra.shard_file import CheckpointError, DamagedError, Shard, ShardReader, write_shard
from parallel.control import Control

MANIFEST = "checkpoint.json"
DAMAGED = "damaged.json"  # what the manifest of a checkpoint is renamed to that was found to be damaged
RUN = "run_id"
FORMAT = 2
SAVING = "saving a checkpoint"  # among ranks, by the thread that writes
_PREFIX = "step_"
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Keep:
    """Which checkpoints are kept: the newest `last`, and those of steps that `every` divides (0: none)."""

    last: int
    every: int = 0


def folder_of(step: int) -> str:
    """The name of a checkpoint."""
    return f"{_PREFIX}{step:08d}"


def file_of(rank: int) -> str:
    """The name of a rank's file in a checkpoint."""
    return f"rank_{rank:05d}.safetensors"


def save_checkpoint(
    storage: Storage,
    run: str,
    step: int,
    shard: Shard,
    describe: Mapping[str, Any],
    keep: Keep,
    control: Control,
) -> int:
    """Save what all ranks hold after `step` as a checkpoint of `run`. Every rank calls it.

    `describe` goes into the manifest. Returns the bytes of all files.

    Raises:
        CheckpointError: on every rank, if the file of any rank could not be written.
    """
    rank, folder = control.rank, folder_of(step)
    coming = partial(control.coming, SAVING)
    problem = attempt(lambda: storage.remove(folder, MANIFEST, coming)) if rank == 0 else None
    problem = control.broadcast(SAVING, problem)
    written: list[Written] = []
    size = 0
    if problem is None:
        problem = attempt(lambda: written.append(write_file(storage, run, step, rank, shard, coming)))
        problem = first_problem(problem, control, SAVING)
        files = control.collect(SAVING, None if problem else astuple(written[0]))
        if rank == 0 and files is not None:
            if problem is None:
                every = [Written(*of) for of in files]
                size = sum(file.bytes for file in every)
                problem = attempt(lambda: commit(storage, run, step, every, describe))
            if problem is not None:
                attempt(lambda: storage.remove(folder, MANIFEST, coming))
            elif (left := attempt(lambda: _sweep(storage, step, keep, coming))) is not None:
                print(f"note: old checkpoints in {storage} could not be removed: {left}", file=sys.stderr)
        # The others wait until the first rank has swept: it says that it is coming, and they do not go on to
        # a step in which they would wait for it in vain.
        problem, size = control.broadcast(SAVING, (problem, size))
    if problem is not None:
        good, full = complete(storage), any(os.strerror(number) in problem for number in _FULL)
        raise CheckpointError(
            f"the checkpoint of step {step} could not be saved in {storage}: {problem}. The last good one is "
            f"{folder_of(good[-1]) if good else 'none'}; {'free space' if full else 'mend that'} and resume."
        )
    return size


@dataclass(frozen=True)
class Written:
    """A rank's file in a checkpoint: its bytes, the hash of its header and what it holds, in plain values."""

    bytes: int
    head_hash: str
    held: Mapping[str, Any]


def write_file(
    storage: Storage,
    run: str,
    step: int,
    rank: int,
    shard: Shard,
    going_on: Callable[[], object] = lambda: None,
) -> Written:
    """Write the file of a rank. Calls `going_on`, and raises, as `write_shard` does."""
    bound = {"run": run, "step": str(step), "rank": str(rank)}
    name = f"{folder_of(step)}/{file_of(rank)}"
    return Written(*write_shard(storage, name, shard, bound, going_on), shard.held)


def commit(
    storage: Storage, run: str, step: int, written: Sequence[Written], describe: Mapping[str, Any]
) -> None:
    """Make a checkpoint of the files of all ranks: afterwards it is there, and says whose it is.

    Raises:
        CheckpointError: if the checkpoints here are another run's.
    """
    claim(storage, run)
    files = {file_of(rank): (file.bytes, file.head_hash) for rank, file in enumerate(written)}
    body = {"format": FORMAT, "run": run, "step": step, "files": files}
    body |= {"index": [file.held for file in written], **describe}
    storage.commit(f"{folder_of(step)}/{MANIFEST}", json.dumps({"hash": _hash(body), **body}).encode())


def complete(storage: Storage) -> list[int]:
    """Return the steps of all checkpoints that were committed, oldest first."""
    return [step for step in _folders(storage) if storage.holds(f"{folder_of(step)}/{MANIFEST}")]


def newest(storage: Storage) -> tuple[dict[str, Any] | None, list[tuple[int, str]]]:
    """Return the manifest of the newest checkpoint whose manifest is sound and whose files are all there,
    None if there are no checkpoints; and the steps of newer ones with what is wrong with them.

    Raises:
        CheckpointError: if none of those that there are is good.
    """
    problems: list[tuple[int, str]] = []
    steps = complete(storage)
    for step in reversed(steps):
        try:
            return read_manifest(storage, step), problems
        except DamagedError as error:
            problems.append((step, str(error)))
    aside = [step for step in _folders(storage) if storage.holds(f"{folder_of(step)}/{DAMAGED}")]
    if steps or aside:
        found = (
            "; ".join(text for _, text in problems)
            or f"{', '.join(map(folder_of, aside))} were found to be damaged before (to take one back, "
            f"rename its {DAMAGED} to {MANIFEST})"
        )
        raise CheckpointError(
            f"no checkpoint in {storage} is good: {found}. Restore one of them, or train from the start in a "
            f"new run folder."
        )
    return None, problems


def read_manifest(storage: Storage, step: int) -> dict[str, Any]:
    """Return the manifest of a checkpoint, after looking whether its files are there.

    Raises:
        DamagedError: if it is not what was written, a file is missing or cut short, or it is of another run.
        CheckpointError: if another version wrote it.
    """
    folder = folder_of(step)
    try:
        manifest = json.loads(storage.read(f"{folder}/{MANIFEST}"))
        if not isinstance(manifest, dict):
            raise ValueError("no object")
        written = None if manifest.keys() & {"hash", "format"} else 1  # before there were hashes
        if "hash" in manifest and manifest.pop("hash") == _hash(manifest):
            written = manifest["format"]
    except ValueError as error:
        raise DamagedError(f"{folder}/{MANIFEST} is not what was written ({error})") from error
    if written is None:
        raise DamagedError(f"{folder}/{MANIFEST} is not what was written (another hash)")
    if written != FORMAT:
        raise CheckpointError(
            f"{storage}/{folder} has format {written} and this version reads {FORMAT}: continue it with the "
            f"version that wrote it, or train in a new run folder"
        )
    if lacking := [key for key in ("files", "index", "run", "step") if key not in manifest]:
        raise DamagedError(f"{folder}/{MANIFEST} has no {', '.join(lacking)}")
    if manifest["step"] != step:
        raise DamagedError(f"{folder} holds the checkpoint of step {manifest['step']}")
    run = read_run(storage)
    if manifest["run"] != run:
        found = f"says {run}" if run else "is not there"
        raise DamagedError(f"{folder} is of run {manifest['run']}, and {storage}/{RUN} {found}")
    sizes = storage.sizes(folder)
    for name, (size, _) in manifest["files"].items():
        if sizes.get(name) != size:
            found = f"has {sizes[name]} bytes" if name in sizes else "is missing"
            raise DamagedError(f"{folder}/{name} {found}, the manifest says {size}")
    return manifest


def read_run(storage: Storage) -> str | None:
    """Return the id of the run that the checkpoints here belong to, None if there is none yet."""
    return storage.read(RUN).decode(errors="replace").strip() if storage.holds(RUN) else None


def locate(url: str) -> tuple[Storage, int]:
    """Return the storage and the step of a checkpoint that is given by its path or URL.

    Raises:
        ValueError: if there can be none.
    """
    root, _, name = url.rstrip("/").rpartition("/")
    if not root or not name.startswith(_PREFIX) or not name.removeprefix(_PREFIX).isdecimal():
        raise ValueError(f"{url} names no checkpoint: its last part is not {_PREFIX}N")
    return Storage.at(root), int(name.removeprefix(_PREFIX))


def claim(storage: Storage, run: str | None, adopt: bool = False) -> str:
    """Say in a storage that its checkpoints are those of `run`, if it does not yet; return the run's id. A
    run without one gets that of the storage where it may `adopt` it, or else a new one.

    Raises:
        CheckpointError: if the checkpoints here are another run's.
    """
    found = read_run(storage)
    run = run or (found if adopt and found else secrets.token_hex(8))
    if found is None:
        storage.commit(RUN, run.encode())
    elif found != run:
        raise CheckpointError(
            f"{storage} holds checkpoints of another run ({found}, and this one is {run}): go on with that "
            f"run in its own folder, or give this one a train.checkpoint_dir of its own; "
            f"for a new folder of that run, "
            f"copy {RUN} into it"
        )
    return run


def set_aside(storage: Storage, step: int) -> None:
    """Mark a checkpoint as damaged: it is kept to be looked at, and no longer counts as one.

    Raises:
        OSError: if nothing can be written there.
    """
    storage.move(f"{folder_of(step)}/{MANIFEST}", f"{folder_of(step)}/{DAMAGED}")


def verify(storage: Storage, step: int) -> dict[str, Any]:
    """Read all of a checkpoint. Returns its manifest.

    Raises:
        DamagedError: if anything in it is not what was written.
        CheckpointError: if another version wrote it.
    """
    manifest = read_manifest(storage, step)
    for name in manifest["files"]:
        with storage.open(f"{folder_of(step)}/{name}") as file:
            open_shard(manifest, file, name).verify()
    return manifest


def open_shard(manifest: Mapping[str, Any], file: Any, name: str) -> ShardReader:
    """Return a reader of an open file of a checkpoint.

    Raises:
        DamagedError: if it is not the file that was written: one of another rank, step or run, for example.
    """
    size, head_hash = manifest["files"][name]
    return ShardReader(file, f"{folder_of(manifest['step'])}/{name}", size, head_hash)


def attempt(action: Callable[[], object]) -> str | None:
    """Return what went wrong in an action, None if nothing did."""
    try:
        action()
    except Exception as error:
        cause = _cause(error)
        return str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"
    return None


def first_problem(problem: str | None, control: Control, tag: str) -> str | None:
    """Tell every rank of the first problem that any rank had; ranks also meet here."""
    found = control.share(tag, {} if problem is None else {str(control.rank): problem})
    return next((f"rank {rank}: {found[rank]}" for rank in sorted(found, key=int)), None)


def _hash(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _folders(storage: Storage) -> list[int]:
    names = (name.removeprefix(_PREFIX) for name in storage.sizes() if name.startswith(_PREFIX))
    return sorted(int(name) for name in names if name.isdecimal())


def _sweep(storage: Storage, step: int, keep: Keep, going_on: Callable[[], object]) -> None:
    """After `step` was saved, remove checkpoints that need not be kept, and what is left of saves that were
    cut short. Those that were set aside stay. Calls `going_on` as `Storage.remove` does.
    """
    steps = complete(storage)
    kept = {*steps[-keep.last :], *(s for s in steps if keep.every and s % keep.every == 0), step}
    for old in _folders(storage):
        if old not in kept and not storage.holds(f"{folder_of(old)}/{DAMAGED}"):
            storage.remove(folder_of(old), MANIFEST, going_on)


def _cause(error: BaseException) -> BaseException:
    """The operating system's error behind others, which writers may hide."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, OSError):
            return at
        at = at.__cause__ or at.__context__
    return error
