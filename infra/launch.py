"""Start the ranks of one machine under torchrun, hand signals on, and leave nothing behind.

This process stays light (no torch): it owns the agent, the agent owns the workers.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

from infra.agent_folder import remove_unused
from infra.environment import Place, capability, defaults
from infra.lineage import KILLED_S, STARTED_BY, outlives_parent, unended
from infra.run_folder import RunFolder
from infra.screen import beside
from parallel.handshake import SECRET, new_secret

AGENT_MARGIN_S = 10  # what the agent gets on top before this process kills everything
STRAGGLERS_S = 5  # what is left after the agent gets between SIGTERM and SIGKILL
LAUNCH_ID = "OMNI_LAUNCH_ID"  # marks every process of one launch through its environment
AGENTS_BEFORE = "OMNI_AGENTS_BEFORE"  # how many agents of the launch were killed
MISTAKE = 2  # exit code of a rank that would fail again, and is not restarted
TAIL_LINES = 40
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def launch_local(
    config_path: Path,
    ranks: int,
    module: str,
    log: Path | None = None,
    env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    launch: str | None = None,
    parent: int | None = None,
) -> int:
    """Run `python -m <module> <config_path>` on `ranks` local processes and return the exit code.

    The code is torchrun's; 128 + n if it died of signal n, or if SIGTERM, SIGINT, SIGHUP or SIGUSR1 arrived
    here, was handed on as SIGTERM and ended the run. After such a signal the workers have
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds (50 unless set) to save and leave, torchrun 10 more, then all is
    killed; a second signal kills at once. No process of the launch outlives this call, nor this process if
    that is killed. The end of `parent`, which started this process (default: its parent at this call), counts
    as SIGHUP, unless this process ignores that (nohup) or leads a session of its own (setsid).

    Output goes to this process's stdout and stderr, or is appended to the file `log`, whose last lines are
    shown when the run fails. `env` is added to the environment. OMP_NUM_THREADS is cores // ranks unless
    set. Modules are not imported from the working folder. `max_restarts`: how often torchrun restarts all
    workers after one died, or this process the agent after a signal killed it. `launch` names the launch, by
    default with a new name. Needs the main thread.
    Raises ValueError for a missing configuration and for ranks < 1.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: a launch needs at least one rank")
    if not config_path.is_file():
        raise ValueError(f"config_path={config_path} does not exist: give the config.yaml of a run folder")
    environment = environment_of(ranks, config_path, env or {}, launch or new_launch())
    parent = parent or os.getppid()

    with noting_signals() as received, _output(log) as stream:
        for killed in range(max_restarts + 1):
            command = _torchrun(config_path.absolute(), ranks, module, max_restarts - killed)
            code = _run_agent(command, {**environment, AGENTS_BEFORE: str(killed)}, stream, received, parent)
            if code >= 0 or received or killed == max_restarts:
                break
            beside(f"the agent died of signal {-code}: starting it again")

    if code < 0:
        code = 128 - code
    elif code and received:
        code = 128 + received[0]
    if code and log is not None:
        print(_tail(log), file=sys.stderr)
    where = f", output in {log}" if log is not None else ""
    beside(f"run folder {config_path.absolute().parent}: exit code {code}{where}")
    return code


def _run_agent(
    command: list[str], environment: dict[str, str], stream: int | None, received: list[int], parent: int
) -> int:
    """Run an agent to its end, and end what it leaves behind; return its code."""
    grace_s = int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) + AGENT_MARGIN_S
    # A session of its own: Ctrl-C in the terminal reaches the agent once, from here, and not by itself.
    agent = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, start_new_session=True)
    try:
        _wait(agent, received, grace_s, parent)
    finally:
        code = _kill_group(agent)
        _end_stragglers(environment[LAUNCH_ID])
        remove_unused()
    return code


def _torchrun(config_path: Path, ranks: int, module: str, max_restarts: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "infra.agent",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d",
        # Without it workers connect to this machine's host name, which need not resolve.
        "--local-addr=127.0.0.1",
        f"--max-restarts={max_restarts}",
        "-m",
        module,
        str(config_path),
    ]


