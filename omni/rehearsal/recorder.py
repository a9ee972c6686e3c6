"""Record what a rank launches on a GPU and what makes its host wait, on fake tensors of device "cuda".

A `Recorder` stands below autograd and sees every op. An op that a GPU runs counts as the kernels it launches
(`kernels.py`), of a kind; its bytes are those of its whole operands and results. Whatever hands a number or a
shape from the device to the host, or copies between them without pinned memory, makes the host wait until the
device has done all that was queued before. A number that the host reads is answered with 1, so that the step
goes on; a shape that depends on numbers cannot be answered.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from omni.rehearsal.call_sites import CallSites, thread_name
from omni.rehearsal.findings import DOUBLE, ORDER, WAITS, DynamicShapeError, Finding
from omni.rehearsal.kernels import kernels_of
from omni.rehearsal.launches import NOT_MEMORY, Launches
from omni.rehearsal.order import Ordering
from pipeline.ops import PASSES, Kind, Op

_DEVICE = torch.ops.prim.device.default
_BEFORE = ("build", "assemble")  # phases before the first step
# Ops that run nothing, beside views.
_NO_LAUNCH = re.compile(
    r"(new_)?empty(_like|_strided)?|_unsafe_view|_reshape_alias|lift_fresh|set_|resize_|is_same_size|record_stream"
)
_FILL = re.compile(r"(new_)?(zeros|ones|full)(_like)?|zero_|fill_")
_COPY = re.compile(r"copy_|_to_copy|clone")


class Recorder(TorchDispatchMode):
    """Counts launches and findings by phase while it is entered; `at` tells it where the step is."""

    def __init__(self) -> None:
        super().__init__()
        self.findings: Counter[Finding] = Counter()
        self._ops: Counter[str] = Counter()
        self._pass: Op | None = None  # the last one
        self._launches: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._bytes: Counter[str] = Counter()
        self._flops: Counter[str] = Counter()
        self._copies: Counter[str] = Counter()  # to the device
        self.unknown: Counter[str] = Counter()  # operators of which nobody knows what they launch
        self.order = Ordering(lambda: self.phase, lambda what: self.note(ORDER, what))
        self._sites = CallSites()
        self.at("build")

    def at(self, where: str | Op) -> None:
        """Say what goes on from here: a word, or the op that runs."""
        self.phase = where if isinstance(where, str) else _phase(where)
        self._ops[self.phase] += where != self._pass  # else it goes on behind a message within it
        if isinstance(where, Op) and where.kind in PASSES:
            self._pass = where

    def launches(self) -> Mapping[str, Launches]:
        """Return what was launched, by phase, in order of their first launch."""
        return {
            phase: Launches(
                self._ops[phase],
                dict(sorted(kinds.items())),
                self._bytes[phase],
                self._flops[phase],
                self._copies[phase],
            )
            for phase, kinds in self._launches.items()
        }

    def start(self) -> None:
        """Forget the steps so far, but not how the rank was built and its inputs assembled. What was not in
        order is told when it is seen first, so it stays, too.
        """
        for finding in [f for f in self.findings if f.phase not in _BEFORE and f.kind != ORDER]:
            del self.findings[finding]
        for counts in (self._ops, self._launches, self._bytes, self._flops, self._copies):
            for phase in [p for p in counts if p not in _BEFORE]:
                del counts[phase]

    def note(self, kind: str, what: str) -> Finding:
        """Note a finding where the thread is now."""
        found = Finding(self.phase, thread_name(), kind, what, *self._sites.here())
        self.findings[found] += 1
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func._opname
        if func is _DEVICE:  # half of all calls: torch asks fake tensors where they are
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        try:
            out = func(*args, **kwargs)
        except DataDependentOutputException:
            return self._answer(name, args)
        except DynamicOutputShapeException:
            found = self.note(WAITS, f"{name}, whose shape depends on values")
            raise DynamicShapeError(str(found)) from None
        if kwargs.get("pin_memory"):
            out._pinned = True  # which a fake tensor forgets
        waits = name in ("copy_", "_to_copy") and self._copy(name, args, kwargs, out)
        kind = _kind(func, name)
        if kind is not None:
            self._launch(kind, func, args, kwargs, out)
            self.order.ran(func, args, kwargs, out, waits=waits)
        elif not func.is_view:
            self.order.made(out)
        return out

    def _answer(self, name: str, args: tuple[Any, ...]) -> bool | int | float:
        """Note that the host reads a number, and give it one."""
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if any(x.is_cuda for x in tensors):
            self.note(WAITS, "a number is read" if name == "_local_scalar_dense" else name)
            self.order.read(tensors, name)
        else:
            came = any(self.order.on_host(x, name, writes=False) for x in tensors)
            assert came, f"{name}: a fake world has lost a number of the host"
        dtype = tensors[0].dtype
        return True if dtype is torch.bool or name == "equal" else 1.0 if dtype.is_floating_point else 1

    def _copy(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> bool:
        """Note a copy between host and device, and whether the host waits for it, which is returned."""
        source, target = (args[0], out) if name == "_to_copy" else (args[1], args[0])
        if source.is_cuda == target.is_cuda:
            return False
        self._copies[self.phase] += target.is_cuda
        asked = kwargs.get("non_blocking", name == "copy_" and len(args) > 2 and args[2])
        # torch makes what it need not wait for in pinned memory (_to_copy, TensorConversions.cpp).
        made = bool(asked) and name == "_to_copy" and source.is_cuda
        pinned = made or (target if source.is_cuda else source).is_pinned()
        if waits := not (asked and pinned):
            way = "from the device" if source.is_cuda else "to the device"
            memory = "pinned" if pinned else "pageable"
            self.note(WAITS, f"a copy {way}, {memory}, {'non-' if asked else ''}blocking")
        return waits

    def _launch(self, kind: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._opname
        if kind == "product":
            _check_dtypes(name, args)
        read = () if kind == "fill" else args[1:] if name == "copy_" else args
        tensors = [x for x in tree_iter((read, out)) if isinstance(x, torch.Tensor) and x.is_cuda]
        if not tensors:
            return
        kernels = kernels_of(func, args)
        if kernels is None:
            self.unknown[str(func.name())] += 1
        self._launches[self.phase][kind] += 1 if kernels is None else kernels
        if kind not in NOT_MEMORY:
            # What returns nothing, as lists that are updated in place, is written all the same.
            written = () if func._schema.returns else _written(func, args)
            self._bytes[self.phase] += sum(x.numel() * x.element_size() for x in (*tensors, *written))
        if kind == "product":
            factors = [x for x in args if not isinstance(x, torch.dtype)]
            flops = flop_registry[func._overloadpacket](*factors, **kwargs, out_val=out)
            self._flops[self.phase] += flops
        if any(x.dtype is torch.float64 for x in tensors):
            self.note(DOUBLE, name)


def recorder_here() -> Recorder | None:
    """Return the recorder that is entered on this thread, if there is one."""
    found = (mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder))
    return next(found, None)


def note_wait(what: str) -> None:
    """Tell the recorder that is entered on this thread, if there is one, that the host waits."""
    recorder = recorder_here()
    if recorder is not None:
        recorder.note(WAITS, what)


def _phase(op: Op) -> str:
    return f"wait for {op.on}" if op.kind is Kind.WAIT else str(op.kind)


def _kind(func: Any, name: str) -> str | None:
    """The kind of kernel behind an op, None where there is none."""
    if func.namespace == "c10d":
        return "collective"
    if func.namespace == "prim" or func.is_view or _NO_LAUNCH.fullmatch(name):
        return None
    if "attn" in name or "attention" in name:
        return "attention"
    if func._overloadpacket in flop_registry:
        return "product"
    return "fill" if _FILL.fullmatch(name) else "copy" if _COPY.fullmatch(name) else "other"


def _written(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors that an op changes in place."""
    changed = [x for of, x in zip(func._schema.arguments, args, strict=False) if of.is_write]
    return [x for x in tree_iter(changed) if isinstance(x, torch.Tensor) and x.is_cuda]


def _check_dtypes(name: str, args: tuple[Any, ...]) -> None:
    """Refuse a product of several dtypes, as kernels do and fake ones do not; one that says in which dtype it
    adds up has its factors alone in one.
    """
    adds = any(isinstance(x, torch.dtype) for x in args)
    factors = (x for x in args[adds:] if isinstance(x, torch.Tensor))
    dtypes = {x.dtype for x in factors if x.is_floating_point()}  # where groups end is no factor
    if len(dtypes) > 1:
        raise RuntimeError(f"{name}: a product of {' and '.join(sorted(map(str, dtypes)))}")
