"""The environment that ranks are started in: each variable with its reason. What a user has set stays.

An example: on a machine with Hopper GPUs ranks get CUDA_DEVICE_MAX_CONNECTIONS=1; whoever starts `omni train`
with CUDA_DEVICE_MAX_CONNECTIONS=8 has 8. The same table is in docs/launching.md.
"""

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.machine import usable_cores

WORKERS_GRACE_S = 50  # between a stop signal and the agent's SIGKILL to its workers
RECORDED = 2000  # collectives of a rank that the flight recorder keeps: some steps
BLACKWELL = 10.0
ASK_S = 10.0
_DRIVER = Path("/dev/nvidiactl")


@dataclass(frozen=True)
class Place:
    """Where ranks start: how many on this machine, the compute capability of its GPUs, None without any, and
    the folder for what failed ranks leave.
    """

    ranks: int
    capability: float | None
    errors: Path


@dataclass(frozen=True)
class Variable:
    """A variable, its value in a place (None: not set there) and why. `also` are other names of the same
    setting: where a user has set one of them, this one is left alone, too.
    """

    name: str
    value: Callable[[Place], str | None]
    why: str
    also: tuple[str, ...] = ()


def _on_gpus(value: str) -> Callable[[Place], str | None]:
    return lambda place: None if place.capability is None else value


VARIABLES = (
    Variable(
        "OMP_NUM_THREADS",
        lambda place: str(max(1, usable_cores() // place.ranks)),
        "ranks share the cores; by itself each would start a thread on every core",
    ),
    Variable(
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        lambda place: str(WORKERS_GRACE_S),
        "seconds that ranks have to save after a signal",
    ),
    Variable(
        "PYTORCH_ALLOC_CONF",
        _on_gpus("expandable_segments:True"),
        "lengths differ from step to step: segments that grow do not leave holes that nothing fits",
        also=("PYTORCH_CUDA_ALLOC_CONF",),
    ),
    Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        lambda place: "1" if place.capability is not None and place.capability < BLACKWELL else None,
        "kernels start in the order of their launches: megatron's collectives before the products that hide "
        "them. From Blackwell on priorities of streams do that",
    ),
    Variable(
        "OMNI_KERNELS",
        _on_gpus("triton"),
        "norms, rotations, gates and losses are one kernel each where Triton is installed; with torch, or "
        "without Triton, they are several of torch's",
    ),
    Variable(
        "OMNI_NUMA",
        _on_gpus("node"),
        "a rank keeps to the cores beside its GPU, and so does the memory that the GPU reads; with none it "
        "runs where it may",
    ),
    Variable(
        "TORCH_NCCL_HIGH_PRIORITY",
        _on_gpus("1"),
        "a collective that others wait for comes before the next product",
    ),
    Variable(
        "TORCH_FR_BUFFER_SIZE",
        _on_gpus(str(RECORDED)),
        "the flight recorder knows the last collectives of each rank",
        also=("TORCH_NCCL_TRACE_BUFFER_SIZE",),
    ),
    Variable(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        _on_gpus("1"),
        "a hang leaves what every rank was at",
    ),
    Variable(
        "TORCH_FR_DUMP_TEMP_FILE",
        lambda place: None if place.capability is None else str(place.errors / "collectives-rank-"),
        "the dump lies in the run folder, where it is looked for",
        also=("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",),
    ),
)


def defaults(place: Place, has: Mapping[str, str]) -> dict[str, str]:
    """What the table sets in a place, beside what the environment `has` already."""
    wanted = {one.name: one.value(place) for one in VARIABLES if not {one.name, *one.also} & has.keys()}
    return {name: value for name, value in wanted.items() if value is not None}


def capability() -> float | None:
    """The least compute capability of this machine's GPUs by the driver's own tool, without a CUDA context;
    None without GPUs.
    """
    if not _DRIVER.exists():
        return None
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S).stdout.split()
        return min(map(float, said), default=None)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
