"""The agent's store is taken before workers start, and is another for each start."""

import socket

import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from infra import agent, elastic_agent
from infra.elastic_agent import FreshStores
from infra.launch import environment_of
from parallel.handshake import SECRET


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
    rendezvous = FreshStores(OneNode())
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


def test_an_agent_of_several_nodes_is_refused_without_the_secret_that_they_share(monkeypatch, capsys):
    monkeypatch.delenv(SECRET, raising=False)
    assert agent.run(["--nnodes=2", "--nproc-per-node=1", "-m", "no.module"]) == 2
    assert "OMNI_SECRET" in capsys.readouterr().err


def test_each_launch_of_one_machine_has_a_secret_of_its_own(monkeypatch):
    monkeypatch.setenv(SECRET, "what stood in the shell")
    one, other = (environment_of(1, {}, "name")[SECRET] for _ in range(2))
    assert one != other
    assert all(len(bytes.fromhex(text)) == 32 for text in (one, other))
