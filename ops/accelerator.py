"""Let megatron-core run on the CPU, and with torch alone. Where CUDA is available, `install()` does nothing.

megatron-core assumes a GPU in places that have nothing to do with kernels: it allocates on "cuda", asks
for the current device, draws from the CUDA generator, compares tensor type names. `install()` answers the
calls into torch, before megatron is imported; `patch()` corrects the modules of megatron that were imported.
Each entry names what would fail without it. `parallel/megatron.py` is the only caller.
"""

import contextlib
import functools
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    "tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn",
    "empty_like", "zeros_like", "ones_like",
)  # fmt: skip


class _InertStream:
    """Stands in for a CUDA stream or event: every method returns the stream itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., "_InertStream"]:
        return lambda *args, **kwargs: self

    def __enter__(self) -> "_InertStream":
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _InertStream)

    __hash__ = object.__hash__


def install() -> None:
    """Answer megatron's CUDA calls on a CPU-only machine. Call it before megatron is imported."""
    if torch.cuda.is_available() or getattr(torch.cuda, "_omni_cpu", False):
        return
    cuda: Any = torch.cuda
    cuda._omni_cpu = True
    stream = _InertStream()
    cuda.current_device = lambda: _CPU
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, lambda *args, **kwargs: stream)
    for name in ("synchronize", "empty_cache"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.Stream = cuda.Event = _InertStream
    # The "device" generator is the CPU's.
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    module: Any = torch.nn.Module
    module.cuda = lambda self, *args, **kwargs: self
    tensor.type = _type_for_optimizer(torch.Tensor.type)
    # megatron's fused functions are torch.compile'd; compiling costs more than it saves here, and the import
    # of the compiler alone is a fifth of a rank's start.
    whole: Any = torch
    whole.compile = _leave_uncompiled


def _leave_uncompiled(model: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Stands in for torch.compile, as a function and as a decorator with options."""
    return (lambda function: function) if model is None else model


def _type_for_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tensor.type() that names CUDA types to megatron's optimizer, which sorts parameters by that name."""

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not args and not kwargs and caller.startswith("megatron.core.optimizer"):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return type_


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tensor factory: device "cuda" becomes the CPU, pinned memory is not asked for."""

    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapped


class _TorchOnCpu(types.ModuleType):
    """The torch module as megatron's modules see it: factories never allocate on "cuda"."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def patch() -> None:
    """Correct the megatron modules imported so far. Call it again after a lazy import of another one."""
    _define_missing_gemm()
    if torch.cuda.is_available():
        return
    import megatron.core.tensor_parallel.random as megatron_random

    rng: Any = megatron_random
    rng._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # Every fork of a generator changes the CPU state here, which megatron would warn of each time.
    logging.getLogger(rng.__name__).addFilter(lambda record: "CPU RNG state" not in record.getMessage())
    proxy = _TorchOnCpu()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = proxy  # type: ignore[attr-defined]


def _define_missing_gemm() -> None:
    """megatron-core 0.16.1 reads `te_general_gemm` without Transformer Engine, on GPUs too (moe_utils)."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
