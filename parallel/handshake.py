"""Two processes of a run prove to each other that they know its secret, without sending it.

The one who accepts a connection and the one who opened it each send random bytes, and answer the other's
with an HMAC (RFC 2104) of both, keyed by the secret. Before that nothing that arrived is looked at other than
as bytes of a fixed number, so a stranger's connection costs a comparison and is closed.

The secret is random, made by who launches the run, and handed on in the environment of its processes alone.
"""

import hashlib
import hmac
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager

SECRET = "OMNI_SECRET"  # the variable, in hexadecimal
_NONCE = 32
_DIGEST = hashlib.sha256().digest_size


class StrangerError(ConnectionError):
    """The other end of a connection does not know the secret of the run."""


def new_secret() -> str:
    """Return a secret that nobody can guess, as it stands in the environment."""
    return secrets.token_hex(32)


def secret_of_run() -> bytes:
    """Return the secret that this process was started with.

    Raises:
        ValueError: if it was started with none, or with one that is not what `new_secret` returns.
    """
    text = os.environ.get(SECRET, "")
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) < 32:
        raise ValueError(
            f"{SECRET} is not set to the secret of this run: start ranks with `omni train`, or set it to the "
            f"same 64 random hexadecimal digits on all nodes (python -c 'import secrets; "
            f"print(secrets.token_hex(32))')"
        )
    return secret


def greet(connection: socket.socket, secret: bytes, timeout_s: float) -> None:
    """Prove to the one who accepted `connection`, which this process opened, and have them prove.

    Raises:
        StrangerError: if they do not know the secret.
        OSError: if they do not answer in time.
    """
    with _within(connection, timeout_s):
        own = secrets.token_bytes(_NONCE)
        connection.sendall(own)
        theirs = _receive(connection, _NONCE)
        _check(_receive(connection, _DIGEST), secret, b"accepted", own, theirs)
        connection.sendall(_proof(secret, b"opened", own, theirs))


def admit(connection: socket.socket, secret: bytes, timeout_s: float) -> None:
    """As `greet`, of a connection that this process accepted."""
    with _within(connection, timeout_s):
        theirs = _receive(connection, _NONCE)
        own = secrets.token_bytes(_NONCE)
        connection.sendall(own + _proof(secret, b"accepted", theirs, own))
        _check(_receive(connection, _DIGEST), secret, b"opened", theirs, own)


def _proof(secret: bytes, role: bytes, opened: bytes, accepted: bytes) -> bytes:
    """The role is part of it: a proof that is sent back proves nothing."""
    return hmac.digest(secret, role + opened + accepted, "sha256")


def _check(proof: bytes, secret: bytes, role: bytes, opened: bytes, accepted: bytes) -> None:
    if not hmac.compare_digest(proof, _proof(secret, role, opened, accepted)):
        raise StrangerError("the other end of a connection does not know the secret of this run")


@contextmanager
def _within(connection: socket.socket, timeout_s: float) -> Iterator[None]:
    before = connection.gettimeout()
    connection.settimeout(timeout_s)
    try:
        yield
    finally:
        connection.settimeout(before)


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        piece = connection.recv(size - len(received))
        if not piece:
            raise StrangerError("the other end closed a connection instead of proving who it is")
        received += piece
    return received
