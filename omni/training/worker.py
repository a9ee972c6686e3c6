"""One rank of a run, as torchrun starts it: `python -m omni.training.worker RUN_FOLDER/config.yaml`."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from dataloader.format import DataError
from infra.checkpoint import CheckpointError
from infra.run_folder import RunFolder
from omni.compose import load_config
from omni.config import ConfigError
from omni.planning.fullest import check_rank
from omni.planning.plan_process import PlannerEndedError, PlanStep, planning_apart
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.training.trainer import BadDataError, NoUpdateError, Trainer
from ops.device import backend_name, select_device
from parallel.consensus import DivergenceError
from parallel.layout import LayoutError


@contextlib.contextmanager
def joined(config_path: Path) -> Iterator[tuple[RunSpec, RunFolder, int, torch.device, PlanStep]]:
    """Join the world that torchrun describes, and leave it together with all other ranks."""
    config = load_config(config_path)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    spec = prepare_run(config, world)
    # The planner process is forked here: there is no device context, no process group and no thread yet.
    planner = replace(spec.planner, admit=partial(check_rank, spec, rank))
    with planning_apart(planner, config.train.timeout_s) as plan_step:
        device = select_device()
        if device.type == "cpu":
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        dist.init_process_group(backend_name(), timeout=timedelta(seconds=config.train.timeout_s))
        yield spec, RunFolder.create(config_path.parent), rank, device, plan_step
        dist.barrier()
        dist.destroy_process_group()


def main(config_path: Path) -> None:
    """Train as this process's rank; all ranks of the world run this."""
    with joined(config_path) as (spec, folder, rank, device, plan_step):
        Trainer(spec, folder, rank, device, plan_step).run()


def exit_with(function: Callable[[Path], None], config_path: Path) -> NoReturn:
    """Run a rank's main function; end with 0, 2 for a user's mistake, 1 for any other failure.

    Errors of ours whose message says all there is to say are printed without a traceback.
    """
    rank = os.environ.get("RANK", "0")
    code = 0
    try:
        function(config_path)
    except (ConfigError, LayoutError, DataError) as error:
        print(f"rank {rank}: error: {error}", file=sys.stderr)
        code = 2
    except (BadDataError, CheckpointError, DivergenceError, NoUpdateError, PlannerEndedError) as error:
        print(f"rank {rank} failed: {error}", file=sys.stderr)
        code = 1
    except BaseException:
        print(f"rank {rank} failed:", file=sys.stderr)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: destructors of communicators would wait for peers that may be gone.
    os._exit(code)


if __name__ == "__main__":
    exit_with(main, Path(sys.argv[1]))
