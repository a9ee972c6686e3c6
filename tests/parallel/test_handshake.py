"""Who knows the secret is let in; who does not, is slow, or sends back what it heard, is not."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from parallel.handshake import SECRET, StrangerError, admit, greet, new_secret, secret_of_run

OURS, ANOTHER = bytes.fromhex(new_secret()), bytes.fromhex(new_secret())


def meet(opened, accepted):
    """What the functions of two ends of a connection raise, None for nothing."""
    one, other = socket.socketpair()

    def attempt(function, end):
        try:
            function(end)
        except OSError as error:
            return error
        finally:
            end.close()

    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(attempt, opened, one), pool.submit(attempt, accepted, other)]
        return [end.result() for end in ends]


def opening(secret):
    return lambda end: greet(end, secret, 2.0)


def accepting(secret):
    return lambda end: admit(end, secret, 2.0)


def test_who_knows_the_secret_is_let_in():
    assert meet(opening(OURS), accepting(OURS)) == [None, None]


def test_each_end_refuses_a_stranger():
    opened, accepted = meet(opening(ANOTHER), accepting(OURS))
    assert isinstance(opened, StrangerError)
    assert isinstance(accepted, OSError)
    # A stranger that closes before it has heard anything breaks the pipe, which is an OSError.
    opened, accepted = meet(opening(OURS), lambda end: (end.sendall(bytes(64)), end.recv(32)))
    assert isinstance(opened, StrangerError)


def test_a_proof_sent_back_proves_nothing():
    def parrot(end):
        end.sendall(bytes(32))
        heard = end.recv(64, socket.MSG_WAITALL)
        end.sendall(heard[32:])
        end.recv(1)

    _, accepted = meet(parrot, accepting(OURS))
    assert isinstance(accepted, StrangerError)


def test_who_says_nothing_is_not_waited_for():
    one, other = socket.socketpair()
    with one, other, pytest.raises(TimeoutError):
        admit(other, OURS, 0.05)
    assert other.fileno() == -1


def test_a_run_without_a_secret_is_refused(monkeypatch):
    for text in ("", "zz", "00ff"):
        monkeypatch.setenv(SECRET, text)
        with pytest.raises(ValueError, match=SECRET):
            secret_of_run()
    monkeypatch.setenv(SECRET, OURS.hex())
    assert secret_of_run() == OURS
