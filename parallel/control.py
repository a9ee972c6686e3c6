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
- What is long is no hang while it goes on: a rank that says that it is `coming` to an exchange has all who
  wait there begin to wait anew.
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
from typing import Any

from parallel.control_links import LOOPBACK, Peer, Store, connect
from parallel.control_tree import Tree
from parallel.control_values import Layout, LayoutError, Part
from parallel.stalls import StallError

_HEAD = struct.Struct("!IBqB")  # bytes behind it, kind, step, bytes of the tag
_UP, _DOWN, _LATE, _ABORT, _BYE, _COMING = range(6)
_SHOWN = 8  # ranks that an error names
_LARGEST = 2**30
_COMING_S = 5.0  # how often a rank says so, at most
_NOTHING = b"{}"

Key = tuple[str, int]


@dataclass
class _Pending:
    """A reduction under way at this rank; `got` are messages by rank, this one's among them."""

    since: float = field(default_factory=time.monotonic)
    merge: Callable[[list[bytes]], bytes] | None = None
    got: dict[int, bytes] = field(default_factory=dict)
    late: dict[int, list[int]] = field(default_factory=dict)
    told: bool = False  # those above, by a message of this rank or that it is late
    told_below: bool = True  # the answer; else only that there is one
    answer: "Future[bytes] | None" = None  # of this rank, once it has offered


