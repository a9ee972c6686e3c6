"""What torch.cuda answers where the guard of `noop_guard.py` stands for a GPU, and no tensor has content.

Megatron and this platform take the branches of a GPU then, up to the kernels. What would make the host wait
tells the `Recorder` that is entered on the thread, if there is one. All of it stays while the process lives.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import _dynamo
from torch import library as operators
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._mode_utils import no_dispatch

from omni.rehearsal import fake_streams
from omni.rehearsal.findings import WAITS
from omni.rehearsal.recorder import note_wait, recorder_here

CAPABILITY = (9, 0)
_MEMORY = 80 << 30
# Ops with a CUDA kernel of their own, which a torch without CUDA would take apart on this device.
_WITH_KERNEL = ("silu_backward", "_fused_rms_norm", "_fused_rms_norm_backward")
_DEVICES = 8  # of a node: a rank uses one of them


class _Properties:
    name, total_memory, multi_processor_count = "fake GPU", _MEMORY, 132
    major, minor = CAPABILITY


class _Generator:
    """The device's random numbers: their state lives on the host."""

    def get_state(self) -> torch.Tensor:
        with unset_fake_temporarily():
            return torch.zeros(16, dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        pass


def install(guard: ctypes.PyDLL) -> None:
    """Answer torch.cuda's calls, and what tensors of a torch without CUDA refuse on device "cuda"."""
    _answer_for_the_device()
    _answer_for_tensors()
    fake_streams.install(guard)
    # megatron's fused functions are compiled on a GPU. Here they run op by op: no fewer launches than there.
    _dynamo.config.disable = True


def _answer_for_the_device() -> None:
    cuda: Any = torch.cuda
    answers = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": _DEVICES,
        "current_device": 0,
        "get_device_capability": CAPABILITY,
        "get_device_properties": _Properties(),
        "get_device_name": _Properties.name,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "mem_get_info": (_MEMORY, _MEMORY),
    }
    for name in ("init", "_lazy_init", "set_device", "manual_seed", "manual_seed_all"):
        answers[name] = None
    for name, answer in answers.items():
        setattr(cuda, name, _always(answer))
    cuda.empty_cache = lambda: note_wait("cuda.empty_cache()")
    cuda.device = _here
    cuda.default_generators = (_Generator(),) * _DEVICES
    c: Any = torch._C
    c._cuda_getDevice = _always(0)
    mode: Any = FakeTensorMode
    mode.avoid_device_init = property(lambda self: True)
    for name in _WITH_KERNEL:
        operators.impl(f"aten::{name}", "cuda", _never_runs)


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


def _never_runs(*args: Any) -> Any:
    raise AssertionError("a kernel ran on a device that is not there")


@contextlib.contextmanager
def _here(device: Any) -> Iterator[None]:
    """Enter a device: there is one."""
    yield


def _answer_for_tensors() -> None:
    tensor: Any = torch.Tensor
    fake: Any = FakeTensor
    module: Any = torch.nn.Module
    tensor.pin_memory = _pinned
    tensor.is_pinned = lambda self, *args: getattr(
        self if self._base is None else self._base, "_pinned", False
    )
    tensor.type = _type_name(tensor.type)
    fake.tolist = _listed(fake.tolist)
    fake.numpy = _as_array(fake.numpy)
    module.to = _move


def _pinned(self: torch.Tensor, *args: Any) -> torch.Tensor:
    pinned: Any = self.clone()
    pinned._pinned = True
    out: torch.Tensor = pinned
    return out


def _type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tensor.type(), by whose answer megatron's optimizer sorts parameters."""

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        asks = not args and not kwargs and self.device.type == "cuda"
        return answer.replace("torch.", "torch.cuda.", 1) if asks and "cuda" not in answer else answer

    return type_


def _listed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tensor.tolist(), with ones for the numbers of the device, there or copied: who reads it is to go on."""

    def tolist(self: FakeTensor) -> Any:
        recorder = recorder_here()
        if self.device.type == "cuda":
            if recorder is not None:
                recorder.note(WAITS, "tolist()")
                recorder.order.read([self], "tolist")
        elif recorder is None or not recorder.order.on_host(self, "tolist", writes=False):
            return original(self)
        with no_dispatch():
            return torch.ones(self.shape).tolist()

    return tolist


def _as_array(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tensor.numpy(), with zeros for what has come from the device."""

    def numpy(self: FakeTensor, *args: Any, **kwargs: Any) -> Any:
        recorder = recorder_here()
        if recorder is None or not recorder.order.on_host(self, "numpy", writes=False):
            return original(self, *args, **kwargs)
        with no_dispatch():
            return torch.zeros((), dtype=self.dtype).expand(self.shape).numpy()

    return numpy


def _move(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Module.to(device). torch's own assigns `.data`, and a fake parameter still names its old device."""
    device = next(torch.device(a) for a in args if isinstance(a, str | torch.device))
    moved: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # tied weights stay tied
    with torch.no_grad():
        for part in module.modules():
            for name, old in part._parameters.items():
                if old is None or old.device == device:
                    continue
                if old not in moved:
                    moved[old] = torch.nn.Parameter(old.detach().to(device), requires_grad=old.requires_grad)
                    # The marks that megatron and we put on it, but not what the new one says of itself.
                    marks = {k: v for k, v in vars(old).items() if k not in vars(moved[old])}
                    vars(moved[old]).update(marks)
                part._parameters[name] = moved[old]
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = buffer.to(device)
    return module
