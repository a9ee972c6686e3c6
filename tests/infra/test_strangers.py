"""Another user at another address reaches no port of a job, or is obeyed in nothing there."""

import os
import pickle
import socket
import subprocess
import sys
import time
from base64 import b64encode
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from processes import heed_signals

from parallel.handshake import SECRET, new_secret

NOBODY = 65534
# Each rank meets the others, and says so; it stays until it is told to go.
WORKER = """
from infra.lineage import end_with_parent
if __name__ == "__main__":
    end_with_parent()

import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    (folder / f"up{dist.get_rank()}").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
    dist.barrier()
"""
# As another user, prints each port that takes what a stranger writes to a store: the state of a rendezvous.
STRANGER = """
import os
import sys
from datetime import timedelta
from torch.distributed import TCPStore
address, payload, nobody, *ports = sys.argv[1:]
os.setgroups([])
os.setgid(int(nobody))
os.setuid(int(nobody))
for port in ports:
    try:
        store = TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=1))
        for key in ("none", "17"):
            store.set(f"torch.rendezvous.{key}", payload)
        print(port, flush=True)
    except Exception as error:
        print(port, type(error).__name__, file=sys.stderr)
"""


class Harm:
    """What a stranger writes: to unpickle it runs a command."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


def outward():
    """An address of this machine that is not loopback."""
    found = (
        each.address
        for of in psutil.net_if_addrs().values()
        for each in of
        if each.family == socket.AF_INET and not each.address.startswith("127.")
    )
    return next(found, None)


pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or outward() is None,
    reason="needs root, to become another user, and a network",
)


def agent(folder, *arguments, secret=None):
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{os.getcwd()}", "PYTHONSAFEPATH": "1"}
    environment |= {"OMP_NUM_THREADS": "1"} | ({SECRET: secret} if secret else {})
    own = [*arguments, "-m", "worker", str(folder)]
    command = [sys.executable, "-m", "infra.agent", "--rdzv-backend=c10d", *own]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stderr=pipe, text=True, preexec_fn=heed_signals)


def listeners(agents):
    """The (address, port) at which processes of agents listen."""
    found = set()
    for each in agents:
        above = psutil.Process(each.pid)
        for process in (above, *above.children(recursive=True)):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((connection.laddr.ip, connection.laddr.port))
    return found


def wait_for_ranks(folder, agents):
    until = time.monotonic() + 90
    while not all((folder / f"up{rank}").exists() for rank in range(2)):
        assert all(each.poll() is None for each in agents), agents[0].stderr.read()
        assert time.monotonic() < until, "ranks did not meet"
        time.sleep(0.05)


def try_as_stranger(ports, canary):
    """The ports that obeyed another user, who came from an address that is not loopback."""
    payload = b64encode(pickle.dumps(Harm(canary))).decode()
    command = [sys.executable, "-c", STRANGER, outward(), payload, str(NOBODY), *map(str, sorted(ports))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stderr.count("\n") + done.stdout.count("\n") >= len(ports), done.stderr
    return done.stdout.split()


def run(tmp_path, agents):
    """Start, let a stranger try every listener, and end well; return at which addresses agents listened."""
    tmp_path.chmod(0o777)
    (tmp_path / "worker.py").write_text(WORKER)
    canary = tmp_path / "harm"
    with ExitStack() as ends:
        started = []
        for arguments, secret in agents:
            started.append(agent(tmp_path, *arguments, secret=secret))
            ends.callback(started[-1].wait)
            ends.callback(started[-1].terminate)
        wait_for_ranks(tmp_path, started)
        found = listeners(started)
        assert found, "a job has a store at least"
        obeyed = try_as_stranger({port for _, port in found}, canary)
        time.sleep(0 if len(agents) == 1 else 6)  # agents read of each other every five seconds
        (tmp_path / "go").touch()
        codes = [each.wait(60) for each in started]
    assert obeyed == []
    assert codes == [0] * len(agents)
    assert not canary.exists()
    return {address for address, _ in found}


def test_where_one_machine_is_enough_nothing_listens_beyond_it(tmp_path):
    assert run(tmp_path, [(["--nproc-per-node=2"], None)]) == {"127.0.0.1"}


@pytest.mark.slow
def test_agents_of_two_nodes_obey_nobody_without_the_secret(tmp_path):
    with socket.socket() as probe:
        probe.bind(("", 0))
        endpoint = f"--rdzv-endpoint={outward()}:{probe.getsockname()[1]}"
    secret = new_secret()
    shape = ["--nnodes=2", "--nproc-per-node=1", endpoint, "--rdzv-id=17", f"--local-addr={outward()}"]
    run(tmp_path, [([*shape, f"--rdzv-conf=is_host={head}"], secret) for head in (1, 0)])
