"""Processes on the cores beside their GPU: as the machine says, and within what they were given."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops.near_device import cores_beside, listed, wants_node

ADDRESS = "0000:dc:00.0"
KEPT = """
import os, sys, threading
from ops.near_device import keep_to

def placed(cores):
    os.sched_setaffinity(0, cores)
    began.set()
    end.wait()

given, cores = (set(map(int, text.split())) for text in sys.argv[1:])
os.sched_setaffinity(0, given)
began, end = threading.Event(), threading.Event()
before = threading.Thread(target=end.wait)
before.start()
elsewhere = threading.Thread(target=placed, args=({max(given)},))
elsewhere.start()
began.wait()
keep_to(frozenset(cores))
after = threading.Thread(target=end.wait)
after.start()
for thread in (threading.main_thread(), before, after, elsewhere):
    print(*sorted(os.sched_getaffinity(thread.native_id)))
end.set()
"""


def sysfs(folder: Path, node: str, cores: str) -> Path:
    """A machine's files: the node of a device, and the cores of node 1."""
    for path, text in (
        (f"bus/pci/devices/{ADDRESS}/numa_node", node),
        ("devices/system/node/node1/cpulist", cores),
    ):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("node", "cores", "found"),
    [
        ("1", "2-3,6", {2, 3, 6}),
        ("1", "5", {5}),
        ("1", "", set()),  # a node with memory alone
        ("-1", "0-3", set()),
        ("0", "0-3", set()),  # of which nothing is said
    ],
)
def test_cores_are_those_of_the_node_of_a_device(
    node: str, cores: str, found: set[int], tmp_path: Path
) -> None:
    assert cores_beside(ADDRESS, sysfs(tmp_path, node, cores)) == found
    assert cores_beside("0000:01:00.0", tmp_path) == set(), "another device"


def kept(given: set[int], cores: set[int]) -> list[set[int]]:
    """Where threads of a process may run that was given some cores and keeps to `cores`: its first one, one
    from before, one from after, and one that had been placed on the last.
    """
    sets = (" ".join(map(str, of)) for of in (given, cores))
    done = subprocess.run([sys.executable, "-c", KEPT, *sets], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [set(map(int, line.split())) for line in done.stdout.splitlines()]


@pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="of two cores on Linux"
)
def test_all_threads_keep_to_cores_that_the_process_was_given() -> None:
    given = os.sched_getaffinity(0)
    first, last = min(given), max(given)
    assert kept(given, {first, last + 1}) == [{first}] * 3 + [{last}]
    assert kept({first}, {first, last}) == [{first}] * 4
    assert kept(given, {last + 1}) == [given] * 3 + [{last}], "none of what was given"
    assert kept(given, set()) == [given] * 3 + [{last}], "a machine that does not tell"


def test_cores_are_listed_as_the_kernel_does() -> None:
    assert [listed(cores) for cores in ((), (5,), (3, 2, 6), range(48, 96))] == ["", "5", "2-3,6", "48-95"]


def test_a_value_that_there_is_not_is_refused() -> None:
    assert not wants_node({})
    assert wants_node({"OMNI_NUMA": "node"})
    with pytest.raises(ValueError, match="OMNI_NUMA=socket: set it to node or none"):
        wants_node({"OMNI_NUMA": "socket"})
