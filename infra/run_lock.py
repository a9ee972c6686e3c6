"""One launch at a time trains in a run folder: who does is written there, in `run.lock`.

The file names the holder by machine, process number with start time, and launch. So a lock that a killed
launch left is told from one that is held, where that can be seen: on the machine that holds it. From another
machine, or another container of it, it cannot be seen, and whoever knows better removes the file. All
processes of a launch may hold its lock together, also after the machine that held it is gone.
"""

import fcntl
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from dataloader.within import within
from infra.launch import LAUNCH_ID
from infra.run_folder import RunFolder, write_json

FILE = "run.lock"
ALONE_S = 30.0  # for others to look at a lock and change it, which takes them milliseconds
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MACHINE = Path("/etc/machine-id")


class LockedError(ValueError):
    """Another launch trains in the run folder, or may do so; the message says who, and what to do."""


@dataclass(frozen=True)
class Holder:
    """A process that holds a lock. Its number means something in a `boot`, a machine since its last start,
    and a `space`, the processes of a container; `machine` is the system's machine-id. Each is
    empty where the system does not tell. `started` is in whatever the system counts.
    """

    host: str
    boot: str
    space: str
    pid: int
    started: float
    launch: str
    since: str
    machine: str = ""

    @property
    def described(self) -> str:
        """What a user needs to find it."""
        return f"launch {self.launch[:8]} (host {self.host}, process {self.pid}, since {self.since})"


def this_process(launch: str) -> Holder:
    """Return this process as a holder, for `launch`."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    started = _start_of(os.getpid()) or 0
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    machine = _read(_MACHINE)
    return Holder(platform.node(), _read(_BOOT), space, os.getpid(), started, launch, since, machine)


def is_alive(holder: Holder, here: Holder, start_of: Callable[[int], float | None]) -> bool | None:
    """Whether a holder still runs; None if that cannot be seen from `here`.

    `start_of` gives the start time of the process of a number on this machine, None if there is none.
    """
    if holder.host != here.host or holder.machine != here.machine:
        return None  # many machines are called localhost
    if holder.boot != here.boot:
        return False if holder.machine else None  # containers have no machine-id: it may be another machine
    if holder.space != here.space:
        return None
    return start_of(holder.pid) == holder.started


def read_holder(folder: RunFolder) -> Holder | None:
    """Return who holds the lock of a run folder, be it alive or not; None if there is no lock.

    Raises:
        LockedError: for a file that is no lock.
    """
    path = folder.path / FILE
    try:
        return Holder(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise LockedError(f"{path} is damaged: if nothing trains there, remove it") from error


def holder_of(folder: RunFolder) -> tuple[Holder | None, bool | None]:
    """Return who holds the lock of a run folder, None if nobody does, and whether it still runs, None if that
    cannot be seen from here.

    Raises:
        LockedError: for a file that is no lock.
    """
    holder = read_holder(folder)
    return holder, holder is not None and is_alive(holder, this_process(""), _start_of)


@contextmanager
def holding(folder: RunFolder, launch: str) -> Iterator[None]:
    """Hold the lock of a run folder for `launch` inside the block. The folder is made if there is none, and
    removed if nothing but empty folders is in it afterwards.

    Raises:
        LockedError: if another launch holds it, or may hold it.
        OSError: if nothing can be written there.
    """
    RunFolder.create(folder.path)
    try:
        with _alone(folder):
            own = _take(folder, launch)
        try:
            yield
        finally:
            if own:
                _release(folder, own)
    finally:
        with suppress(OSError):  # there are checkpoints, or the folder cannot be read or written any more
            if [path.name for path in folder.path.iterdir()] == [folder.checkpoints.name]:
                folder.checkpoints.rmdir()
                folder.path.rmdir()


def launch_of_rank() -> str | None:
    """Return the launch that this process is a rank of, as its launcher or torchrun's --rdzv-id names it."""
    named = os.environ.get(LAUNCH_ID) or os.environ.get("TORCHELASTIC_RUN_ID")
    return None if named == "none" else named  # torchrun's way to say that it was given no id


def _take(folder: RunFolder, launch: str) -> Holder | None:
    """Write this process into the lock; None if another process of the launch holds it, which stays."""
    holder, alive = holder_of(folder)
    if holder is not None and alive and holder.launch == launch:
        return None
    if holder is not None and holder.launch != launch and alive is not False:
        remedy = "wait for its end or stop it, or choose another run.dir"
        if alive is None:
            file = folder.path / FILE
            remedy = f"whether it still runs cannot be seen from here; if it does not, remove {file}"
        raise LockedError(f"run.dir={folder.path}: {holder.described} trains in this folder; {remedy}")
    own = this_process(launch)
    write_json(folder.path / FILE, asdict(own))
    return own


def _release(folder: RunFolder, own: Holder) -> None:
    """Remove this process's lock. One that cannot be removed is told: nothing else is wrong with the run."""
    try:
        with _alone(folder):
            if read_holder(folder) == own:
                (folder.path / FILE).unlink()
    except (OSError, LockedError) as error:
        print(f"note: the lock of {folder.path} cannot be removed: {error}", file=sys.stderr)


@contextmanager
def _alone(folder: RunFolder) -> Iterator[None]:
    """Let no other process of this machine look at the lock and change it meanwhile.

    Raises:
        LockedError: if others do not let go in ALONE_S seconds, or the file system does not answer.
    """
    handle = os.open(folder.path, os.O_RDONLY)
    try:
        try:
            # On a thread: where a file server's locks do not answer, LOCK_NB does not return either.
            within(ALONE_S, lambda: fcntl.flock(handle, fcntl.LOCK_EX))
        except TimeoutError as error:
            raise LockedError(
                f"run.dir={folder.path}: this process waited {ALONE_S:g} s for a lock on this folder"
                f"{_held(folder)}. Either another process of omni is stopped there, so end it, or the lock "
                f"service of the file system does not answer, so mend it or choose another run.dir"
            ) from error
        except OSError:
            pass  # file systems without locks: launches of one moment are not told apart
        yield
    finally:
        os.close(handle)


def _held(folder: RunFolder) -> str:
    """Who held the lock last, for a message, if that can be read."""
    with suppress(OSError, LockedError):
        if (holder := read_holder(folder)) is not None:
            return f", in which {holder.described} trains or did"
    return ""


def _start_of(pid: int) -> float | None:
    """When a process of this machine began, None if there is none that runs."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if psutil.LINUX:  # ticks since the machine's start: no clock that is set moves them
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return float(fields[19])
        return process.create_time()
    except (psutil.Error, OSError):
        return None


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""
