"""The control plane of a run: all ranks meet along one tree, in numbers offered early and settled late.

A rank offers a reduction under a tag and a step and goes on; a thread of its own waits for the ranks below,
merges, sends up and hands the answer down. `settle` waits only if the answer is not there yet. Texts of rare
use travel as JSON the same way, under tags of their own, so that threads of a rank do not meet each other.

Invariants:
- Every rank offers the same (tag, step), each once, in whatever order, with the same layout of numbers.
- What arrives is looked at only behind a proof that the other end knows the run's secret, and is numbers or
  JSON: nothing is unpickled.
- A wait ends: with the answer, with an error that names the ranks that have not sent, after `timeout_s` from
  when their offer was first due at a rank above them, or at once when a process ends. One error ends all.
"""

import json
import queue
import selectors
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from parallel.control_tree import Tree
from parallel.control_values import Layout, LayoutError, Part
from parallel.handshake import StrangerError, admit, greet
from parallel.stalls import StallError

_HEAD = struct.Struct("!IBqB")  # bytes behind it, kind, step, bytes of the tag
_UP, _DOWN, _LATE, _ABORT, _BYE = range(5)
_SHOWN = 8  # ranks that an error names
_LARGEST = 2**30

Key = tuple[str, int]


class Store(Protocol):
    """Where ranks leave addresses: what torch's stores can do."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, 0 at first, and return what it is then."""

    def set(self, key: str, value: str) -> None:
        """Leave a value."""

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""


@dataclass
class _Pending:
    """A reduction under way at this rank; `got` are messages by rank, this one's among them."""

    since: float = field(default_factory=time.monotonic)
    merge: Callable[[list[bytes]], bytes] | None = None
    got: dict[int, bytes] = field(default_factory=dict)
    late: dict[int, list[int]] = field(default_factory=dict)
    told: bool = False
    answer: "Future[bytes]" = field(default_factory=Future)


