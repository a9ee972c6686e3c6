"""A process on the cores beside its GPU: those of its NUMA node, whose memory the GPU reaches without
crossing to another socket. Memory that the process touches first, pinned memory too, then lies there.

An example: a machine with two sockets of 48 cores says of GPU 3 that it is on node 1, and of node 1 that it
has cores 48-95. The rank of GPU 3 keeps to these, or to those of them that it was given.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path

VARIABLE = "OMNI_NUMA"
NODE, NONE = "node", "none"


SYSFS = Path("/sys")


def wants_node(environment: Mapping[str, str]) -> bool:
    """Whether a process of this environment shall keep to the cores beside its GPU.

    Raises:
        ValueError: if the variable has another value than node or none.
    """
    given = environment.get(VARIABLE, NONE)
    if given not in (NODE, NONE):
        raise ValueError(f"{VARIABLE}={given}: set it to {NODE} or {NONE}")
    return given == NODE


def cores_beside(address: str, sysfs: Path = SYSFS) -> frozenset[int]:
    """Return the cores of the NUMA node of a PCI device, such as "0000:dc:00.0"; none where the machine does
    not tell, as many virtual ones do not.
    """
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
        ranges = (sysfs / f"devices/system/node/node{node}/cpulist").read_text().strip()
    except (OSError, ValueError):  # of a machine with one node it says -1
        return frozenset()
    bounds = (part.partition("-") for part in ranges.split(",") if part)
    return frozenset(core for first, _, last in bounds for core in range(int(first), int(last or first) + 1))


def listed(cores: Iterable[int]) -> str:
    """Cores as the kernel lists them: "2-3,6"."""
    parts = list[str]()
    for _, run in groupby(enumerate(sorted(cores)), lambda at: at[1] - at[0]):
        neighbours = [core for _, core in run]
        parts.append("-".join(map(str, dict.fromkeys((neighbours[0], neighbours[-1])))))
    return ",".join(parts)


def keep_to(cores: frozenset[int]) -> None:
    """Let all threads of this process, and those that they start, run on those of `cores` that the process
    was given. Where it was given none of them, as by a user's own binding, it keeps what it has.
    """
    given = os.sched_getaffinity(0)
    if not given & cores:
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it has ended
            if os.sched_getaffinity(thread) == given:  # others were placed by whoever started them
                os.sched_setaffinity(thread, given & cores)
