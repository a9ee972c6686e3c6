"""The device this process computes on: one GPU a rank with NCCL, or the CPU with gloo."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ops.kernels.choice import without_kernels
from ops.near_device import cores_beside, keep_to, wants_node

_KERNELS = "32"  # about 0.6 MB each


def device_type() -> str:
    """Return "cuda" where a GPU is visible, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def select_device() -> torch.device:
    """Return this process's device, by torchrun's LOCAL_RANK, and make it current. Call it before anything is
    computed: on a CPU it bounds what oneDNN keeps, which is read once, and the threads of an operator; with a
    GPU it lets the process keep to the cores beside it, if the environment says so (`ops.near_device`).

    Raises:
        ValueError: if the environment asks for kernels, or for a binding, that there are not.
    """
    if device_type() == "cpu":
        # oneDNN compiles a kernel for each size of a tensor and keeps 1,024 of them unless told otherwise.
        # With lengths that vary that is 0.6 GB, for kernels that are hardly used again and soon made.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _KERNELS)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        return torch.device("cpu")
    index, binds = int(os.environ.get("LOCAL_RANK", "0")), wants_node(os.environ)
    torch.cuda.set_device(index)
    without_kernels()
    if binds:
        keep_to(cores_beside(pci_address(index)))
    return torch.device("cuda", index)


def pci_address(index: int) -> str:
    """Return where a GPU of those that are visible stands, as the kernel writes it: "0000:dc:00.0"."""
    gpu: Any = torch.cuda.get_device_properties(index)
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def make_deterministic() -> None:
    """Have torch take algorithms alone that give the same bits each time. Call it before a GPU computes:
    cuBLAS reads its workspace's size once, and needs one of these for it (CUDA's documentation of cuBLAS,
    "Results reproducibility").
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    module: Any = torch.utils.deterministic
    module.fill_uninitialized_memory = False  # nobody reads it


def dump_memory(path: Path) -> bool:
    """Write what the GPU's allocator holds, block by block, as https://pytorch.org/memory_viz shows it.
    Returns whether there was anything to write: not without a GPU in use.
    """
    if not torch.cuda.is_initialized():
        return False
    torch.cuda.memory._dump_snapshot(str(path))
    return True


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bring a tensor to `device`. A GPU reads it from pinned memory: the host queues the copy and goes on."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start to bring a tensor to the host. What is returned waits for it, and returns it."""
    if not tensor.is_cuda:
        return lambda: tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.cuda.current_stream().record_event()

    def arrived() -> torch.Tensor:
        event.synchronize()
        return host

    return arrived


def backend_name() -> str:
    """Return the torch.distributed backend that fits the device."""
    return "nccl" if device_type() == "cuda" else "gloo"


def device_name() -> str:
    """Return what a person calls this process's device, such as "NVIDIA H100 80GB HBM3" or "CPU"."""
    return torch.cuda.get_device_name() if device_type() == "cuda" else "CPU"


def precision_of(precision: str) -> str:
    """Return `precision`, of which "auto" is bf16 on a GPU and fp32 on the CPU."""
    if precision == "auto":
        return "bf16" if device_type() == "cuda" else "fp32"
    return precision


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype of weights and activations in `precision`, as `precision_of` reads it."""
    return torch.float32 if precision_of(precision) == "fp32" else torch.bfloat16


def peak_memory_bytes() -> int:
    """Return the most memory this process has held: allocated on the GPU, resident on the CPU."""
    if device_type() == "cuda":
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def visible_devices() -> int:
    """Return the number of GPUs on this machine, 0 on a CPU-only one."""
    return torch.cuda.device_count() if device_type() == "cuda" else 0
