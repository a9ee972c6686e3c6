"""Another user at another address reaches no port of a job, or is obeyed in nothing there."""

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import psutil
import pytest
from processes import heed_signals
from strangers import heeded, listeners, needs_another_user, outward

from parallel.handshake import SECRET, new_secret

pytestmark = needs_another_user

RUN = "17"  # how the agents of several nodes call their meeting
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


def agent(folder, *arguments, secret=None):
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{os.getcwd()}", "PYTHONSAFEPATH": "1"}
    environment |= {"OMP_NUM_THREADS": "1"} | ({SECRET: secret} if secret else {})
    own = [*arguments, "-m", "worker", str(folder)]
    command = [sys.executable, "-m", "infra.agent", "--rdzv-backend=c10d", *own]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stderr=pipe, text=True, preexec_fn=heed_signals)


def wait_for_ranks(folder, agents):
    until = time.monotonic() + 90
    while not all((folder / f"up{rank}").exists() for rank in range(2)):
        assert all(each.poll() is None for each in agents), agents[0].stderr.read()
        assert time.monotonic() < until, "ranks did not meet"
        time.sleep(0.05)


def below(agents):
    """Agents and all processes under them."""
    above = [psutil.Process(each.pid) for each in agents]
    return [*above, *(process for each in above for process in each.children(recursive=True))]


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
        found = listeners(below(started))
        assert found, "a job has a store at least"
        obeyed = heeded((port for _, port in found), canary, RUN)
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
    shape = ["--nnodes=2", "--nproc-per-node=1", endpoint, f"--rdzv-id={RUN}", f"--local-addr={outward()}"]
    run(tmp_path, [([*shape, f"--rdzv-conf=is_host={head}"], secret) for head in (1, 0)])