def new_launch() -> str:
    """Return a name for a launch that no other has."""
    return uuid.uuid4().hex


def environment_of(
    ranks: int, config_path: Path, extra: Mapping[str, str], launch: str, secret: str | None = None
) -> dict[str, str]:
    """Return the environment of an agent with `ranks` ranks of the run whose configuration is given: this
    process's, with `extra` and what a launch sets (infra/environment.py). The `secret` of the run is a new
    one unless given: agents of several nodes share it.
    """
    own = {**os.environ, **extra}
    place = Place(ranks, capability(), RunFolder(config_path.absolute().parent).errors)
    if place.capability is not None:
        place.errors.mkdir(parents=True, exist_ok=True)  # the flight recorder makes no folder
    fixed = {
        # A user's calendar.py in the working folder is not Python's. An empty entry of PYTHONPATH, as in
        # PYTHONPATH=$PYTHONPATH:/mine, is the working folder, too.
        "PYTHONSAFEPATH": "1",
        LAUNCH_ID: launch,
        SECRET: secret or new_secret(),
        STARTED_BY: str(os.getpid()),
    }
    environment = {**defaults(place, own), **own, **fixed}
    path = [entry for entry in environment.pop("PYTHONPATH", "").split(os.pathsep) if entry]
    return {**environment, **({"PYTHONPATH": os.pathsep.join(path)} if path else {})}


def _wait(agent: subprocess.Popen[bytes], received: list[int], grace_s: float, parent: int) -> None:
    """Wait until the agent has ended, or is to be killed. The first signal is handed on to the agent, which
    signals the workers, and gives them `grace_s` seconds; a second one gives none. The end of `parent` is
    taken for SIGHUP.
    """
    kill_at: float | None = None
    while True:
        try:
            agent.wait(timeout=0.1)
            return
        except subprocess.TimeoutExpired:
            if not received and outlives_parent(parent):
                received.append(signal.SIGHUP)
            if received and kill_at is None:
                # Always SIGTERM: the agent knows no SIGUSR1, and SIGINT would interrupt the workers' step.
                agent.terminate()
                kill_at = time.monotonic() + grace_s
            if len(received) > 1 or (kill_at is not None and time.monotonic() > kill_at):
                return


@contextmanager
def noting_signals() -> Iterator[list[int]]:
    """The list to which signals that ask for an end are appended as they arrive."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    # One that is ignored stays so: nohup ignores SIGHUP, and shells SIGINT for what runs in the background.
    heeded = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in heeded}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill_group(agent: subprocess.Popen[bytes]) -> int:
    """Kill an agent that runs, with its group. Return its code, that of the kill if it does not end."""
    code = agent.poll()
    if code is not None:
        return code
    os.killpg(agent.pid, signal.SIGKILL)
    try:
        return agent.wait(KILLED_S)
    except subprocess.TimeoutExpired:
        beside(unended("the agent", [agent.pid]))
        return -signal.SIGKILL


def _end_stragglers(launch_id: str) -> None:
    """End what is left of a launch: workers have their own sessions, so a killed agent leaves them running.

    SIGTERM first: a tracker's writer process still flushes. What does not end is named.
    """
    for number, seconds in ((signal.SIGTERM, STRAGGLERS_S), (signal.SIGKILL, KILLED_S)):
        for process in _of_launch(launch_id):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        give_up = time.monotonic() + seconds
        while (left := _of_launch(launch_id)) and time.monotonic() < give_up:
            time.sleep(0.1)
    if left:
        beside(unended("a process of the launch", [process.pid for process in left]))


def _of_launch(launch_id: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # gone by now, a zombie, or another user's
            if process.environ().get(LAUNCH_ID) == launch_id:
                found.append(process)
    return found


@contextmanager
def _output(log: Path | None) -> Iterator[int | None]:
    if log is None:
        yield None  # inherited: the workers see the terminal
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        yield file.fileno()


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 64 * 1024))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:])
