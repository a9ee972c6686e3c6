"""A gate hands on the bytes of those who know the secret, and takes nothing from others."""

import errno
import socket
import time
from contextlib import ExitStack, closing, suppress
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from infra.relay import LOOPBACK, Relay
from parallel.handshake import new_secret

SECRET = bytes.fromhex(new_secret())


@pytest.fixture
def relays():
    """A relay of the first node and one of another."""
    with closing(Relay(SECRET)) as head, closing(Relay(SECRET)) as node:
        yield head, node


@pytest.fixture
def inner():
    """A server of the first node that notes what it is sent."""
    with socket.create_server((LOOPBACK, 0)) as server:
        server.settimeout(5)
        yield server


def test_a_store_on_loopback_is_reached_through_gate_and_tunnel(relays):
    head, node = relays
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    port = node.tunnel(LOOPBACK, head.gate(0), store.port, 5)
    clients = [TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=5)) for _ in range(3)]
    clients[0].set("key", "x" * 500_000)
    assert clients[1].get("key") == b"x" * 500_000
    assert clients[2].add("count", 2) == 2
    assert store.get("count") == b"2"


def test_a_gate_goes_on_after_it_could_take_no_connection(relays, inner, monkeypatch, capfd):
    head, node = relays
    accept, failing = head._loop.sock_accept, iter([OSError(errno.EMFILE, "Too many open files")])

    async def sometimes(listener):
        for error in failing:
            raise error
        return await accept(listener)

    monkeypatch.setattr(head._loop, "sock_accept", sometimes)
    port = node.tunnel(LOOPBACK, head.gate(0), inner.getsockname()[1], 5)
    with socket.create_connection((LOOPBACK, port), 5) as outer:
        outer.sendall(b"word")
        with inner.accept()[0] as served:
            assert served.recv(4, socket.MSG_WAITALL) == b"word"
    assert "tried again: [Errno 24] Too many open files" in capfd.readouterr().err


def test_a_gate_that_opens_late_is_waited_for(relays, inner):
    head, node = relays
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    with socket.create_connection(
        (LOOPBACK, node.tunnel(LOOPBACK, port, inner.getsockname()[1], 20))
    ) as early:
        early.sendall(b"early")
        time.sleep(0.3)
        head.gate(port, default=inner.getsockname()[1])
        with inner.accept()[0] as served:
            assert served.recv(5, socket.MSG_WAITALL) == b"early"
            served.sendall(b"answer")
            served.shutdown(socket.SHUT_WR)
            assert early.recv(6, socket.MSG_WAITALL) == b"answer"
            assert early.recv(1) == b""
            early.sendall(b"late")
            assert served.recv(4, socket.MSG_WAITALL) == b"late"


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.0\r\n\r\n", bytes(200)])
def test_a_stranger_reaches_nothing(relays, inner, sent):
    head, _ = relays
    stranger = socket.create_connection((LOOPBACK, head.gate(0)), 5)
    with stranger, suppress(OSError):  # reset, since what it sent was not even read
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(4096):
            pass
    inner.settimeout(0.3)
    with pytest.raises(TimeoutError):
        inner.accept()


def test_those_who_say_nothing_hold_nobody_up(relays, inner):
    head, node = relays
    gate = head.gate(0, default=inner.getsockname()[1])
    with ExitStack() as silent:
        for _ in range(64):
            silent.enter_context(socket.create_connection((LOOPBACK, gate)))
        with socket.create_connection((LOOPBACK, node.tunnel(LOOPBACK, gate, 0, 5)), 5) as known:
            known.sendall(b"known")
            with inner.accept()[0] as served:
                assert served.recv(5, socket.MSG_WAITALL) == b"known"


def test_who_knows_another_secret_is_told_of(relays, inner, capfd):
    head, _ = relays
    with closing(Relay(bytes.fromhex(new_secret()))) as other:
        port = other.tunnel(LOOPBACK, head.gate(0), inner.getsockname()[1], 5)
        with socket.create_connection((LOOPBACK, port), 5) as connection:
            assert connection.recv(1) == b""
    assert "does not know the secret of this run" in capfd.readouterr().err
