"""Measure what a rank holds and sends, by watching every operation on its tensors.

A `Meter` stands below autograd: it sees each tensor that an operation puts out and each collective with its
group, on real tensors and on fake ones alike. A tensor's bytes are those of its storage, counted once,
however many views there are, from when it is made until nobody refers to it. Gaps and rounding of an
allocator are not part of it. Only what the thread does that entered the meter is seen.
"""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from omni.planning.memory import KINDS
from omni.rehearsal.footprint import NOTHING, Sent, Traffic, ring, send
from omni.rehearsal.meetings import RECEIVE, SEND, Call
from pipeline.ops import Op
from pipeline.rules.lists import ENCODES

_CPU = torch.device("cpu")
HOST = "host"
_DEVICE = torch.ops.prim.device.default
# What torch adds in place in the backward of a selection, but not on a subclass of tensors, as fake ones are.
_ZEROS, _ADD, _ADD_IN_PLACE = (
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.index_add.default,
    torch.ops.aten.index_add_.default,
)
# Without a fake kernel in torch: what they would put out is there already.
_UNFAKED = ("reduce_scatter_tensor_coalesced_", "allgather_into_tensor_coalesced_")


class Meter(TorchDispatchMode):
    """Counts live bytes by kind and sent bytes by group while it is entered.

    What is made counts as `kind`, and `where` is what then goes on, a word or an op: set both as the step
    proceeds. `nodes` gives the node of every rank. Tensors on other devices than `device` are not held. What
    is made as `HOST` is memory beside the device, whatever that is: `most_on_host` is the most of it at once.
    """

    def __init__(self, nodes: Sequence[int], device: torch.device = _CPU) -> None:
        super().__init__()
        self.device = device.type
        self.labels: Mapping[str, str] = {}
        self.nodes = nodes
        self.kind = "buffers"
        self.counts = True
        self.where: str | Op = "start"
        self.live = dict.fromkeys(KINDS, 0)
        self.peak = dict(self.live)
        self.at: str | Op = self.where
        self.total = self.most = 0
        self.on_host = self.most_on_host = 0
        self.encoding: dict[Op, int] = {}  # the most bytes during each pass of an encoder
        self.sent: defaultdict[tuple[str, str], Sent] = defaultdict(lambda: NOTHING)
        self.calls: list[Call] = []
        self._zeros: int | None = None  # the storage that the last operation put out, if it is of zeros
        self._held: dict[int, tuple[str, int, weakref.ref[Any]]] = {}

    @contextlib.contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """Count what is made inside the block as `kind`."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    @contextlib.contextmanager
    def not_counting(self) -> Iterator[None]:
        """Hold what is made inside the block as nothing."""
        self.counts = False
        try:
            yield
        finally:
            self.counts = True

    def adopt(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Count tensors that exist already as `kind`."""
        for tensor in tensors:
            if tensor.device.type != self.device:
                continue
            storage = tensor.untyped_storage()
            self._forget(storage._cdata)
            self._hold(storage, kind)

    def start(self, labels: Mapping[str, str]) -> None:
        """Forget peak and traffic, as at the beginning of a step; `labels` names groups by torch's names."""
        self.labels = labels
        self.peak, self.most, self.at = dict(self.live), self.total, self.where
        self.most_on_host = self.on_host
        self.sent.clear()
        self.calls.clear()
        self.encoding.clear()

    def traffic(self) -> Traffic:
        """Return what was sent since the start."""
        return dict(sorted(self.sent.items()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # half of all calls: torch asks fake tensors where they are
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        if func.namespace == "c10d":
            self._count(func._opname, args)
            if func._opname in _UNFAKED and any(isinstance(x, FakeTensor) for x in tree_iter(args)):
                return _with_nothing(func, args, kwargs or {})
        if func is _ADD and args[0].untyped_storage()._cdata == self._zeros:
            func = _ADD_IN_PLACE
        out = func(*args, **(kwargs or {}))
        self._zeros = out.untyped_storage()._cdata if func is _ZEROS else None
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and (tensor.device.type == self.device or self.kind == HOST):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._held:
                    self._hold(storage, self.kind)
        return out

    # Memory.

    def _hold(self, storage: torch.UntypedStorage, kind: str) -> None:
        key, size = storage._cdata, storage.nbytes() * self.counts
        self._held[key] = kind, size, weakref.ref(storage, lambda _: self._forget(key))
        if kind == HOST:
            self.on_host += size
            self.most_on_host = max(self.most_on_host, self.on_host)
            return
        self.live[kind] += size
        self.total += size
        if self.total > self.most:
            self.most, self.peak, self.at = self.total, dict(self.live), self.where
        if isinstance(self.where, Op) and self.where.kind in ENCODES:
            self.encoding[self.where] = max(self.total, self.encoding.get(self.where, 0))

    def _forget(self, key: int) -> None:
        kind, size, _ = self._held.pop(key, (self.kind, 0, None))
        if kind == HOST:
            self.on_host -= size
            return
        self.live[kind] -= size
        self.total -= size

    # Collectives.

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        group = next(g for a in args if (g := _group(a)) is not None)
        if group.size() == 1 or name == "barrier":
            return
        ranks = dist.get_process_group_ranks(group)
        me, label = ranks[group.rank()], self.labels.get(group.group_name, "other")
        self.calls.append(_call(name, args, ranks, me, label, str(self.where)))
        if name == "recv_":
            return
        collective, messages = _messages(name, args, ranks, me)
        self.sent[label, collective] += send(self.nodes, me, messages)


def _group(argument: Any) -> dist.ProcessGroup | None:
    if not isinstance(argument, torch.ScriptObject):
        return None
    with contextlib.suppress(RuntimeError):
        group: dist.ProcessGroup = dist.ProcessGroup.unbox(argument)
        return group
    return None


def _bytes(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_iter(tensors) if isinstance(x, torch.Tensor))


def _messages(name: str, args: tuple[Any, ...], ranks: list[int], me: int) -> tuple[str, dict[int, int]]:
    """The collective's name and the bytes that this rank sends to each other rank."""
    following, n = ring(ranks, me), len(ranks)
    match name:
        case "send":
            return "send", {ranks[args[2]]: _bytes(args[0])}
        case "allreduce_":
            return "all_reduce", {following: 2 * (n - 1) * _bytes(args[0]) // n}
        case "_allgather_base_" | "allgather_into_tensor_coalesced_":
            return "all_gather", {following: (n - 1) * _bytes(args[1])}
        case "_reduce_scatter_base_" | "reduce_scatter_tensor_coalesced_":
            return "reduce_scatter", {following: (n - 1) * _bytes(args[0])}
        case "alltoall_base_":
            outgoing, splits = args[1], args[4]
            row = _bytes(outgoing) // max(1, len(outgoing))
            counts = splits or [len(outgoing) // n] * n
            return "all_to_all", {to: rows * row for to, rows in zip(ranks, counts, strict=True)}
    raise AssertionError(f"{name} sends bytes that nobody counts")


def _call(name: str, args: tuple[Any, ...], ranks: list[int], me: int, label: str, where: str) -> Call:
    """What a rank issues, as its peers must."""
    group = tuple(ranks)
    if name in ("send", "recv_"):
        pair, size = tuple(sorted((me, ranks[args[2]]))), (_bytes(args[0]),)
        if name == "send":
            return Call(label, pair, SEND, size, (), where)
        return Call(label, pair, RECEIVE, (), size, where)
    collective, messages = _messages(name, args, ranks, me)
    if name != "alltoall_base_":
        return Call(label, group, collective, tuple(messages.values()), (), where)
    arriving, splits = args[0], args[3]
    row = _bytes(arriving) // max(1, len(arriving))
    counts = splits or [len(arriving) // len(ranks)] * len(ranks)
    sent = tuple(messages[rank] for rank in ranks)
    return Call(label, group, collective, sent, tuple(rows * row for rows in counts), where)


def _with_nothing(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a collective with empty tensors, for the Work object that it returns."""
    with no_dispatch():
        empty = tree_map_only(torch.Tensor, lambda x: torch.empty(0), args)
        return func(*empty, **kwargs)
