"""torchrun's agent, changed as infra/agent.py says, which runs it once torch is imported."""

import os
import signal
import sys
from contextlib import suppress
from functools import partial
from typing import Any

import psutil
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousError, rendezvous_handler_registry
from torch.distributed.launcher import api
from torch.distributed.run import main

from infra.forkserver import ForkServer
from infra.launch import MISTAKE
from infra.machine import oom_kills
from infra.meeting import meet
from infra.screen import beside


def run_torchrun(arguments: list[str], server: ForkServer | None) -> int:
    """Run torchrun, with ranks forked by `server`, and return the exit code."""
    rendezvous_handler_registry._registry["c10d"] = meet
    api.LocalElasticAgent = partial(Agent, server)  # type: ignore[misc, assignment]  # torchrun has no argument for it
    multiprocessing.get_subprocess_handler = partial(Worker, server)  # nor for this
    try:
        main(arguments)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        first = MISTAKE if MISTAKE in codes else error.get_first_failure()[1].exitcode
        return 128 - first if first < 0 else first
    except SignalException as error:
        return 128 + error.sigval
    except RendezvousError as error:
        print(
            f"agent: error: the agents of this launch could not meet ({error}). If several launches use this "
            f"machine, the port of --rdzv-endpoint may be another's: choose a free one",
            file=sys.stderr,
        )
        return 1
    return 0


class Worker(SubprocessHandler):
    """A process of a rank: forked by the server if that runs what torchrun would, else started by itself."""

    def __init__(self, server: ForkServer | None, *args: Any, **kwargs: Any) -> None:
        self._server = server
        super().__init__(*args, **kwargs)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        # Other arguments: numactl stands before them. Files: what the server writes to is the agent's.
        if self._server and self._server.command == list(args) and not (self._stdout or self._stderr):
            forked = self._server.start(env)
            if forked is not None:
                return forked
        return super()._popen(args, env)


class Agent(LocalElasticAgent):
    """The agent of one node."""

    def __init__(self, server: ForkServer | None, spec: Any, *args: Any, **kwargs: Any) -> None:
        self._server = server
        self._oom_kills = 0
        super().__init__(spec, *args, **kwargs)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._server:
            self._server.reap()  # what those before left; they have all been waited for
        self._oom_kills = oom_kills()
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._wake_if_one_ended()
        result = super()._monitor_workers(worker_group)
        if any(failure.exitcode == MISTAKE for failure in result.failures.values()):
            self._remaining_restarts = 0
        if result.failures:
            rank, first = min(result.failures.items(), key=lambda of: of[1].timestamp)
            if first.exitcode == -signal.SIGKILL and oom_kills() > self._oom_kills:
                beside(
                    f"agent: the kernel killed rank {rank}: out of memory. Give the run more, start fewer "
                    f"ranks on this machine, or lower data.microbatch_tokens"
                )
        return result

    def _wake_if_one_ended(self) -> None:
        """Let workers that are stopped see the signal with which the others' end is about to be theirs."""
        pids = list(self._pcontext.pids().values()) if self._pcontext else []
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if any(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in pids):
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
