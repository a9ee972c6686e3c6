"""Many light processes that run the control plane alone: `python control_ranks.py WORLD PER_NODE SECONDS`.

They are forks of this one, which imports no torch. Prints one line of JSON with what each rank found.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import psutil

from parallel.control import Control
from parallel.control_tree import Tree
from parallel.control_values import Op

STEPS = 6
EXCHANGES = STEPS + 3  # two gathers and a broadcast behind them
SLOW, LOST, OTHER = 77, 101, 93  # the slow rank, that with a lost item, that with another plan


class FolderStore:
    """A store in a folder, for processes of one machine."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def path(self, key):
        return self.folder / key.replace("/", ".")

    def add(self, key, amount):
        """Only ever used by one process a key."""
        path = self.path(key)
        number = amount + (int(path.read_text()) if path.exists() else 0)
        path.write_text(str(number))
        return number

    def set(self, key, value):
        path = self.path(key)
        new = path.with_name(f"{path.name}.new")
        new.write_text(value)
        new.rename(path)

    def get(self, key, timeout_s=60):
        until = time.monotonic() + timeout_s
        while not self.path(key).exists():
            if time.monotonic() > until:
                raise TimeoutError(key)
            time.sleep(0.002)
        return self.path(key).read_bytes()


def numbers(rank, step):
    """What a rank tells of a step, as the parts of a step's vector."""
    digest = 7_000 + step + (rank == OTHER and step == STEPS - 1)
    ratio = 3_200 if rank == SLOW else 1_000
    return {
        "plan": (Op.MAX, [digest, -digest]),
        "slowest": (Op.MAX, [ratio << 32 | rank]),
        "idle": (Op.SUM, [rank, 1]),
        "bad_samples": (Op.UNION, [rank] if rank == LOST and step == 2 else []),
    }


def sockets():
    """Connections over TCP of this process."""
    return sum(c.status == psutil.CONN_ESTABLISHED for c in psutil.Process().net_connections("tcp"))


def run(rank, tree, store, seconds):
    """What a rank found in all steps, offered one ahead."""
    control = Control(rank, tree, store, b"s" * 32, seconds)
    found = []
    try:
        opened = sockets()
        control.offer("step", 0, numbers(rank, 0))
        for step in range(STEPS):
            if step + 1 < STEPS:
                control.offer("step", step + 1, numbers(rank, step + 1))
            found.append(control.settle("step", step))
        digests = control.gather("explain", numbers(rank, STEPS - 1)["plan"][1][0])
        told = control.broadcast("told", f"from {rank}", source=tree.world - 1)
        uss = psutil.Process().memory_full_info().uss
        others = [of for of, digest in enumerate(digests) if digest != digests[0]]
        control.gather("end", None)  # behind it nobody sends: the counts are those of all exchanges
        loaded = sorted({"torch"} & set(sys.modules))
        return [found, opened, control.sent, control.received, others, told, uss, loaded]
    finally:
        control.close()


def main(world, per_node, seconds):
    """Fork all ranks and print what they found."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    result = run(rank, Tree(world, per_node), FolderStore(folder), seconds)
                    (Path(folder) / f"result-{rank}").write_text(json.dumps(result))
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert not any(codes), codes
        print(json.dumps([json.loads((Path(folder) / f"result-{r}").read_text()) for r in range(world)]))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