class Control:
    """One rank's place in the tree. Every rank makes one; a world of one opens nothing.

    `host` is the address at which ranks of other nodes reach this one, 127.0.0.1 if there is one node.
    """

    def __init__(
        self, rank: int, tree: Tree, store: Store, secret: bytes, timeout_s: float, host: str = LOOPBACK
    ) -> None:
        """Connect to the rank above and wait for those below.

        Raises:
            StallError: naming the ranks that did not connect in time.
        """
        self.rank, self.tree, self.timeout_s = rank, tree, timeout_s
        self.sent = self.received = 0  # messages, over all time
        self.peers: dict[int, Peer] = {}
        self.problem: str | None = None
        self.came_at = 0.0
        """When any rank last said that it is coming, this one among them: seconds of the monotonic clock."""
        self._often_s = min(_COMING_S, timeout_s / 20)
        self._said_at = self._passed_at = 0.0
        self._pending: dict[Key, _Pending] = defaultdict(_Pending)
        self._layouts: dict[Key, Layout] = {}
        self._answers: dict[Key, Future[bytes]] = {}
        self._numbers: dict[str, int] = defaultdict(int)
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = False
        self._thread: threading.Thread | None = None
        if tree.world == 1:
            return
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        for peer in connect(rank, tree, store, secret, timeout_s, host):
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

    def settle(self, tag: str, step: int, timeout_s: float | None = None) -> dict[str, tuple[int, ...]]:
        """Return what all ranks' numbers came to, by name; waits if that is not known yet, `timeout_s` at
        most where it is given. Once for each offer, or again after a wait that was too short.

        Raises:
            StallError: naming the ranks that have not offered, or that have gone.
        """
        answer = self._answer((tag, step), timeout_s)
        return self._layouts.pop((tag, step)).unpack(answer)

    def share(self, tag: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of all ranks together, by names of which no two ranks give the same: plain ones,
        as JSON. All ranks call it in the same order for a tag, one thread a tag. For what is rare, or small.

        Raises:
            StallError: as `settle`.
        """
        return self._exchange(tag, values)

    def barrier(self, tag: str) -> None:
        """Return when all ranks have come here; otherwise as `share`."""
        self.share(tag, {})

    def gather(self, tag: str, value: Any) -> list[Any]:
        """Return the value of every rank, by rank, on every rank; otherwise as `share`."""
        return self._by_rank(self.share(tag, {str(self.rank): value}))

    def collect(self, tag: str, value: Any) -> list[Any] | None:
        """Return the value of every rank, by rank, on the first rank, and None on the others, which hold no
        more than what goes through them; otherwise as `share`.
        """
        found = self._exchange(tag, {str(self.rank): value}, told=False)
        return self._by_rank(found) if self.rank == 0 else None

    def broadcast(self, tag: str, value: Any, source: int = 0) -> Any:
        """Return the value of the rank `source`, on every rank; otherwise as `share`."""
        return self.share(tag, {"": value} if self.rank == source else {})[""]

    def coming(self, tag: str) -> None:
        """Say that this rank goes on towards the next exchange of `tag`, as often as it likes: those who wait
        there begin to wait anew. The thread that exchanges says so.
        """
        now = time.monotonic()
        if now - self._said_at < self._often_s:
            return
        self._said_at = self.came_at = now
        key = f"json:{tag}", self._numbers[tag]
        if self._thread is not None:
            self._do(lambda: self._renew(key))

    def close(self) -> None:
        """Leave, once what was sent has gone out. Whoever still waits for this rank learns it."""
        if self._thread is not None:
            self._do(self._leave)
            self._thread.join(self.timeout_s)
            self._thread = None

    def _exchange(self, tag: str, values: Mapping[str, Any], told: bool = True) -> dict[str, Any]:
        key = f"json:{tag}", self._numbers[tag]
        self._numbers[tag] += 1
        self._offer(key, json.dumps(values).encode(), _merge_json, told)
        found: dict[str, Any] = json.loads(self._answer(key))
        return found

    def _by_rank(self, found: Mapping[str, Any]) -> list[Any]:
        return [found[str(rank)] for rank in range(self.tree.world)]

    # Of the caller's thread.

    def _offer(
        self, key: Key, message: bytes, merge: Callable[[list[bytes]], bytes], told: bool = True
    ) -> None:
        answer = self._answers[key] = Future[bytes]()
        if self._thread is None:
            answer.set_result(message)
        else:
            self._do(lambda: self._offered(key, message, merge, told, answer))

    def _answer(self, key: Key, timeout_s: float | None = None) -> bytes:
        # Those above know who is late, and say so after `timeout_s`.
        longest, since = timeout_s or 1.5 * self.timeout_s, time.monotonic()
        while True:
            try:
                answer = self._answers[key].result(max(0.0, since + longest - time.monotonic()))
                break
            except NotYet:
                pending = self._pending.get(key)
                if timeout_s is None and pending is not None and pending.since > since:
                    since = pending.since
                    continue
            above = self.tree.parent(self.rank)
            raise StallError(
                f"rank {self.rank} waited at {_named(key)} for rank {self.rank if above is None else above}: "
                f"no answer in {longest:g} s"
            )
        del self._answers[key]
        return answer

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

    def _move(self, peer: Peer, events: int) -> None:
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

    def _read(self, peer: Peer) -> None:
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

    def _heed(self, peer: Peer, kind: int, key: Key, message: bytes) -> None:
        if kind == _UP:
            self._arrived(key, peer.rank, message)
        elif kind == _DOWN:
            self._known(key, message, below=message)
        elif kind == _LATE:
            self._pending[key].late[peer.rank] = json.loads(message)
        elif kind == _COMING:
            self._renew(key, peer.rank)
        elif kind == _ABORT:
            self._fail(message.decode(), besides=peer.rank)
        elif kind == _BYE:
            self._gone(peer, "it left the run")

    def _offered(
        self,
        key: Key,
        message: bytes,
        merge: Callable[[list[bytes]], bytes],
        told: bool,
        answer: "Future[bytes]",
    ) -> None:
        pending = self._pending[key]
        pending.merge, pending.told_below, pending.answer = merge, told, answer
        self._arrived(key, self.rank, message)

    def _arrived(self, key: Key, rank: int, message: bytes) -> None:
        pending = self._pending[key]
        pending.got[rank] = message
        if self.problem is not None:
            self._raise(key)
        elif pending.merge is not None and not self._missing(pending):
            try:
                merged = pending.merge([message for _, message in sorted(pending.got.items())])
            except LayoutError as error:
                self._fail(f"{_named(key)}: ranks {sorted(pending.got)} offered {error}")
                return
            pending.told = True
            above = self.tree.parent(self.rank)
            if above is None:
                self._known(key, merged, below=merged if pending.told_below else _NOTHING)
            else:
                self._send(above, _UP, key, merged)
        else:
            self._check_present(key, pending)

    def _check_present(self, key: Key, pending: _Pending) -> None:
        gone = [rank for rank in self._missing(pending) if rank in self.peers and self.peers[rank].left]
        if gone:
            self._fail(f"rank {self.rank} waited at {_named(key)} for rank {gone[0]}: it left the run")

    def _known(self, key: Key, answer: bytes, below: bytes) -> None:
        for child in self.tree.children(self.rank):
            self._send(child, _DOWN, key, below)
        pending = self._pending.pop(key)
        assert pending.answer is not None
        pending.answer.set_result(answer)

    def _missing(self, pending: _Pending) -> list[int]:
        return [rank for rank in (self.rank, *self.tree.children(self.rank)) if rank not in pending.got]

    def _look_for_late(self) -> None:
        now, above = time.monotonic(), self.tree.parent(self.rank)
        for key, pending in list(self._pending.items()):
            if pending.told or not self._missing(pending):
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

    def _renew(self, key: Key, told_by: int | None = None) -> None:
        """Wait anew at `key`, since a rank is coming: word of it goes up, and from the first rank to all."""
        now, above = time.monotonic(), self.tree.parent(self.rank)
        self.came_at = now
        # None is made: a rank at which nothing has arrived yet does not wait.
        if (pending := self._pending.get(key)) is not None:
            pending.since, pending.told = now, False
            pending.late.clear()
        if above is not None and told_by == above:
            self._tell_below(key)
        elif now - self._passed_at >= self._often_s / 2:  # else others have said so just now
            self._passed_at = now
            if above is None:
                self._tell_below(key)
            else:
                self._send(above, _COMING, key, b"")

    def _tell_below(self, key: Key) -> None:
        for child in self.tree.children(self.rank):
            self._send(child, _COMING, key, b"")

    def _gone(self, peer: Peer, why: str) -> None:
        if peer.left:
            return
        peer.left = True
        peer.outgoing.clear()
        self._selector.unregister(peer.connection)
        if self._closing or self.problem is not None:
            return
        if why != "it left the run":
            self._fail(f"rank {self.rank} lost rank {peer.rank}: {why}")
        else:
            for key, pending in self._pending.items():
                if peer.rank == self.tree.parent(self.rank) or peer.rank not in pending.got:
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
        for key in list(self._pending):
            self._raise(key)

    def _raise(self, key: Key) -> None:
        answer = self._pending.pop(key).answer
        if answer is not None:
            answer.set_exception(StallError(self.problem))

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

    def _watch(self, peer: Peer) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outgoing else 0)
        self._selector.modify(peer.connection, events, peer)


def _merge_json(messages: list[bytes]) -> bytes:
    """Objects without common names, as one: texts put together, since an index may be large."""
    return b"{%b}" % b", ".join(message[1:-1] for message in messages if message != _NOTHING)


def _named(key: Key) -> str:
    tag, step = key
    return tag.removeprefix("json:") if tag.startswith("json:") else f"step {step}: {tag}"
