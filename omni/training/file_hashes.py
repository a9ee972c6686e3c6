"""SHA-256 of the files of published weights that a run began with, found beside training.

`weights.json` in the run folder names the files. They are divided over the run's ranks; a thread of each
reads its own from end to end, a piece at a time, and writes what it found to `weights/<file>.sha256`, in the
form of sha256sum. It stops with the run, and the next launch hashes what is left, of files that are still
those noted.

Invariant: a hash that is written is that of all bytes of a file whose size and time of change were those
noted, before and after it was read.
"""

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dataloader.storage import Storage
from infra.run_folder import RunFolder, write_text
from infra.screen import beside
from infra.shutdown import StopFlag

PIECE = 8 * 2**20  # bytes that are held
LAST_S = 60.0  # how long the end of a run waits for hashes
PIECE_S = 5.0  # for a piece that is being read, once it is over


@contextlib.contextmanager
def hashing_files(folder: RunFolder, rank: int, world: int, signal: StopFlag) -> Iterator[None]:
    """Hash this rank's part of the files that the run of `folder` began with, if it began with any, on a
    thread. The end waits for it for LAST_S seconds at most, and no longer than until a `signal` asks to stop.
    """
    if not folder.weights.exists():
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(
        target=_hash_noted, args=(folder, rank, world, stop), name="hashes", daemon=True
    )
    thread.start()
    try:
        yield
        until = time.monotonic() + LAST_S
        while thread.is_alive() and time.monotonic() < until and not signal.requested:
            thread.join(0.1)
    finally:
        unfinished = thread.is_alive()
        stop.set()
        thread.join(PIECE_S)
        if unfinished:
            beside(
                f"note: rank {rank} leaves files of {folder.weights} without a hash: the run has ended "
                f"before they were read. `omni resume {folder.path}` hashes the rest"
            )


def _hash_noted(folder: RunFolder, rank: int, world: int, stop: threading.Event) -> None:
    try:
        noted = json.loads(folder.weights.read_text(encoding="utf-8"))
        hash_files(noted, folder.hashes, rank, world, stop)
    except (OSError, ValueError, LookupError, TypeError) as error:
        beside(f"warning: rank {rank} hashes no more files of weights.json: {error!r}")


def hash_files(noted: Mapping[str, Any], into: Path, rank: int, world: int, stop: threading.Event) -> None:
    """Write the hashes of a rank's part of the files that have none yet to the folder `into`, until `stop`.
    `noted` is what `weights.json` says.
    """
    storage, files = Storage.at(noted["folder"]), noted["files"]
    largest_first = sorted(files, key=lambda name: (-files[name]["bytes"], name))
    for name in largest_first[rank::world]:
        found = into / f"{name}.sha256"
        if found.exists():
            continue
        try:
            digest = _digest(storage, name, files[name], stop)
        except OSError as error:
            beside(f"warning: rank {rank} leaves {storage.locate(name)} without a hash: {error}")
            continue
        if digest is None:
            return
        found.parent.mkdir(exist_ok=True)
        write_text(found, f"{digest}  {name}\n")


def _digest(storage: Storage, name: str, noted: Mapping[str, Any], stop: threading.Event) -> str | None:
    """The hash of a file, None if told to stop; OSError if it is not the one that was noted."""
    found, piece = hashlib.sha256(), memoryview(bytearray(PIECE))
    _check(storage, name, noted)
    with storage.open(name) as file:
        while count := file.readinto(piece):
            found.update(piece[:count])
            if stop.is_set():
                return None
    _check(storage, name, noted)
    return found.hexdigest()


def _check(storage: Storage, name: str, noted: Mapping[str, Any]) -> None:
    now = {"bytes": storage.sizes().get(name)}
    with contextlib.suppress(NotImplementedError):
        now["modified"] = storage.fs.modified(storage.path(name)).isoformat()
    if different := [f"{key} {value}" for key, value in now.items() if value != noted.get(key, value)]:
        raise OSError(f"it is no longer the file that the run began with ({', '.join(different)})")
