"""One rank of a calibration, as torchrun starts it: `python -m omni.calibration.worker JOB.json`.

A job names the file to write (`out`) and the `precision`. Ranks that torchrun starts on several nodes measure
the links between these as well.
"""

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from infra.lineage import end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before the imports that take seconds

import torch
import torch.distributed as dist

from infra.run_folder import write_text
from omni.calibration.figures import Measured, cluster_file
from omni.calibration.links import issuing_ns, link_times
from omni.calibration.machine import (
    attention_rates,
    dispatch_ns,
    layer_rate,
    memory_bytes,
    memory_rate,
    product_rates,
    starting_ns,
)
from omni.training.worker import exit_with
from ops.device import backend_name, dtype_of, precision_of, select_device
from parallel.plain import gather_plain

TIMEOUT = timedelta(seconds=300)  # also of groups: by itself each waits as long as its backend, half an hour

Found = TypeVar("Found")


def measure(device: torch.device, dtype: torch.dtype, ranks_per_node: int) -> Measured:
    """Measure this rank, while all others measure themselves: they share what they will share in training."""
    rank, world = dist.get_rank(), dist.get_world_size()
    # Every rank makes every group. Neighbours share a node; the first ranks of all nodes talk between them.
    nodes = [
        dist.new_group(list(range(first, min(first + ranks_per_node, world))), TIMEOUT)
        for first in range(0, world, ranks_per_node)
    ]
    between = dist.new_group(list(range(0, world, ranks_per_node)), TIMEOUT)
    dist.barrier()

    def timed(what: str, measured: Callable[[], Found]) -> Found:
        if rank == 0:
            print(f"measuring {what} ...", flush=True)
        return measured()

    node = nodes[rank // ranks_per_node]
    with torch.no_grad():
        products = timed("matrix products", lambda: product_rates(device, dtype))
        attention = timed("attention", lambda: attention_rates(device, dtype))
        memory = timed("memory", lambda: memory_rate(device))
        longest, _ = attention[max(attention)]
        overhead, launch = timed("what starting an op costs", lambda: starting_ns(device, dtype))
        one = Measured(
            products=products,
            attention=attention,
            layer=timed("a whole layer", lambda: layer_rate(device, dtype, longest, memory)),
            memory_bytes_per_s=memory,
            memory_bytes=memory_bytes(device),
            op_overhead_ns=overhead,
            launch_ns=launch,
            dispatch_ns=timed("what sorting tokens costs", lambda: dispatch_ns(device, dtype)),
            issue_ns=timed("what starting a collective costs", lambda: issuing_ns(node, device)),
            inside=timed("links inside a node", lambda: link_times(node, device)),
            across={}
            if rank % ranks_per_node
            else timed("links between nodes", lambda: link_times(between, device)),
        )
    dist.barrier()
    return one


def calibrate(out: Path, precision: str, device: torch.device, ranks_per_node: int) -> None:
    """Measure all ranks; the first one writes the cluster file."""
    world = dist.get_world_size()
    dtype = dtype_of(precision)
    own = measure(device, dtype, ranks_per_node)
    ranks = [Measured(**of) for of in gather_plain(vars(own))]
    if dist.get_rank():
        return
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    dtype_name, nodes = str(dtype).removeprefix("torch."), -(-world // ranks_per_node)
    what = f"{world} rank(s) on {nodes} node(s), {kind}, {dtype_name}, {backend_name()}."
    format_ = precision_of(precision)
    write_text(out, cluster_file(out.stem, device.type, format_, ranks, ranks_per_node, what))


def main(job_path: Path) -> None:
    """Calibrate as this process's rank; all ranks of the world run this."""
    job = json.loads(job_path.read_text())
    device = select_device()
    dist.init_process_group(backend_name(), timeout=TIMEOUT)
    calibrate(Path(job["out"]), job["precision"], device, int(os.environ["LOCAL_WORLD_SIZE"]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    exit_with(main, Path(sys.argv[1]))
