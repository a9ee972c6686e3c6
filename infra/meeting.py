"""How the agents of a launch meet, and give their ranks a store, so that no stranger takes part.

The agent of one machine keeps what it knows of itself in memory, and everything else stays on the loopback
interface. Those of several nodes meet at a store of the first one, which other nodes reach through its gate
alone (infra/relay.py). What torchrun pickles there is signed with the run's secret, and nothing else is
unpickled: other users of a node reach its loopback interface.
"""

import hmac
import os
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from infra.relay import BACKLOG, LOOPBACK, Relay
from parallel.control_links import ADDRESS
from parallel.handshake import secret_of_run

_PORTS = "OMNI_STORE_PORTS"
_ENDPOINT_PORT = 29400  # torchrun's own
_READ_S = 60
_SIGNATURE_BYTES = 32


def meet(params: RendezvousParameters) -> "FreshStores":
    """Return the rendezvous of an agent, in place of torchrun's "c10d".

    Raises:
        RendezvousConnectionError: if the other agents cannot be reached, or there is no secret to share.
    """
    # torch's own store for ranks is kept for all starts, and listens on every interface.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    timeout_s = params.get_as_int("read_timeout", _READ_S) or _READ_S
    if params.max_nodes == 1:
        _keep_communicators_on_loopback()
        return FreshStores(_handler(HashStore(), params), None, 0, timeout_s)
    host, port = parse_rendezvous_endpoint(params.endpoint, _ENDPOINT_PORT)
    try:
        relay = Relay(secret_of_run())
        store, gate = _meeting_point(relay, host, port, params.get_as_bool("is_host"), timeout_s)
    except (OSError, RuntimeError, ValueError) as error:
        raise RendezvousConnectionError(f"{host}:{port}: {error}") from error
    return FreshStores(_handler(store, params), relay, gate, timeout_s, params.local_addr)


def _meeting_point(
    relay: Relay, host: str, port: int, is_host: bool | None, timeout_s: float
) -> tuple[Store, int]:
    """Return the store at which agents meet, and the port of this agent's own gate. Where nobody says which
    agent holds the store, it is the first one on the machine that `host` names.
    """
    if is_host or (is_host is None and _matches_machine_hostname(host)):
        store = _loopback_store(timeout_s)
        try:
            return store, relay.gate(port, default=store.port)
        except OSError:
            if is_host:
                raise
    return _client(relay.tunnel(host, port, 0, timeout_s), timeout_s), relay.gate(0)


def _handler(store: Store, params: RendezvousParameters) -> RendezvousHandler:
    return create_handler(store, SignedBackend(store, params.run_id), params)


class SignedBackend(C10dRendezvousBackend):
    """torchrun's, with a state that the run's secret signs, so that nothing else is unpickled."""

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """See RendezvousBackend."""
        result = super().set_state(_signature(state) + state, token)
        return None if result is None else (result[0], result[1], result[0] == state)

    def _decode_state(self, base64_state: bytes) -> tuple[bytes, Any] | None:
        decoded = super()._decode_state(base64_state)
        if decoded is None:
            return None
        signed, token = decoded
        signature, state = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, _signature(state)):
            raise RendezvousStateError("the state of the rendezvous was not signed with this run's secret")
        return state, token


def _signature(state: bytes) -> bytes:
    return hmac.digest(secret_of_run(), b"rendezvous" + state, "sha256")


def _keep_communicators_on_loopback() -> None:
    """Have what ranks listen with (gloo; NCCL as it starts) reached from this machine alone."""
    if sys.platform == "linux":
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")


def _address_towards(host: str) -> str:
    """The address of this machine by which it reaches another one. Nothing is sent."""
    for family, kind, protocol, _, target in socket.getaddrinfo(host, _ENDPOINT_PORT, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return socket.getfqdn()


def _loopback_store(timeout_s: float) -> TCPStore:
    """Return a store that listens on the loopback interface alone; torch's own way is all interfaces."""
    listener = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def _client(port: int, timeout_s: float) -> TCPStore:
    return TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=timeout_s))


class FreshStores(RendezvousHandler):
    """A rendezvous that gives the workers of each round a store of their own, held by the first agent.

    Others reach it through the `relay` of their agent, at the port `gate` of that one; one machine has none.
    `address` is where other nodes reach this one, if somebody has said so.
    """

    def __init__(
        self,
        inner: RendezvousHandler,
        relay: Relay | None,
        gate: int,
        timeout_s: float,
        address: str | None = None,
    ) -> None:
        self._inner = inner
        self._address = address
        self._relay = relay
        self._gate = gate
        self._timeout_s = timeout_s
        self._store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """Workers do not start a store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other agents; the store of the round before is closed."""
        info = self._inner.next_rendezvous()
        assert info.bootstrap_store_info is not None
        # Handed on to the workers, which connect with those of other nodes by themselves.
        os.environ[ADDRESS] = self._address_of(info.rank, info.bootstrap_store_info.master_addr)
        if info.rank == 0:
            self._store = _loopback_store(self._timeout_s)
            info.store.set(_PORTS, f"{self._gate} {self._store.port}")
            port = self._store.port
        else:
            assert self._relay is not None
            gate, target = map(int, info.store.get(_PORTS).split())
            address = info.bootstrap_store_info.master_addr
            port = self._relay.tunnel(address, gate, target, self._timeout_s)
        return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(LOOPBACK, port))

    def _address_of(self, rank: int, first: str) -> str:
        """Return where other nodes reach this one; `first` is where they reach the first."""
        if self._relay is None:
            return LOOPBACK
        return self._address or (first if rank == 0 else _address_towards(first))

    def get_backend(self) -> str:
        """See RendezvousHandler, as for all that follow."""
        return self._inner.get_backend()

    def is_closed(self) -> bool:
        """See RendezvousHandler."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """See RendezvousHandler."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """See RendezvousHandler."""
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        """See RendezvousHandler."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """See RendezvousHandler."""
        return self._inner.shutdown()
