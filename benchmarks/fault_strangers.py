"""Faults that come over connections, and of programs that a machine loads.

Each function does one to a trial. Its docstring says what, and after "Must:" what must come of it.
"""

import os
import socket
from collections.abc import Callable
from contextlib import suppress

import psutil
from fault_processes import two_that_differ
from fault_reference import check
from fault_runs import HERE, SAVE_EVERY, Trial

from parallel.handshake import StrangerError, greet, new_secret

TRIES = 20
WAIT_S = 0.5


def garbage_to_ports(trial: Trial) -> None:
    """Everything that listens gets garbage, again and again. Must: nothing; exact."""

    def speak(port: int) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), WAIT_S) as stranger:
            stranger.sendall(trial.rng.randbytes(trial.rng.choice([1, 64, 10_000])))

    _to_all_ports(trial, speak)


def wrong_secret(trial: Trial) -> None:
    """To everything that listens come handshakes with another secret. Must: none is let in; exact."""
    secret = bytes.fromhex(new_secret())
    let_in: list[int] = []

    def speak(port: int) -> None:
        with (
            suppress(OSError, StrangerError),
            socket.create_connection(("127.0.0.1", port), WAIT_S) as stranger,
        ):
            greet(stranger, secret, WAIT_S)
            let_in.append(port)

    _to_all_ports(trial, speak)
    check(not let_in, f"let in at {let_in}")


def cut_control(trial: Trial) -> None:
    """The control plane's connections of a rank are cut. Must: named at once with both ranks; survived by a
    restart.
    """
    trial.restarts = 3
    step, rank = trial.rng.randrange(SAVE_EVERY, 40), trial.rng.randrange(2)
    trial.with_fault("cut_control", step, rank)
    trial.ends_with(0)
    trial.says("lost rank")
    trial.is_exact()


def poisoned_server(trial: Trial) -> None:
    """The process that ranks are forked from finds that it cannot be used on a GPU. Must: ranks start anew
    by themselves and one line says so; exact.
    """
    trial.prepare()
    trial.moment = "start"
    line = ["--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    trial.agent(line, "poisoned_worker", {"PYTHONPATH": path})
    trial.ends_with(0)
    trial.says("importing poisoned_worker touched a GPU")
    trial.is_exact()


def preloaded(trial: Trial) -> None:
    """A node loads another library before all others (LD_PRELOAD). Must: named with exit code 2 before a
    step.
    """
    library = next(of for of in _libraries() if of.endswith((".so", ".6", ".1")) and "libm" in of)
    two_that_differ(trial, ({}, None), ({"LD_PRELOAD": library}, None), "LD_PRELOAD")


def _to_all_ports(trial: Trial, speak: Callable[[int], None]) -> None:
    """Train on two agents, and speak to all ports that their processes listen at, as they start and later."""
    trial.prepare()
    trial.agents(2)
    ports: set[int] = set()
    for turn in range(TRIES):
        trial.wait_until(lambda wanted=2 * turn: trial.rows() >= wanted, f"step {2 * turn}")  # type: ignore[misc]
        for process in trial.processes():
            with suppress(psutil.Error):
                for found in process.net_connections("inet"):
                    if found.status == psutil.CONN_LISTEN:
                        ports.add(found.laddr.port)
                        speak(found.laddr.port)
    trial.moment = f"{len(ports)} ports"
    check(ports, "nothing listens")
    trial.ends_with(0)
    trial.is_exact()


def _libraries() -> list[str]:
    return sorted({of.path for of in psutil.Process().memory_maps()})


KINDS = (garbage_to_ports, wrong_secret, cut_control, poisoned_server, preloaded)
