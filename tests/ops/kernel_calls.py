"""Kernels of ops/kernels where there is no GPU: interpreted, or compiled for one and not run.

How Triton takes a kernel is settled when it and the kernel are imported, so both happen in processes of their
own, and this module imports Triton only inside functions.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def process_with(environment: Mapping[str, str]) -> Iterator[Callable[..., Any]]:
    """A process with these variables, as a function: it takes one that can be imported by name and its
    arguments, and returns or raises what that does there.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_set, initargs=(dict(environment),)) as pool:
        yield lambda function, *given: pool.submit(function, *given).result(timeout=300)


def _set(environment: dict[str, str]) -> None:
    os.environ.update(environment)


@contextmanager
def launches() -> Iterator[list[str]]:
    """The names of the kernels that are launched meanwhile, in order."""
    from triton.runtime.jit import KernelInterface

    names: list[str] = []
    of_grid = KernelInterface.__getitem__

    def counted(kernel: Any, grid: Any) -> Callable[..., Any]:
        def launch(*given: Any, **options: Any) -> Any:
            assert all(grid), f"an empty grid {grid}"
            names.append(kernel.__name__)
            return of_grid(kernel, grid)(*given, **options)

        return launch

    with patch.object(KernelInterface, "__getitem__", counted):
        yield names


@contextmanager
def compiled(capability: int) -> Iterator[list[Any]]:
    """What kernels are compiled to for GPUs of a compute capability (90 for 9.0) that are launched meanwhile;
    they do not run. Triton sees their arguments as it would on a GPU.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    target = GPUTarget("cuda", capability, 32)
    gpu = SimpleNamespace(
        # Kernels are kept by device, and would be those of the first target.
        get_current_device=lambda: capability,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernels.append(run(kernel, *given, grid=grid, warmup=True, **options))

    with patch.object(JITFunction, "run", compile_only), patch.object(driver, "_active", gpu):
        yield kernels


def drawn(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers around 0.5, the same of a seed in any precision."""
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=generator) + 0.5).to(dtype)


def assert_rounded(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Assert that `found` is `exact`, in fp64, computed in fp32 and rounded once. In sums a number may be off
    by what the largest one is rounded by in fp32. The interpreter cuts bf16 off and does not round it.
    """
    share = {torch.float32: 2e-6, torch.float16: 2**-11 * 1.01, torch.bfloat16: 2**-7 * 1.01}[found.dtype]
    most = exact.abs().max().item() if exact.numel() else 0.0
    torch.testing.assert_close(found.double(), exact, rtol=share, atol=2e-6 * most)
