"""Programs of a launch as forks of one process that has imported everything, instead of new interpreters.

`omni train` starts an agent, and that one a server which forks the ranks: three interpreters that import
torch, six seconds of CPU for a run of two ranks. Here the server of `ranks.server` forks the command, the
command the agent, the agent its server; what they do is the product's. Each has the environment, session,
streams and handlers of signals of a program that was started.

Two things differ from new interpreters. All have one seed of hashes of strings, and `/proc` shows of each the
environment of pytest. What hangs on these has tests that start interpreters: `tests/infra/test_launch.py` and
`tests/omni/test_string_hashes.py`. A package of `tests/examples` trains in them, too.
"""

import atexit
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from processes import heed_signals
from ranks import leave_imports, server

from infra import forkserver
from infra import launch as infra_launch

Command = Sequence[str]


class Launched:
    """What tests use of `subprocess.Popen`, of a command that `ranks.server` has forked."""

    def __init__(self, command: Command, cwd: Path, env: Mapping[str, str], files: tuple[Path, Path]) -> None:
        self._process = server().Process(target=_launched, args=(command, cwd, dict(env), files))
        self._process.start()
        self.pid: int = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("omni", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


class Fork(forkserver.Forked):
    """`subprocess.Popen` of a Python module, as the product starts agents and their servers."""

    def __init__(
        self,
        command: Command,
        env: Mapping[str, str],
        stdout: int | None = None,
        stderr: int | None = None,
        start_new_session: bool = False,
        pass_fds: tuple[int, ...] = (),
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            if start_new_session:
                os.setsid()
            _become(command, env, (stdout, stderr), pass_fds)
        super().__init__(pid)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _launched(command: Command, cwd: Path, env: dict[str, str], files: tuple[Path, Path]) -> None:
    leave_imports()
    os.chdir(cwd)
    heed_signals()
    own: Any = SimpleNamespace(**{**vars(subprocess), "Popen": Fork})
    infra_launch.subprocess = forkserver.subprocess = own
    out, err = (os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT) for file in files)
    _become(command, env, (out, err), ())


def _become(
    command: Command, env: Mapping[str, str], streams: tuple[int | None, int | None], kept: tuple[int, ...]
) -> NoReturn:
    """Be the program that a command starts, to its end."""
    code: Any = 1
    try:
        for number, file in enumerate(streams, start=1):
            if file is not None:
                os.dup2(file, number)
        _let_go_of_files({0, 1, 2, *kept})
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)) and number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        os.environ.clear()
        os.environ.update(env)
        own = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
        sys.path[:0] = own
        at = command.index("-m")
        for stream in (sys.stdout, sys.stderr) if "-u" in command[:at] else ():
            stream.reconfigure(line_buffering=True)
        sys.argv = list(command[at + 1 :])
        warnings.filterwarnings("ignore", ".*found in sys.modules after import", RuntimeWarning)
        runpy.run_module(command[at + 1], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _let_go_of_files(kept: set[int]) -> None:
    """Put nothing in place of what was open: who closes it later closes that."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number not in kept and number != nothing and os.path.exists(f"/proc/self/fd/{name}"):
            os.dup2(nothing, number, inheritable=False)
