"""Whether an operator runs as a kernel in Triton."""

import importlib.util
from functools import cache

import torch


def takes_kernel(x: torch.Tensor) -> bool:
    """Whether operators on `x` are kernels: on a GPU that Triton compiles for. Numbers in double precision,
    which the kernels would round, are left to torch.
    """
    return x.is_cuda and x.dtype != torch.float64 and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability() >= (8, 0)
