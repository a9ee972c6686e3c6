"""Systems measured side by side: on the same ranks each trains a model of its own for real, in turn, step by
step, so what slows the machine for a while slows all of them.

As torchrun starts it: `python -m omni.training.side_by_side FOLDER/0/config.yaml`. Folders 0, 1, … beside
each other hold the configurations, which differ in policies and layout alone, and rank 0 leaves the seconds
of every turn in FOLDER. A rank holds the weights and the optimizer of all of them.
"""

import concurrent.futures
import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from infra.lineage import end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before the imports that take seconds

import torch.distributed as dist

from infra.run_folder import RunFolder
from omni.planning.prepare import prepare_run
from omni.training.ahead import Ahead, Prepared
from omni.training.trainer import Trainer

WARMUP = 3  # turns that do not count
FILE = "seconds.json"
Hook = Callable[[Trainer, Prepared], None]


def alternate(trainers: Sequence[Trainer], turns: int, before: Hook | None = None) -> list[list[float]]:
    """Return the seconds of every turn's step of each trainer of this rank. All ranks call it.

    A step begins when all ranks have it planned and loaded and nothing else is under way, and ends when all
    ranks have updated their weights. Who is first in a turn changes from turn to turn. `before` hears of a
    trainer and of what it is about to run.

    Raises:
        AssertionError: if trainers would train on different samples.
    """
    found: list[list[float]] = [[] for _ in trainers]
    with contextlib.ExitStack() as stack:
        aheads = [stack.enter_context(trainer.ahead()) for trainer in trainers]
        for step in range(1, WARMUP + turns + 1):
            first, samples = step % len(trainers), set[tuple[int, ...]]()
            for at in (*range(first, len(trainers)), *range(first)):
                seconds, taken = _timed(trainers[at], aheads[at], step, before)
                found[at].append(seconds)
                samples.add(taken)
            assert len(samples) == 1, f"step {step}: systems train on different samples"
    return [of[WARMUP:] for of in found]


def _timed(trainer: Trainer, ahead: Ahead, step: int, before: Hook | None) -> tuple[float, tuple[int, ...]]:
    """Take a step. Returns its seconds and its samples."""
    prepared = trainer.begin(ahead, step)
    concurrent.futures.wait(ahead.plans.values())
    concurrent.futures.wait(ahead.ready.values())
    if before is not None:
        before(trainer, prepared)
    dist.barrier()
    begin = time.perf_counter()
    trainer.update(trainer.run_step(prepared))
    trainer.rank.optimizer.arrive()  # not behind the next system's step
    dist.barrier()
    return time.perf_counter() - begin, tuple(prepared.plan.taken.ids)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and the order statistics that hold it with 95 % (the binomial's normal
    approximation).
    """
    ordered, n = sorted(values), len(values)
    half = 0.98 * math.sqrt(n)
    low, high = max(0, math.floor(n / 2 - half)), min(n - 1, math.ceil(n / 2 + half) - 1)
    return statistics.median(ordered), ordered[low], ordered[high]


def over(own: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of a turn's step to that of another system in the same turn, as `interval`."""
    return interval([a / b for a, b in zip(own, other, strict=True)])


def main(config_path: Path) -> None:
    """One rank of a measurement."""
    from omni.compose import load_config
    from omni.training.seats import find_seat
    from omni.training.worker import freeze, joined

    seat = find_seat(load_config(config_path), RunFolder(config_path.parent))
    with joined(config_path, seat) as (spec, folder, rank, device, _), contextlib.ExitStack() as held:
        specs = [spec]
        while (path := folder.path.with_name(str(len(specs))) / config_path.name).exists():
            specs.append(prepare_run(load_config(path), seat.world))
        trainers = []
        for number, each in enumerate(specs):
            own = RunFolder.create(folder.path.with_name(str(number)))
            trainers.append(held.enter_context(contextlib.closing(Trainer(each, own, rank, device))))
        freeze()
        found = alternate(trainers, spec.config.train.steps - WARMUP)
        if rank == 0:
            (folder.path.parent / FILE).write_text(json.dumps(found))
        for trainer in trainers:
            trainer.control.barrier("the end")


if __name__ == "__main__":
    from omni.training.worker import exit_with

    exit_with(main, Path(sys.argv[1]))
