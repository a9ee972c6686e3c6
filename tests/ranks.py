"""Real gloo ranks for tests, started once and reused: importing torch and megatron costs more than a test."""

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel.control import Control
from parallel.handshake import SECRET, new_secret

TIMEOUT_S = 120
MOST_THREADS = 48  # of a process before it lets go of what calls have left
IDLE_S = 3  # without a call, after which it does so, too


class RankError(AssertionError):
    """A function failed on a rank; the message holds every failing rank's traceback."""


def server() -> BaseContext:
    """What starts processes: on a CPU, forks of one that has imported everything and computed nothing."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # torch imports the last with the first optimizer: here once instead of in every process.
    context.set_forkserver_preload(["omni.training.trainer", "omni.commands.train", "torch._dynamo"])
    return context


def leave_imports() -> None:
    """In a fork of the server: collect no garbage among what it has imported. A collection writes to each
    object, and so copies the memory that all forks share: half a second of CPU in each.
    """
    gc.freeze()


class RankPool:
    """Processes that form a fresh gloo world for every call.

    `run(world, function, *args)` calls `function(rank, *args)` on ranks 0 … world-1 and returns their
    results in rank order. `function` must be importable by name. Processes start when first needed; those
    of a failed call are ended, since a rank stuck in a collective cannot be used again.
    """

    def __init__(self) -> None:
        self.context = server()
        self.secret = new_secret()
        self.workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `function` on `world` ranks."""
        while len(self.workers) < world:
            self.workers.append(self._start())
        chosen = self.workers[:world]
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(chosen):
                with suppress(ConnectionError):  # it has ended: no answer comes
                    pipe.send((rank, world, str(Path(folder) / "store"), function, args))
            answers = [self._answer(pipe) for _, pipe in chosen]
        problems = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if problems:
            self._end(world)
            raise RankError("\n".join(problems))
        return [result for _, result in answers]

    def apart(self, function: Callable[..., None], *args: Any) -> None:
        """Call `function(*args)` in a fresh process of its own: no threads, no process group, not daemonic.

        Raises RankError with what it printed to stderr if it fails, or is not done in time.
        """
        with tempfile.NamedTemporaryFile("r") as errors:
            process = self.context.Process(target=_alone, args=(errors.name, function, args))
            process.start()
            process.join(TIMEOUT_S)
            if process.exitcode is None:
                process.kill()
                process.join()
            if process.exitcode:
                raise RankError(f"exit code {process.exitcode}\n{errors.read()}")

    def _start(self) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs, self.secret), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    @staticmethod
    def _answer(pipe: Connection) -> tuple[bool, Any]:
        if not pipe.poll(TIMEOUT_S):
            return False, f"no answer in {TIMEOUT_S} s"
        try:
            return pipe.recv()
        except (EOFError, ConnectionError):
            return False, "the process ended"

    def close(self) -> None:
        """End all processes."""
        self._end(len(self.workers))

    def _end(self, count: int) -> None:
        for process, pipe in self.workers[:count]:
            pipe.close()
            process.kill()
            process.join()
        del self.workers[:count]


def _alone(errors: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    with open(errors, "w", buffering=1) as file:
        os.dup2(file.fileno(), 2)
    leave_imports()
    torch.set_num_threads(1)
    function(*args)


def _serve(pipe: Connection, secret: str) -> None:
    os.environ[SECRET] = secret
    controls = _controls()
    own = dict(os.environ)  # megatron sets variables as it builds a model
    torch.set_num_threads(1)
    leave_imports()
    while True:
        if not pipe.poll(IDLE_S):
            _release()
        try:
            rank, world, store, function, args = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo", f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
            )
            result = (True, function(rank, *args))
            dist.barrier()
            while controls:
                controls.pop().close()
            dist.destroy_process_group()
        except BaseException:
            result = (False, traceback.format_exc())
        os.environ.clear()
        os.environ.update(own)
        pipe.send(result)
        if not result[0]:
            return
        del function, args, result
        if len(os.listdir("/proc/self/task")) > MOST_THREADS:
            _release()


def _controls() -> list[Control]:
    """The list of all that will be made in this process: tests leave theirs open."""
    made: list[Control] = []
    connect = Control.__init__

    def noting(self: Control, *args: Any, **more: Any) -> None:
        connect(self, *args, **more)
        made.append(self)

    Control.__init__ = noting  # type: ignore[method-assign]
    return made


def _release() -> None:
    """Let go of models and of their communicators, each of which keeps three threads: one wakes a hundred
    times a second, and hundreds of them take a core.
    """
    gc.collect()