class _Peer:
    """A proved connection to the rank above or one below."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.left = False


class Control:
    """One rank's place in the tree. Every rank makes one; a world of one opens nothing.

    `host` is the address at which ranks of other nodes reach this one, 127.0.0.1 if there is one node.
    """

    def __init__(
        self, rank: int, tree: Tree, store: Store, secret: bytes, timeout_s: float, host: str = "127.0.0.1"
    ) -> None:
        """Connect to the rank above and wait for those below.

        Raises:
            StallError: naming the ranks that did not connect in time.
        """
        self.rank, self.tree, self.timeout_s = rank, tree, timeout_s
        self.sent = self.received = 0  # messages, over all time
        self.peers: dict[int, _Peer] = {}
        self.problem: str | None = None
        self._pending: dict[Key, _Pending] = defaultdict(_Pending)
        self._layouts: dict[Key, Layout] = {}
        self._numbers: dict[str, int] = defaultdict(int)
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = False
        self._thread: threading.Thread | None = None
        if tree.world == 1:
            return
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        for peer in _connect(rank, tree, store, secret, timeout_s, host):
            self.peers[peer.rank] = peer
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        for peer in self.peers.values():
            peer.connection.setblocking(False)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)
        self._thread.start()

    def offer(self, tag: str, step: int, parts: Mapping[str, Part]) -> None:
        """Start reducing numbers, each in int64. Returns at once."""
        layout = Layout.of(parts)
        self._layouts[tag, step] = layout
        self._offer((tag, step), layout.pack(parts), layout.merge)

    def settle(self, tag: str, step: int) -> dict[str, tuple[int, ...]]:
        """Return what all ranks' numbers came to, by name; waits if that is not known yet.

        Raises:
            StallError: naming the ranks that have not offered, or that have gone.
        """
        return self._layouts.pop((tag, step)).unpack(self._answer((tag, step)))

    def gather(self, tag: str, value: Any) -> list[Any]:
        """Return the value of every rank, by rank, on every rank: plain ones, as JSON. All ranks call it in
        the same order for a tag, one thread a tag. For what is rare: it holds a value a rank.

        Raises:
            StallError: as `settle`.
        """
        found = self._exchange(tag, {str(self.rank): value})
        return [found[str(rank)] for rank in range(self.tree.world)]

    def broadcast(self, tag: str, value: Any, source: int = 0) -> Any:
        """Return the value of the rank `source`, on every rank; as `gather`, of which it holds one value."""
        return self._exchange(tag, {str(source): value} if self.rank == source else {})[str(source)]

    def close(self) -> None:
        """Leave, once what was sent has gone out. Whoever still waits for this rank learns it."""
        if self._thread is not None:
            self._do(self._leave)
            self._thread.join(self.timeout_s)
            self._thread = None

    def _exchange(self, tag: str, values: dict[str, Any]) -> dict[str, Any]:
        key = f"json:{tag}", self._numbers[tag]
        self._numbers[tag] += 1
        self._offer(key, json.dumps(values).encode(), _merge_json)
        return json.loads(self._answer(key))

    # Of the caller's thread.

    def _offer(self, key: Key, message: bytes, merge: Callable[[list[bytes]], bytes]) -> None:
        if self._thread is None:
            self._pending[key].answer.set_result(message)
        else:
            self._do(lambda: self._arrived(key, self.rank, message, merge))

    def _answer(self, key: Key) -> bytes:
        if self._thread is not None:
            made: Future[_Pending] = Future()
            self._do(lambda: made.set_result(self._pending[key]))
            pending = made.result(self.timeout_s)
        else:
            pending = self._pending[key]
        try:
            # Those above know who is late, and say so after `timeout_s`.
            return pending.answer.result(1.5 * self.timeout_s)
        except NotYet:
            above = self.tree.parent(self.rank)
            raise StallError(
                f"rank {self.rank} waited at {_named(key)} for rank {self.rank if above is None else above}: "
                f"no answer in {1.5 * self.timeout_s:g} s"
            ) from None
        finally:
            if self._thread is None:
                self._forget(key)
            else:
                self._do(lambda: self._forget(key))

    def _forget(self, key: Key) -> None:
        self._pending.pop(key, None)

    def _do(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)
        with suppress(OSError):
            self._wake.send(b"\0")

    # Of the thread that serves.

    def _serve(self) -> None:
        while not (self._closing and not any(peer.outgoing for peer in self.peers.values())):
            try:
                self._turn()
            except Exception as error:  # or all would wait for a thread that is no more
                self._fail(f"rank {self.rank}: the control plane failed: {error!r}")
        for peer in self.peers.values():
            peer.connection.close()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _turn(self) -> None:
        """Take in what has arrived, send what can be sent, do what this rank's other threads ask for."""
        for key, events in self._selector.select(self.timeout_s / 20):
            if key.data is None:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
            else:
                self._move(key.data, events)
        while not self._tasks.empty():
            self._tasks.get()()
        self._look_for_late()

    def _move(self, peer: _Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                del peer.outgoing[: peer.connection.send(peer.outgoing)]
                self._watch(peer)
            if events & selectors.EVENT_READ:
                piece = peer.connection.recv(2**20)
                if not piece:
                    raise ConnectionResetError("its end of the connection was closed")
                peer.incoming += piece
                self._read(peer)
        except BlockingIOError:
            pass
        except (OSError, ValueError) as error:
            self._gone(peer, str(error))

    def _read(self, peer: _Peer) -> None:
        while len(peer.incoming) >= _HEAD.size:
            size, kind, step, tag_size = _HEAD.unpack_from(peer.incoming)
            if size > _LARGEST or tag_size > size:
                raise ValueError(f"a message of {size} bytes")
            if len(peer.incoming) < _HEAD.size + size:
                return
            body = bytes(peer.incoming[_HEAD.size : _HEAD.size + size])
            del peer.incoming[: _HEAD.size + size]
            key = body[:tag_size].decode(), step
            self.received += kind in (_UP, _DOWN)
            self._heed(peer, kind, key, body[tag_size:])

    def _heed(self, peer: _Peer, kind: int, key: Key, message: bytes) -> None:
        if kind == _UP:
            self._arrived(key, peer.rank, message)
        elif kind == _DOWN:
            self._known(key, message)
        elif kind == _LATE:
            self._pending[key].late[peer.rank] = json.loads(message)
        elif kind == _ABORT:
            self._fail(message.decode(), besides=peer.rank)
        elif kind == _BYE:
            self._gone(peer, "it left the run")

    def _arrived(
        self, key: Key, rank: int, message: bytes, merge: Callable[[list[bytes]], bytes] | None = None
    ) -> None:
        pending = self._pending[key]
        pending.got[rank] = message
        pending.merge = pending.merge or merge
        if self.problem is not None:
            self._raise(pending)
        elif pending.merge is not None and not self._missing(pending):
            try:
                merged = pending.merge([message for _, message in sorted(pending.got.items())])
            except LayoutError as error:
                self._fail(f"{_named(key)}: ranks {sorted(pending.got)} offered {error}")
                return
            pending.told = True
            above = self.tree.parent(self.rank)
            if above is None:
                self._known(key, merged)
            else:
                self._send(above, _UP, key, merged)
        else:
            self._check_present(key, pending)

    def _check_present(self, key: Key, pending: _Pending) -> None:
        gone = [rank for rank in self._missing(pending) if rank in self.peers and self.peers[rank].left]
        if gone:
            self._fail(f"rank {self.rank} waited at {_named(key)} for rank {gone[0]}: it left the run")

    def _known(self, key: Key, answer: bytes) -> None:
        for child in self.tree.children(self.rank):
            self._send(child, _DOWN, key, answer)
        pending = self._pending[key]
        pending.got.clear()
        pending.told = True
        if not pending.answer.done():
            pending.answer.set_result(answer)

    def _missing(self, pending: _Pending) -> list[int]:
        return [rank for rank in (self.rank, *self.tree.children(self.rank)) if rank not in pending.got]

    def _look_for_late(self) -> None:
        now, above = time.monotonic(), self.tree.parent(self.rank)
        for key, pending in list(self._pending.items()):
            if pending.told or pending.answer.done() or not self._missing(pending):
                continue
            late = sorted({r for rank in self._missing(pending) for r in pending.late.get(rank, [rank])})
            if above is not None and now - pending.since > self.timeout_s / 2:
                pending.told = True
                self._send(above, _LATE, key, json.dumps(late[: _SHOWN + 1]).encode())
            elif above is None and now - pending.since > self.timeout_s:
                names = ", ".join(map(str, late[:_SHOWN])) + (" and more" if len(late) > _SHOWN else "")
                self._fail(
                    f"all ranks waited at {_named(key)} for rank {names}: nothing was sent in "
                    f"{self.timeout_s:g} s"
                )

    def _gone(self, peer: _Peer, why: str) -> None:
        if peer.left:
            return
        peer.left = True
        peer.outgoing.clear()
        self._selector.unregister(peer.connection)
        waits = any(not pending.answer.done() for pending in self._pending.values())
        if self._closing or self.problem is not None:
            return
        if why != "it left the run":
            self._fail(f"rank {self.rank} lost rank {peer.rank}: {why}")
        elif waits:
            for key, pending in list(self._pending.items()):
                if not pending.answer.done() and (
                    peer.rank == self.tree.parent(self.rank) or peer.rank not in pending.got
                ):
                    self._fail(f"rank {self.rank} waited at {_named(key)} for rank {peer.rank}: {why}")
                    return

    def _fail(self, problem: str, besides: int | None = None) -> None:
        """End what is under way and what will be offered, here and on all other ranks."""
        if self.problem is not None:
            return
        self.problem = problem
        for rank in self.peers:
            if rank != besides:
                self._send(rank, _ABORT, ("", 0), problem.encode())
        for pending in self._pending.values():
            self._raise(pending)

    def _raise(self, pending: _Pending) -> None:
        if not pending.answer.done():
            pending.answer.set_exception(StallError(self.problem))

    def _leave(self) -> None:
        for rank in self.peers:
            self._send(rank, _BYE, ("", 0), b"")
        self._closing = True

    def _send(self, rank: int, kind: int, key: Key, message: bytes) -> None:
        peer = self.peers[rank]
        if peer.left:
            if kind == _UP:
                self._fail(f"rank {self.rank} waited at {_named(key)} for rank {rank}: it left the run")
            return
        self.sent += kind in (_UP, _DOWN)
        tag = key[0].encode()
        peer.outgoing += _HEAD.pack(len(tag) + len(message), kind, key[1], len(tag)) + tag + message
        self._watch(peer)

    def _watch(self, peer: _Peer) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outgoing else 0)
        self._selector.modify(peer.connection, events, peer)


