"""A process that has imported what ranks import, and forks them: they start in milliseconds, not seconds.

    python -m infra.forkserver CHANNEL MODULE ARGUMENT …

The ranks of a node import the same: torch, megatron-core, the models. On two cores that is most of what a
restart takes. So an agent keeps one process that has imported MODULE once, on the first start beside what
the agent itself imports, and forks from it each rank of each start, which then runs MODULE as its program.
What is imported is also held in memory once. To be imported must do no harm: what a program does belongs
under its `__main__` guard.

A forked rank is a child of the agent, as any other: the server forks a process that forks the rank and ends,
and the kernel gives orphans to the agent, which has asked for them (Linux; elsewhere, and where there is no
server for whatever reason, ranks are started as torchrun starts them). The server has no threads of Python's
and has touched no device, or it says why not and ends. A library may touch one and not tell: a forked rank
that CUDA refuses for it becomes a new program, with the same process id. All have the command line above;
`top` and `pgrep` show them as omni-forkserver and omni-rank-0, omni-rank-1, ...
"""

import ctypes
import gc
import os
import runpy
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn

import psutil

from infra.lineage import KILLED_S, STARTED_BY, end_with_parent, unended

START_S = 300.0  # for the server to import: from a shared file system that takes minutes at worst
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.01


class ForkServer:
    """Starts processes that run a module with arguments, for one agent, this process.

    `command` is what they look like to the agent when it starts them by itself.
    """

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        """Start the server, which begins to import. Forked processes write to what this process writes to."""
        self.command = [sys.executable, "-u", "-m", module, *arguments]
        self._channel, theirs = Pipe()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        number = theirs.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "infra.forkserver", str(number), module, *arguments],
            env={**os.environ, STARTED_BY: str(os.getpid())},
            pass_fds=(number,),
        )
        theirs.close()

    def start(self, environment: Mapping[str, str]) -> "Forked | None":
        """Fork a process with this environment, in a session of its own; None if the server has ended, which
        is told once.
        """
        if self._channel.closed:
            return None
        try:
            self._channel.send(dict(environment))
            if self._channel.poll(START_S):
                return Forked(self._channel.recv())
            problem = f"has not answered in {START_S:g} s"
        except (EOFError, OSError):
            problem = "has ended"
        print(f"agent: the fork server {problem}: ranks import each for itself", file=sys.stderr, flush=True)
        self.close()
        return None

    def reap(self) -> None:
        """Let go of what ended among the orphans that came to this process: what ranks left. Call it while no
        other child of this process than the server may have ended without being waited for.
        """
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess, ChildProcessError):
                if child.pid != self._process.pid and child.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(child.pid, os.WNOHANG)

    def close(self) -> None:
        """End the server; what it forked stays. Harmless when called twice."""
        self._channel.close()
        self._process.kill()
        try:
            self._process.wait(KILLED_S)
        except subprocess.TimeoutExpired:
            left = unended("the fork server", [self._process.pid])
            print(f"agent: {left}", file=sys.stderr, flush=True)


class Forked:
    """A child of this process that another one forked: of `subprocess.Popen` what an agent uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, -n after signal n, or None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, waited for `timeout` seconds at most: then subprocess.TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() >= until:
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(_POLL_S)
        return code


def serve(channel: Connection) -> dict[str, str]:
    """Fork a process for each environment that arrives; returns it in that process, in the server never."""
    agent = os.getppid()
    gc.collect()
    gc.freeze()  # a collection in a rank would write to, and so copy, the memory that all share
    while True:
        try:
            environment = channel.recv()
        except (EOFError, OSError):  # the agent has closed its end, or has ended
            os._exit(0)
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            continue
        between = os.getpid()
        if os.fork():
            os._exit(0)
        os.setsid()
        while os.getppid() == between:  # which ends after an instant
            time.sleep(0.001)
        end_with_parent(agent)
        channel.send(os.getpid())
        channel.close()
        return environment


def refusal() -> str:
    """Say what forbids this process to fork; empty if nothing does."""
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    found = [f"began threads ({', '.join(threads)})"] if threads else []
    torch = sys.modules.get("torch")
    found += ["touched a device"] if torch and torch.cuda.is_initialized() else []
    return " and ".join(found)


def is_poisoned() -> bool:
    """Whether CUDA cannot be used in this process, because the one that it was forked from had touched it."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda._is_in_bad_fork()


def _start_anew(module: str, arguments: Sequence[str]) -> NoReturn:
    """Become the module's program with nothing imported."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(
            f"agent: importing {module} touched a GPU, which no forked rank can use: each imports for itself",
            file=sys.stderr,
            flush=True,
        )
    os.execv(sys.executable, [sys.executable, "-u", "-m", module, *arguments])


def _name(name: str) -> None:
    """Give this process a name, of which the kernel keeps 15 letters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def main(number: int, module: str, arguments: Sequence[str]) -> None:
    """Be the server, and in each process that it forks, the module's program."""
    end_with_parent()
    _name("omni-forkserver")
    channel = Connection(number)
    import_module(module)
    if reason := refusal():
        print(f"agent: ranks import {module} each for itself: importing it {reason}", file=sys.stderr)
        return
    environment = serve(channel)
    os.environ.clear()
    os.environ.update(environment)
    if is_poisoned():
        _start_anew(module, arguments)
    _name(f"omni-rank-{environment.get('RANK', '')}")
    sys.argv = [sys.argv[0], *arguments]
    # That it is imported already is why this process is here.
    warnings.filterwarnings("ignore", ".*found in sys.modules after import", RuntimeWarning)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
