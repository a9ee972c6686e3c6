"""One rank of an examination, as torchrun starts it: `python -m omni.doctor.worker JOB.json`.

A job names the file to write (`out`), the seconds that a rank waits for others (`timeout_s`), and the
resolved configuration (`config`) whose process groups are made and used once. The first rank writes what all
found as JSON.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from infra.lineage import end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before the imports that take seconds

import torch
import torch.distributed as dist

from infra.run_folder import write_json
from omni.calibration.links import link_times
from omni.compose import load_config
from omni.models.llm import staged
from omni.planning.layouts import resolve_layout
from omni.training.worker import exit_with
from ops.device import backend_name, select_device
from parallel.groups import make_groups
from parallel.plain import gather_plain
from parallel.waiting import StallError
from parallel.warmup import memory_in_use, warm_up


def meet(timeout_s: float) -> None:
    """Join all ranks.

    Raises:
        StallError: naming the ranks that do not come in time.
    """
    timeout = timedelta(seconds=timeout_s)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(address, port, world, is_host, timeout, wait_for_workers=False)
    except dist.DistError as error:
        raise StallError(f"nobody answers at {address}:{port}, where ranks are to meet: {error}") from error
    store.set(f"doctor/{rank}", platform.node())
    missing, until = [], time.monotonic() + timeout_s
    for peer in range(world):
        try:
            store.wait([f"doctor/{peer}"], timedelta(seconds=max(0.1, until - time.monotonic())))
        except dist.DistError:
            missing.append(peer)
    if missing:
        names = ", ".join(map(str, missing))
        raise StallError(
            f"of {world} ranks, rank {names} did not answer in {timeout_s:g} s: look at what it printed, at "
            f"its machine, and whether that machine reaches {address}:{port}"
        )
    dist.init_process_group(backend_name(), timeout=timeout, store=store, rank=rank, world_size=world)


def check_sums(device: torch.device) -> bool:
    """Whether collectives give what they should: the sum of all ranks' numbers, and every rank's own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    total = torch.full((1000,), float(rank + 1), device=device)
    dist.all_reduce(total)
    gathered = torch.empty(world, device=device)
    dist.all_gather_into_tensor(gathered, torch.full((1,), float(rank), device=device))
    sums_right = bool((total == world * (world + 1) / 2).all())
    return sums_right and gathered.tolist() == [float(peer) for peer in range(world)]


def warm_groups(config_path: Path, timeout_s: float, device: torch.device) -> dict[str, float]:
    """Make every process group of a configuration and use each once, as training does before its first step.

    Returns the number of groups that this rank is in with others, of peers over all groups, and the seconds
    and MiB that making and warming took.
    """
    config = load_config(config_path)
    arrangement = resolve_layout(
        config.layout, config.placement, tuple(config.model.encoders), dist.get_world_size()
    )
    used = memory_in_use(device)
    start = time.perf_counter()
    groups = make_groups(arrangement, staged(config.model.llm), timedelta(seconds=timeout_s))
    made = time.perf_counter()
    warmed = warm_up(groups, device, wraps=arrangement.llm.vpp > 1)
    return {
        "groups": warmed.groups,
        "peers": warmed.peers,
        "make_s": made - start,
        "warm_s": warmed.seconds,
        "mib": (memory_in_use(device) - used) / 2**20,
    }


def examine(config: Path, timeout_s: float) -> dict[str, Any]:
    """What this rank finds together with all others."""
    device = select_device()
    meet(timeout_s)
    world = dist.group.WORLD
    assert world is not None
    found: dict[str, Any] = {
        "host": platform.node(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": str(torch.__version__),
        "backend": backend_name(),
        "sums_right": check_sums(device),
        "links": link_times(world, device),
    }
    if device.type == "cuda":
        nccl: Callable[[], Any] = torch.cuda.nccl.version
        found["nccl"] = ".".join(map(str, nccl()))
    return found | {"groups": warm_groups(config, timeout_s, device)}


def main(job_path: Path) -> None:
    """Examine as this process's rank; all ranks of the world run this."""
    job = json.loads(job_path.read_text())
    own = examine(Path(job["config"]), job["timeout_s"])
    found = gather_plain(own)
    if dist.get_rank() == 0:
        write_json(Path(job["out"]), found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    exit_with(main, Path(sys.argv[1]))