def _connect(rank: int, tree: Tree, store: Store, secret: bytes, timeout_s: float, host: str) -> list[_Peer]:
    """Open the connection to the rank above and accept those of the ranks below."""
    until = time.monotonic() + timeout_s
    # Every rank counts what it makes: so one made after a restart, or beside, has addresses of its own.
    prefix = f"control/{store.add(f'control/made/{rank}', 1)}"
    children, above = tree.children(rank), tree.parent(rank)
    came: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
    peers: dict[int, _Peer] = {}
    listener = socket.create_server((host, 0), backlog=max(1, len(children))) if children else None
    try:
        if listener is not None:
            store.set(f"{prefix}/{rank}", json.dumps(listener.getsockname()[:2]))
            threading.Thread(target=_accept, args=(listener, secret, timeout_s, came), daemon=True).start()
        if above is not None:
            address, port = json.loads(store.get(f"{prefix}/{above}"))
            connection = socket.create_connection((address, port), timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greet(connection, secret, timeout_s)
            connection.sendall(struct.pack("!I", rank))
            peers[above] = _Peer(above, connection)
        while missing := [child for child in children if child not in peers]:
            try:
                child, connection = came.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                names = ", ".join(map(str, missing[:_SHOWN]))
                raise StallError(f"rank {rank} waited at start-up for rank {names} to connect") from None
            if child in missing:
                peers[child] = _Peer(child, connection)
            else:
                connection.close()
    finally:
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()
    return list(peers.values())


def _accept(
    listener: socket.socket,
    secret: bytes,
    timeout_s: float,
    came: "queue.SimpleQueue[tuple[int, socket.socket]]",
) -> None:
    """Accept until the listener is closed. Who proves nothing holds nobody else up."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
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


def _merge_json(messages: list[bytes]) -> bytes:
    merged: dict[str, Any] = {}
    for message in messages:
        merged |= json.loads(message)
    return json.dumps(merged).encode()


def _named(key: Key) -> str:
    tag, step = key
    return tag.removeprefix("json:") if tag.startswith("json:") else f"step {step}: {tag}"
