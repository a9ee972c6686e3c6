"""How the ranks of a control plane find each other and connect: each to the one above it in the tree.

A rank with others below it listens, and leaves its address in the run's store. Both ends of a connection
prove that they know the run's secret before anything else is sent (parallel/handshake.py).
"""

import json
import os
import queue
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Protocol

from parallel.control_tree import Tree
from parallel.handshake import StrangerError, admit, greet
from parallel.stalls import StallError

ADDRESS = "OMNI_NODE_ADDRESS"
"""The variable that says where other nodes reach this one; not set where there is one node."""
LOOPBACK = "127.0.0.1"
_SHOWN = 8  # ranks that an error names
_RETRY_S = 0.1


class Store(Protocol):
    """Where ranks leave addresses: what torch's stores can do."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, 0 at first, and return what it is then."""

    def set(self, key: str, value: str) -> None:
        """Leave a value."""

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""


class Peer:
    """A proved connection to the rank above or one below."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.left = False


def own_address() -> str:
    """Return where ranks of other nodes reach this one."""
    return os.environ.get(ADDRESS, LOOPBACK)


def connect(rank: int, tree: Tree, store: Store, secret: bytes, timeout_s: float, host: str) -> list[Peer]:
    """Open the connection to the rank above and accept those of the ranks below. `host` is where other ranks
    reach this one: 127.0.0.1 if all are on this machine, and then nobody else does.

    Raises:
        StallError: naming the ranks that did not come in time.
    """
    until = time.monotonic() + timeout_s
    # Every rank counts what it makes: so one made after a restart, or beside, has addresses of its own.
    prefix = f"control/{store.add(f'control/made/{rank}', 1)}"
    children, above = tree.children(rank), tree.parent(rank)
    came: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
    peers: dict[int, Peer] = {}
    listener = _listen(host, len(children)) if children else None
    try:
        if listener is not None:
            store.set(f"{prefix}/{rank}", json.dumps([host, listener.getsockname()[1]]))
            threading.Thread(target=_accept, args=(listener, secret, timeout_s, came), daemon=True).start()
        if above is not None:
            peers[above] = Peer(above, _reach(rank, above, store, f"{prefix}/{above}", secret, timeout_s))
        while missing := [child for child in children if child not in peers]:
            try:
                child, connection = came.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                names = ", ".join(map(str, missing[:_SHOWN]))
                raise StallError(f"rank {rank} waited at start-up for rank {names} to connect") from None
            if child in missing:
                peers[child] = Peer(child, connection)
            else:
                connection.close()
    finally:
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()
    return list(peers.values())


def _listen(host: str, backlog: int) -> socket.socket:
    """On the loopback interface, or else on all of them: the name by which others reach this machine may be
    one of loopback here.
    """
    if host == LOOPBACK:
        return socket.create_server((host, 0), backlog=backlog)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=backlog)


def _reach(rank: int, above: int, store: Store, key: str, secret: bytes, timeout_s: float) -> socket.socket:
    try:
        address, port = json.loads(store.get(key))
    except (RuntimeError, TimeoutError) as error:  # torch's own say which key was waited for
        raise StallError(
            f"rank {rank} waited at start-up for rank {above} to say where it listens: {error}"
        ) from error
    try:
        connection = socket.create_connection((address, port), timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greet(connection, secret, timeout_s)
        connection.sendall(struct.pack("!I", rank))
    except StrangerError:
        raise
    except OSError as error:
        raise StallError(
            f"rank {rank} cannot reach rank {above} at {address}, port {port}: {error}. Ranks of different "
            f"nodes reach each other at the address of {ADDRESS}, if it is set on each node"
        ) from error
    return connection


def _accept(
    listener: socket.socket,
    secret: bytes,
    timeout_s: float,
    came: "queue.SimpleQueue[tuple[int, socket.socket]]",
) -> None:
    """Accept until the listener is closed. Who proves nothing holds nobody else up."""
    while listener.fileno() >= 0:
        try:
            connection, _ = listener.accept()
        except OSError:  # it is being closed; or there are too many open files, until others close theirs
            time.sleep(_RETRY_S)
            continue
        threading.Thread(target=_prove, args=(connection, secret, timeout_s, came), daemon=True).start()


def _prove(
    connection: socket.socket,
    secret: bytes,
    timeout_s: float,
    came: "queue.SimpleQueue[tuple[int, socket.socket]]",
) -> None:
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        admit(connection, secret, timeout_s)
        connection.settimeout(timeout_s)
        name = connection.recv(4, socket.MSG_WAITALL)
        if len(name) != 4:
            raise StrangerError("the other end of a connection has not said which rank it is")
    except OSError:
        connection.close()
        return
    came.put((struct.unpack("!I", name)[0], connection))
