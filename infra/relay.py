"""Connections between the nodes of a job that only those who know its secret can open.

    process of a node ── 127.0.0.1 ── tunnel ── network, after a handshake ── gate ── 127.0.0.1 ── store

torch's stores take whatever arrives from whoever connects, and torchrun unpickles it. So they listen on the
loopback interface of their node alone. A gate there takes connections from other nodes, has each prove that
it knows the secret (parallel/handshake.py), and only then hands its bytes on, to the port of its own node
that it names. On every other node a tunnel on the loopback interface opens these connections. Nothing that a
stranger sends is looked at.
"""

import asyncio
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from parallel.handshake import StrangerError, admit, greet

LOOPBACK = "127.0.0.1"
ANSWER_S = 10.0  # for the other end to prove who it is
BACKLOG = 2048  # connections that wait to be accepted: the ranks of all nodes come at once
_RETRY_S = 0.2
_PORT_BYTES = 2


class Relay:
    """The gates and tunnels of one process, served by one thread until `close`."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._loop = asyncio.new_event_loop()
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        threading.Thread(target=self._loop.run_forever, name="relay", daemon=True).start()

    def gate(self, port: int, default: int = 0) -> int:
        """Let in who knows the secret, on every interface; returns the port (0: any free one). Who names port
        0 is led to port `default`.

        Raises:
            OSError: if the port is in use.
        """

        async def let_in(connection: socket.socket) -> None:
            await self._let_in(connection, default)

        _lift_limit_of_files()
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=BACKLOG)
        return self._listen(listener, let_in)

    def tunnel(self, host: str, port: int, target: int, patience_s: float) -> int:
        """Return a port of this machine that leads through the gate at `host` and `port` to port `target`
        there. A gate that is not there yet is asked again for `patience_s` seconds.
        """

        async def through(connection: socket.socket) -> None:
            await self._go_through(connection, host, port, target, patience_s)

        return self._listen(socket.create_server((LOOPBACK, 0)), through)

    def close(self) -> None:
        """End all connections and listen no more."""
        for listener in self._listeners:
            listener.close()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _listen(self, listener: socket.socket, serve: Any) -> int:
        listener.setblocking(False)
        self._listeners.append(listener)
        self._begin(self._accept(listener, serve))
        port: int = listener.getsockname()[1]
        return port

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _accept(self, listener: socket.socket, serve: Any) -> None:
        said = False
        while listener.fileno() >= 0:  # until it is closed
            try:
                connection, _ = await self._loop.sock_accept(listener)
            except OSError as error:  # such as too many open files, until others close theirs
                if not said:
                    print(
                        f"agent: no connection can be taken, which is tried again: {error}", file=sys.stderr
                    )
                said = True
                await asyncio.sleep(_RETRY_S)
                continue
            task = self._loop.create_task(serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _let_in(self, connection: socket.socket, default: int) -> None:
        try:
            inner = await _beside(lambda: self._admitted(connection, default))
        except OSError:  # a stranger, or someone who is gone
            connection.close()
            return
        await _join(self._loop, connection, inner)

    def _admitted(self, connection: socket.socket, default: int) -> socket.socket:
        admit(connection, self._secret, ANSWER_S)
        connection.settimeout(ANSWER_S)
        target = connection.recv(_PORT_BYTES, socket.MSG_WAITALL)
        if len(target) < _PORT_BYTES:
            raise ConnectionError("closed before it named a port")
        return socket.create_connection((LOOPBACK, int.from_bytes(target) or default))

    async def _go_through(
        self, connection: socket.socket, host: str, port: int, target: int, patience_s: float
    ) -> None:
        try:
            until = time.monotonic() + patience_s
            outer = await _beside(lambda: self._greeted(host, port, target, until))
        except OSError as error:
            print(f"agent: no way to {host}:{port}: {error}", file=sys.stderr, flush=True)
            connection.close()
            return
        await _join(self._loop, connection, outer)

    def _greeted(self, host: str, port: int, target: int, deadline: float) -> socket.socket:
        while True:
            try:
                outer = socket.create_connection((host, port), ANSWER_S)
                greet(outer, self._secret, ANSWER_S)
                outer.sendall(target.to_bytes(_PORT_BYTES))
                return outer
            except StrangerError:
                raise
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)


async def _beside(act: Callable[[], socket.socket]) -> socket.socket:
    """Return what `act` does on a thread of its own: who is silent in a handshake holds nobody else up.

    Raises:
        OSError: as `act`, or if there can be no more threads for ANSWER_S seconds.
    """
    done: Future[socket.socket] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:
            done.set_exception(error)

    until = time.monotonic() + ANSWER_S
    while True:
        try:
            threading.Thread(target=run, name="handshake", daemon=True).start()
            break
        except RuntimeError as error:
            if time.monotonic() > until:
                raise OSError(f"no thread for a handshake in {ANSWER_S:g} s: {error}") from error
            await asyncio.sleep(_RETRY_S)
    return await asyncio.wrap_future(done)


def _lift_limit_of_files() -> None:
    """The node that holds the stores has two sockets for each rank of the world."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class _End(asyncio.Protocol):
    """One end of a connection that goes on at `other`."""

    transport: asyncio.Transport
    other: "_End"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.pause_reading()  # until there is an other end

    def data_received(self, data: bytes) -> None:
        self.other.transport.write(data)

    def eof_received(self) -> bool:
        if self.other.transport.can_write_eof() and not self.other.transport.is_closing():
            self.other.transport.write_eof()
        return True  # the other direction stays open

    def connection_lost(self, error: Exception | None) -> None:
        self.other.transport.close()

    def pause_writing(self) -> None:
        self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        self.other.transport.resume_reading()


async def _join(loop: asyncio.AbstractEventLoop, one: socket.socket, other: socket.socket) -> None:
    """Hand on what arrives at either socket to the other one."""
    ends = _End(), _End()
    ends[0].other, ends[1].other = ends[1], ends[0]
    for end, connection in zip(ends, (one, other), strict=True):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setblocking(False)
        await loop.connect_accepted_socket(lambda end=end: end, connection)  # type: ignore[misc]
    for end in ends:
        end.transport.resume_reading()
