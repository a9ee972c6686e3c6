"""Whether an operator runs as a kernel in Triton."""

import importlib.util
import os
from functools import cache

import torch

VARIABLE = "OMNI_KERNELS"
TRITON, TORCH = "triton", "torch"
OLDEST = (8, 0)  # compute capability: earlier GPUs have no bf16


def takes_kernel(x: torch.Tensor) -> bool:
    """Whether operators on `x` are kernels. Numbers in double precision, which the kernels would round, are
    left to torch.
    """
    return x.is_cuda and x.dtype != torch.float64 and without_kernels() is None


@cache
def without_kernels() -> str | None:
    """Why this process's GPU runs operators as torch composes them, None where it runs kernels.

    Raises:
        ValueError: if the variable has another value.
    """
    given = os.environ.get(VARIABLE, TRITON)
    if given not in (TRITON, TORCH):
        raise ValueError(f"{VARIABLE}={given}: set it to {TRITON} or {TORCH}")
    if given == TORCH:
        return f"{VARIABLE}={TORCH}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability() < OLDEST:
        return "Triton compiles for GPUs from Ampere on"
    return None


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] → [T, D], side by side in memory, as kernels take it."""
    return x.contiguous().flatten(0, -2)
