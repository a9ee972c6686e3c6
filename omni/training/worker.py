"""One rank of a run, as torchrun starts it: `python -m omni.training.worker RUN_FOLDER/config.yaml`."""

import contextlib
import errno
import gc
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

from infra.lineage import end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before the imports that take seconds

import torch
import torch.distributed as dist

from dataloader.format import DataError
from dataloader.node_cache import NodeCache, cache_folder
from dataloader.tokens import SampleMeta
from infra.checkpoint import CheckpointError
from infra.launch import MISTAKE, new_launch
from infra.run_folder import RunFolder
from infra.run_lock import LockedError, holding, launch_of_rank
from infra.screen import beside, keep_going_without
from infra.watchdog import EXIT_CODE as TRY_AGAIN
from omni.compose import load_config
from omni.config import ConfigError
from omni.planning.fullest import check_rank
from omni.planning.node_plans import MOST_BYTES, NodePlans, node_plans
from omni.planning.plan_process import PlannerEndedError, PlanStep, planning_apart
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.planning.trainable import check_trainable
from omni.training.alike import check_alike, datasets_of
from omni.training.figures import restarts
from omni.training.progression import BadDataError, NoUpdateError
from omni.training.seats import Seat, end_standing_by, find_seat, stand_by
from omni.training.trainer import Trainer
from ops.device import backend_name, dump_memory, make_deterministic, select_device
from parallel.consensus import DivergenceError
from parallel.control_tree import Tree
from parallel.copies import CorruptionError
from parallel.handshake import secret_of_run
from parallel.layout import LayoutError
from parallel.policy import PolicyError
from parallel.waiting import StallError

_TOLD = (
    CheckpointError,
    CorruptionError,
    DivergenceError,
    NoUpdateError,
    PlannerEndedError,
    StallError,
)
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)


@contextlib.contextmanager
def joined(
    config_path: Path, seat: Seat, trace: Sequence[SampleMeta] = ()
) -> Iterator[tuple[RunSpec, RunFolder, int, torch.device, PlanStep]]:
    """Join the ranks that train, as one of them. What is done there ends with a meeting of all ranks. A
    `trace` takes the place of datasets.
    """
    config, rank, world = seat.config, seat.rank, seat.world
    assert rank is not None
    if world > 1:
        _check_secret()
    check_trainable(config)
    spec = prepare_run(config, world, trace)
    for line in spec.choice.lines() if spec.choice and rank == 0 else ():
        print(line, file=sys.stderr, flush=True)
    planner = replace(spec.planner, admit=partial(check_rank, spec, rank))
    with contextlib.ExitStack() as held:
        if rank == 0:  # the launcher may hold it already, for all processes of the launch
            held.enter_context(holding(RunFolder(config_path.parent), launch_of_rank() or new_launch()))
        # The planner process is forked here: there is no device context, no process group and no thread yet.
        shared = _plans_of_node(spec, rank) if world > 1 else None
        plan_step = held.enter_context(planning_apart(planner, config.train.timeout_s, rank == 0, shared))
        device = select_device()
        if config.train.deterministic:
            make_deterministic()
        timeout = timedelta(seconds=config.train.timeout_s)
        # Not bound to the device: torch would then split this group's communicator to make each other one,
        # which all ranks must enter, and ours are made by their members alone.
        dist.init_process_group(backend_name(), timeout=timeout, rank=rank, world_size=world)
        check_alike(spec.config, device, datasets_of(spec))  # with what this rank has chosen
        yield spec, RunFolder.create(config_path.parent), rank, device, plan_step
        dist.destroy_process_group()


def _plans_of_node(spec: RunSpec, rank: int) -> NodePlans | None:
    """The plans that this rank shares with others of its node."""
    data, world = spec.config.data, spec.arrangement.world
    cache = NodeCache(
        cache_folder(data.cache_dir) / "plans", min(MOST_BYTES, int(data.cache_gb * 1e9)), beside
    )
    node = Tree(world, min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))).node(rank)
    return node_plans(spec, rank, node, secret_of_run(), restarts(), cache)


def _check_secret() -> None:
    try:
        secret_of_run()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def main(config_path: Path) -> int:
    """Train as this process's rank, or stand by; all ranks of the world run this. Returns the exit code:
    TRY_AGAIN if a signal to some rank asked to stop, or agents would take that for the end of the run.
    """
    seat = find_seat(load_config(config_path), RunFolder(config_path.parent))
    if seat.rank is None:
        stand_by(seat)
        return 0
    with joined(config_path, seat) as (spec, folder, rank, device, plan_step):
        trainer = Trainer(spec, folder, rank, device, plan_step)
        freeze()
        with contextlib.closing(trainer):
            done = trainer.run()
        if done and rank == 0:
            end_standing_by(seat)
    return 0 if done else TRY_AGAIN


def freeze() -> None:
    """Leave all objects there are out of garbage collections, so that those of steps are collected soon."""
    gc.collect()
    gc.freeze()
    # A full collection waits until new objects exceed a quarter of those that the last one left: a million
    # after the first, none after this one.
    gc.collect()


def exit_with(function: Callable[[Path], int | None], config_path: Path) -> NoReturn:
    """Run a rank's main function; end with what it returns (None is 0), 2 for a mistake in the configuration
    or the data, which a restart would not mend, and 1 for any other failure.
    """
    keep_going_without(RunFolder(config_path.parent))
    try:
        code = function(config_path) or 0
    except BaseException as error:
        _keep(error, config_path)
        code = _told(error, config_path)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: destructors of communicators would wait for peers that may be gone.
    os._exit(code)


def _keep(error: BaseException, config_path: Path) -> None:
    """Add a failure's traceback to the rank's file in the run folder, also if the screen does without."""
    path = RunFolder(config_path.parent).errors / f"rank-{os.environ.get('RANK', '0')}.txt"
    with contextlib.suppress(OSError):  # a full disk must not hide the failure itself
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} on {socket.gethostname()}\n")
            traceback.print_exception(error, file=file)
            snapshot = path.with_name(f"{path.stem}-memory.pickle")
            if isinstance(error, torch.OutOfMemoryError) and dump_memory(snapshot):
                file.write(f"what it held: {snapshot.name}, for https://pytorch.org/memory_viz\n")


def _told(error: BaseException, config_path: Path) -> int:
    """Tell a failure and return its exit code. Errors of ours whose message says all are told without a
    traceback, and so are those of disks.
    """
    rank = os.environ.get("RANK", "0")
    if isinstance(error, ConfigError | LayoutError | DataError | LockedError):
        beside(f"rank {rank}: error: {error}")
        return MISTAKE
    if isinstance(error, BadDataError | PolicyError):  # policies are pure: they would fail again
        beside(f"rank {rank} failed: {error}")
        return MISTAKE
    if isinstance(error, _TOLD):
        beside(f"rank {rank} failed: {error}")
        if isinstance(error, CorruptionError):
            return MISTAKE if load_config(config_path).health.on_corruption == "stop" else 1
        return 1
    if isinstance(error, OSError) and error.errno in _OF_DISKS:
        beside(
            f"rank {rank} failed: {error}. If it is {config_path.parent} that cannot be read or written: its "
            f"last checkpoint stays good; mend that, and start again with the same run.dir"
        )
    else:
        beside(f"rank {rank} failed:\n{''.join(traceback.format_exception(error))}")
    return 1


if __name__ == "__main__":
    exit_with(main, Path(sys.argv[1]))
