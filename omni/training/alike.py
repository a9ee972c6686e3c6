"""Whether all ranks run the same program with the same configuration: what differs would not always fail.

A node with another version of a package, an older clone, a stale copy of the configuration or of the data
trains along with the others, and rounds, or updates, in another way. So before anything is built each rank
compares what it is with what the first rank is.
"""

import hashlib
import json
import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

from dataloader.decoders import decoder_versions
from dataloader.manifest import Manifest
from infra.host_checks import OURS, ROOT
from omni.config import Config, ConfigError
from omni.planning.run_spec import RunSpec
from omni.training.fingerprint import flattened
from parallel.waiting import waiting

PACKAGES = ("torch", "megatron-core", "numpy")
# What decides which kernels compute, and so how they round; not what belongs to a machine, such as devices.
VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "LD_PRELOAD",
    "MKL_CBWR",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
SHOWN = 5  # differences


def description(config: Config, datasets: Mapping[str, Manifest]) -> dict[str, str]:
    """Return what must be the same on all ranks, by name. `datasets` are those of the run, by key."""
    found = {"python": platform.python_version(), "omni-train's files": _digest_of_files()}
    found |= {name: version(name) for name in PACKAGES}
    found |= decoder_versions()
    found |= {name: os.environ.get(name, "not set") for name in VARIABLES}
    found |= {f"the data of {key}": _digest_of_data(manifest) for key, manifest in datasets.items()}
    return found | {key: repr(value) for key, value in flattened(asdict(config), "")}


def differences(own: Mapping[str, str], first: Mapping[str, str]) -> list[str]:
    """Return in words what differs between a rank's description and the first rank's."""
    names = [name for name in {**own, **first} if own.get(name) != first.get(name)]
    return [f"{name} is {own.get(name)}, on rank 0 {first.get(name)}" for name in names]


def check_alike(config: Config, device: torch.device, datasets: Mapping[str, Manifest]) -> None:
    """Compare all ranks of the world with the first one. All of them call it.

    Raises:
        ConfigError: on every rank, if any differs from the first; those that do say in what.
        StallError: if a peer does not answer in time.
    """
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    own = description(config, datasets)
    with waiting("comparing programs", world):
        host, first = _of_the_first([socket.gethostname(), own], device)
        found = differences(own, first)
        odd = torch.tensor([rank if found else -1], dtype=torch.int64, device=device)
        dist.all_reduce(odd, op=dist.ReduceOp.MAX)
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise ConfigError(
            f"rank {rank} on {socket.gethostname()} is not what rank 0 on {host} is: "
            f"{'; '.join(found[:SHOWN])}{more}. Install the same on all nodes, and start all with the same "
            f"environment, configuration and data"
        )
    if odd.item() >= 0:
        raise ConfigError(f"rank {odd.item()} is not what rank 0 is: it says in what")


def _of_the_first(own: list[Any], device: torch.device) -> list[Any]:
    """Return what rank 0 gives, as JSON: to unpickle what arrives would be to obey it."""
    text = bytearray(json.dumps(own).encode())
    size = torch.tensor([len(text)], dtype=torch.int64, device=device)
    dist.broadcast(size, 0)
    told = torch.zeros(int(size.item()), dtype=torch.uint8, device=device)
    if dist.get_rank() == 0:
        told.copy_(torch.frombuffer(text, dtype=torch.uint8))
    dist.broadcast(told, 0)
    result: list[Any] = json.loads(bytes(told.tolist()))
    return result


def datasets_of(spec: RunSpec) -> dict[str, Manifest]:
    """Return what a run's datasets say of themselves, by the key of each."""
    sections = {"data.sources": spec.indexes, "data.heldout": spec.heldout}
    return {
        f"{section}.{name}": index.manifest
        for section, indexes in sections.items()
        for name, index in indexes.items()
    }


def _digest_of_data(manifest: Manifest) -> str:
    """A name for a dataset's sizes and what its files hold, as far as it knows that."""
    sizes = hashlib.blake2b(repr(manifest).encode(), digest_size=8).hexdigest()
    return f"{sizes}, {manifest.hash or 'without hashes'}"


def _digest_of_files() -> str:
    """A name for what the product's files hold."""
    digest = hashlib.blake2b(digest_size=8)
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
