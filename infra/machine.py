"""What this machine has for ranks, and how many are too many."""

import ctypes
import os
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

RANKS_PER_CORE = 8  # beyond, ranks that wait for each other take longer than their timeouts allow
LEAST_PRIORITY = 19
RANK_BYTES = 2**29  # a rank's interpreter with its libraries, before it holds a model
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Machine:
    """Cores and bytes of memory that processes started here may use."""

    cores: int
    memory_bytes: int


def this_machine() -> Machine:
    """Measure this machine, or the container that this process is in."""
    limits = [psutil.virtual_memory().total]
    for file in map(Path, _CGROUP_LIMITS):
        text = file.read_text().strip() if file.exists() else "max"
        limits += [int(text)] if text.isdigit() else []
    return Machine(usable_cores(), min(limits))


def oom_kills(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many processes of this one's control group, which the file `own` names, the kernel has
    killed for want of memory; 0 where nobody counts them.
    """
    counters: list[Path] = []
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        # A container may see its own group as the root, though it is told another path.
        folders = [Path(path.lstrip("/")), Path()]
        if not controllers:
            counters += [root / folder / "memory.events" for folder in folders]
        elif "memory" in controllers.split(","):
            counters += [root / "memory" / folder / "memory.oom_control" for folder in folders]
    for file in counters:
        counts = dict(line.split() for line in file.read_text().splitlines()) if file.exists() else {}
        if "oom_kill" in counts:
            return int(counts["oom_kill"])
    return 0


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_of_ranks() -> int:
    """Return the number of cores that the ranks of this machine share, one of which this process is: those of
    the agent that started them. A rank itself may keep to the cores beside its GPU.
    """
    with suppress(OSError, AttributeError):  # the agent has ended, or there is no such call
        return len(os.sched_getaffinity(os.getppid()))
    return usable_cores()


def give_way() -> None:
    """Let the thread that calls this run after all others where cores are short; on Linux alone."""
    with suppress(OSError):
        if sys.platform == "linux":  # elsewhere it would be the whole process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)


def release_memory() -> None:
    """Give back to the system what malloc keeps of the memory that was freed; with glibc alone.

    Blocks of up to 32 MB lie side by side in glibc's arenas, and what is freed between those in use stays
    with the process: after some hundred steps of varying sizes that is several times what it holds.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def crowding(ranks: int, machine: Machine) -> str | None:
    """Say why a machine is no place for so many ranks, and how many it takes; None if it takes them."""
    most = machine.cores * RANKS_PER_CORE
    if ranks > most:
        return f"this machine has {machine.cores} cores, which {most} ranks share at most"
    most = machine.memory_bytes // RANK_BYTES
    if ranks > most:
        memory, one = machine.memory_bytes / 2**30, RANK_BYTES / 2**30
        return (
            f"this machine has {memory:.1f} GiB, and a rank takes {one:g} before it holds a model: {most} fit"
        )
    return None
