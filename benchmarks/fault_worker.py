"""One rank of a run with a fault in it, in place of `omni.training.worker`: see benchmarks/fault_inside.py.

    OMNI_FAULT=NAME:STEP:RANK python -m infra.agent ... -m fault_worker RUN_FOLDER/config.yaml

The product has no place where faults are put in. This program replaces one of its functions by one that does
the fault before or in place of what it does, and then is the product's own worker. A rank that was restarted
has no fault.
"""

import errno
import os
import random
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra.lineage import end_with_parent

if __name__ == "__main__":
    end_with_parent()

import torch

from dataloader.loader import Loader
from dataloader.storage import Storage
from infra.tracking import Trackers
from omni.training import worker
from omni.training.trainer import Trainer
from pipeline import engine
from pipeline.ops import COMPUTE

FAULT = "OMNI_FAULT"
SPIKE_STEPS = 4
STALLED_S, HUNG_S, CLOSED_S = 4.0, 600.0, 15.0
ROOM = 64 * 2**20
DAY_S = 86_400


def before_steps(steps: range, act: Callable[[Trainer], object]) -> None:
    """Call `act` before each of some steps."""
    run_step = Trainer.run_step

    def faulty(self: Trainer, prepared: Any, watch: Any = None) -> Any:
        if prepared.plan.step in steps:
            act(self)
        return run_step(self, prepared, watch)

    Trainer.run_step = faulty  # type: ignore[method-assign]


def out_of_memory(step: int) -> None:
    """From a step on the process may not take more memory than it has; it needs more."""

    def limit(trainer: Trainer) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        torch.empty(4 * ROOM, dtype=torch.uint8)

    before_steps(range(step, step + 1), limit)


