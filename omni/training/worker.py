"""One rank of a run, as torchrun starts it: `python -m omni.training.worker RUN_FOLDER/config.yaml`."""

import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from infra.run_folder import RunFolder
from omni.compose import load_config
from omni.training.job import prepare_job
from omni.training.trainer import Trainer
from ops.device import backend_name, select_device


def main(config_path: Path) -> None:
    """Train as this process's rank; all ranks of the world run this."""
    config = load_config(config_path)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    job = prepare_job(config, world)
    device = select_device()
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group(backend_name(), timeout=timedelta(seconds=config.train.timeout_s))
    trainer = Trainer(job, RunFolder.create(config_path.parent), rank, device)
    trainer.run()
    dist.barrier(trainer.rank.groups.control)
    dist.destroy_process_group()


def run(config_path: Path) -> int:
    """Run `main` and turn any error into a message with its rank and a non-zero exit code."""
    try:
        main(config_path)
    except ValueError as error:  # a user's mistake: the message is meant for them
        print(f"rank {os.environ.get('RANK', '0')}: error: {error}", file=sys.stderr, flush=True)
        return 2
    except Exception:
        print(f"rank {os.environ.get('RANK', '0')} failed:", file=sys.stderr)
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = run(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Destructors of communicators wait for peers that may be gone.
    os._exit(code)
