"""The agent's store is taken before workers start, is another for each start, and admits no stranger."""

import base64
import os
import pickle
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
)

from infra import agent, elastic_agent
from infra.launch import environment_of
from infra.meeting import FreshStores, SignedBackend, meet
from infra.relay import LOOPBACK
from parallel.handshake import SECRET, new_secret


class OneNode(RendezvousHandler):
    """A rendezvous of one agent that names a port which it does not hold, as torchrun's does."""

    def next_rendezvous(self):
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 1))

    def get_backend(self):
        return "alone"

    def is_closed(self):
        return False

    def set_closed(self):
        pass

    def num_nodes_waiting(self):
        return 0

    def get_run_id(self):
        return "run"

    def shutdown(self):
        return True


def test_workers_of_each_start_meet_at_a_store_that_is_held_for_them():
    rendezvous = FreshStores(OneNode(), None, 0, 30.0)
    assert rendezvous.use_agent_store
    first = rendezvous.next_rendezvous().bootstrap_store_info
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", first.master_port))
    worker = TCPStore("127.0.0.1", first.master_port, is_master=False)
    worker.set("address of rank 0", "stale")
    second = rendezvous.next_rendezvous().bootstrap_store_info
    restarted = TCPStore("127.0.0.1", second.master_port, is_master=False)
    assert not restarted.check(["address of rank 0"])


def test_agents_that_cannot_meet_say_so_without_a_traceback(monkeypatch, capsys):
    def in_vain(arguments):
        raise RendezvousConnectionError("the connection to the store has failed")

    for module, name in (
        (elastic_agent.api, "LocalElasticAgent"),
        (elastic_agent.multiprocessing, "get_subprocess_handler"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(elastic_agent, "main", in_vain)
    assert elastic_agent.run_torchrun([], None) == 1
    err = capsys.readouterr().err
    assert err.startswith(
        "agent: error: the agents of this launch could not meet (the connection to the store"
    )
    assert "choose a free one" in err


@pytest.mark.parametrize(
    ("codes", "killed", "told"),
    [({0: -15, 1: -9}, 1, True), ({0: -15, 1: -9}, 0, False), ({1: 1, 0: -9}, 1, False)],
)
def test_a_rank_that_the_kernel_killed_for_want_of_memory_is_named(monkeypatch, capsys, codes, killed, told):
    failures = {rank: ProcessFailure(rank, 1, code, "") for rank, code in sorted(codes.items(), reverse=True)}
    for later, failure in enumerate(failures.values()):
        failure.timestamp += later
    counts = iter([7, 7 + killed])
    monkeypatch.setattr(elastic_agent, "oom_kills", lambda: next(counts))
    parent = elastic_agent.LocalElasticAgent
    monkeypatch.setattr(parent, "__init__", lambda self, spec: setattr(self, "_pcontext", None))
    monkeypatch.setattr(parent, "_start_workers", lambda self, group: {})
    monkeypatch.setattr(
        parent, "_monitor_workers", lambda self, group: RunResult(WorkerState.FAILED, failures=failures)
    )
    own = elastic_agent.Agent(None, None)
    own._start_workers(None)
    own._monitor_workers(None)
    assert ("the kernel killed rank 1: out of memory" in capsys.readouterr().err) is told


def _networks_apart() -> bool:
    unshare = shutil.which("unshare")
    return unshare is not None and not subprocess.run([unshare, "-n", "true"], capture_output=True).returncode


@pytest.mark.skipif(not _networks_apart(), reason="needs to be allowed a network of its own")
def test_a_machine_without_loopback_is_refused_at_once():
    done = subprocess.run(
        ["unshare", "-n", sys.executable, "-m", "infra.agent", "--nproc-per-node=1", "-m", "no.module"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "127.0.0.1" in done.stderr
    assert "ip link set lo up" in done.stderr


def test_an_agent_of_several_nodes_is_refused_without_the_secret_that_they_share(monkeypatch, capsys):
    monkeypatch.delenv(SECRET, raising=False)
    assert agent.run(["--nnodes=2", "--nproc-per-node=1", "-m", "no.module"]) == 2
    assert "OMNI_SECRET" in capsys.readouterr().err


def test_each_launch_of_one_machine_has_a_secret_of_its_own(monkeypatch):
    monkeypatch.setenv(SECRET, "what stood in the shell")
    one, other = (environment_of(1, Path("run/config.yaml"), {}, "name")[SECRET] for _ in range(2))
    assert one != other
    assert all(len(bytes.fromhex(text)) == 32 for text in (one, other))


def parameters(endpoint, nodes, **more):
    return RendezvousParameters("c10d", endpoint, "run", nodes, nodes, local_addr=LOOPBACK, **more)


def listening():
    """Addresses at which this process listens for connections."""
    connections = psutil.Process().net_connections("tcp")
    return {address.laddr.ip for address in connections if address.status == psutil.CONN_LISTEN}


def test_the_agent_of_one_machine_listens_on_loopback_alone(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(SECRET, new_secret())
    before = listening()
    agent = meet(parameters("127.0.0.1:0", 1))
    info = agent.next_rendezvous()
    assert listening() - before <= {LOOPBACK}
    TCPStore(LOOPBACK, info.bootstrap_store_info.master_port, is_master=False).set("a", "b")
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"


def test_agents_of_two_nodes_meet_through_a_gate(monkeypatch):
    monkeypatch.setenv(SECRET, new_secret())
    with socket.create_server((LOOPBACK, 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    conf = {"read_timeout": 30, "last_call_timeout": 1}
    agents = [meet(parameters(endpoint, 2, is_host=int(node == 0), **conf)) for node in range(2)]
    with ThreadPoolExecutor(2) as pool:
        infos = list(pool.map(lambda agent: agent.next_rendezvous(), agents))
    assert sorted(info.rank for info in infos) == [0, 1]
    stores = [info.bootstrap_store_info for info in infos]
    assert {store.master_addr for store in stores} == {LOOPBACK}
    workers = [TCPStore(LOOPBACK, store.master_port, is_master=False) for store in stores]
    workers[0].set("from one", "node")
    assert workers[1].get("from one") == b"node"


def test_agents_of_several_nodes_without_a_secret_do_not_meet(monkeypatch):
    monkeypatch.delenv(SECRET, raising=False)
    with pytest.raises(RendezvousConnectionError, match=SECRET):
        meet(parameters("127.0.0.1:29999", 2, is_host=0))


def test_what_another_wrote_to_the_rendezvous_is_not_handed_on_to_be_unpickled(monkeypatch):
    monkeypatch.setenv(SECRET, new_secret())
    store = HashStore()
    backend = SignedBackend(store, "run")
    assert backend.get_state() is None
    state, token, ours = backend.set_state(b"one")
    assert (state, ours) == (b"one", True)
    assert backend.set_state(b"two", token)[::2] == (b"two", True)
    assert backend.set_state(b"late", token)[::2] == (b"two", False)
    store.set("torch.rendezvous.run", base64.b64encode(bytes(32) + pickle.dumps("harm")))
    with pytest.raises(RendezvousStateError, match="not signed"):
        backend.get_state()