def _listens(own: socket.socket) -> bool:
    return bool(own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def cut_sockets(step: int) -> None:
    """At some moment of a step all connections of the process are cut; what listens for more stays open."""

    def cut() -> None:
        time.sleep(random.Random(step).uniform(0, 0.1))
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as peer:
                if peer.family in (socket.AF_INET, socket.AF_INET6) and not _listens(peer):
                    peer.shutdown(socket.SHUT_RDWR)

    before_steps(range(step, step + 1), lambda _: threading.Thread(target=cut, daemon=True).start())


def cut_control(step: int) -> None:
    """Before a step the connections of the control plane are cut."""

    def cut(trainer: Trainer) -> None:
        for peer in trainer.control.peers.values():
            peer.connection.shutdown(socket.SHUT_RDWR)

    before_steps(range(step, step + 1), cut)


def slow(step: int) -> None:
    """From a step on all ops of compute take twice as long."""
    do, begun = engine._RunningStep.do, [False]
    before_steps(range(step, step + 1), lambda _: begun.append(True))

    def slowed(self: Any, op: Any) -> None:
        start = time.perf_counter()
        do(self, op)
        if begun[-1] and op.kind in COMPUTE:
            time.sleep(time.perf_counter() - start)

    engine._RunningStep.do = slowed  # type: ignore[method-assign]


def writes(step: int, act: Callable[[str], object]) -> None:
    """Call `act` with its path before a file of a checkpoint is written, from a step on."""
    write, begun = Storage.write, [False]
    before_steps(range(step, step + 1), lambda _: begun.append(True))

    def faulty(self: Storage, name: str, parts: Any) -> None:
        if begun[-1]:
            act(self.path(name))
        write(self, name, parts)

    Storage.write = faulty  # type: ignore[method-assign]


def read_only(step: int) -> None:
    """From a step on the file system of checkpoints can only be read."""

    def refuse(path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    writes(step, refuse)


def stalling(step: int) -> None:
    """Each write of a checkpoint takes some seconds, from a step on."""
    writes(step, lambda _: time.sleep(STALLED_S))


def hanging(step: int) -> None:
    """No write of a checkpoint comes to an end, from a step on."""
    writes(step, lambda _: time.sleep(HUNG_S))


def hung_tracker(step: int) -> None:
    """Closing the trackers takes long."""
    finish = Trackers.finish

    def late(self: Trackers, exit_code: int) -> None:
        time.sleep(CLOSED_S)
        finish(self, exit_code)

    Trackers.finish = late  # type: ignore[method-assign]


def _nan_in(trainer: Trainer) -> None:
    run = trainer.rank.engine.run

    def spoilt(plan: Any, inputs: Any, watch: Any = None) -> Any:
        result = run(plan, inputs, watch)
        for parameter in trainer.rank.components["llm"].parameters:
            vars(parameter)["main_grad"].fill_(torch.nan)
        trainer.rank.engine.run = run  # type: ignore[method-assign]
        return result

    trainer.rank.engine.run = spoilt  # type: ignore[method-assign]


def nan_gradient(step: int) -> None:
    """The gradients of one step are not finite."""
    before_steps(range(step, step + 1), _nan_in)


def nan_for_ever(step: int) -> None:
    """The gradients of all steps from one on are not finite."""
    before_steps(range(step, sys.maxsize), _nan_in)


def loss_spike(step: int) -> None:
    """The weights double in each of some steps, alike on all ranks, as by updates that went wrong."""

    def enlarge(trainer: Trainer) -> None:
        for parameter in trainer.rank.components["llm"].parameters:
            parameter.data.mul_(2)

    before_steps(range(step, step + SPIKE_STEPS), enlarge)


def flipped_weight(step: int) -> None:
    """One bit of one weight is another."""

    def flip(trainer: Trainer) -> None:
        draw = random.Random(step)
        weight = draw.choice(trainer.rank.components["llm"].parameters)
        bits = weight.data.view(torch.int32).view(-1)
        bits[draw.randrange(len(bits))] ^= 1 << draw.randrange(31)

    before_steps(range(step, step + 1), flip)


def flipped_moment(step: int) -> None:
    """One bit of one moment of the optimizer is another."""

    def flip(trainer: Trainer) -> None:
        draw = random.Random(step)
        bits = draw.choice(trainer.rank.moments()).view(torch.int32).view(-1)
        bits[draw.randrange(len(bits))] ^= 1 << draw.randrange(31)

    before_steps(range(step, step + 1), flip)


def decoder(step: int) -> None:
    """The thread that decodes items ends in the middle of one."""
    load, calls = Loader._load_items, [0]

    def ends(self: Any, job: Any, places: Any) -> None:
        calls[0] += 1
        if calls[0] == step:
            raise SystemExit("the decoding thread was told to end")
        load(self, job, places)

    Loader._load_items = ends  # type: ignore[method-assign]


def clock(step: int) -> None:
    """The clock of the day jumps ahead by a day, and some steps later back by two."""
    now, jumps = time.time, [0.0]
    before_steps(range(step, step + 1), lambda _: jumps.append(DAY_S))
    before_steps(range(step + 10, step + 11), lambda _: jumps.append(-DAY_S))
    time.time = lambda: now() + jumps[-1]
    time.time_ns = lambda: int(time.time() * 1e9)


FAULTS = (
    out_of_memory,
    cut_sockets,
    cut_control,
    slow,
    read_only,
    stalling,
    hanging,
    hung_tracker,
    nan_gradient,
    nan_for_ever,
    loss_spike,
    flipped_weight,
    flipped_moment,
    decoder,
    clock,
)
EVERYWHERE = (loss_spike, clock, hung_tracker)


def plant(text: str) -> None:
    """Put the fault NAME:STEP:RANK into this process, if it is that rank, and has not been restarted."""
    name, step, rank = text.split(":")
    (fault,) = (fault for fault in FAULTS if fault.__name__ == name)
    own = os.environ["RANK"] == rank or fault in EVERYWHERE
    if own and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        fault(int(step))


if __name__ == "__main__":
    plant(os.environ[FAULT])
    worker.exit_with(worker.main, Path(sys.argv[1]))
