"""All that a step takes in goes to the device in one copy.

Who assembles a step makes tensors on the host, and says what is to be made of them on the device (`later`).
`brought` finds both in dataclasses, tuples, lists and mappings. It lays the tensors side by side in one
pinned buffer, copies that, and puts tensors of the device in their places. On a CPU nothing needs to be
brought, and `later` calls at once.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar, cast

import torch

ALIGNED = 256  # bytes: where the device's allocators let tensors begin, so kernels read all alike
ON_HOST = {"on_host": True}
"""`metadata` of a dataclass's field that holds nothing to bring: large plans are not looked through."""

T = TypeVar("T")


@dataclass(frozen=True)
class Later:
    """What `function` makes of `args` on a device when those of them that are tensors are there."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


def later(device: torch.device, function: Callable[..., T], *args: Any) -> T:
    """Call a function of tensors when they are on `device`. On a CPU they are. Elsewhere the result is a
    `Later` in its place, which nobody reads before it is `brought`; tensors among `args` that nothing else
    holds are gone afterwards.
    """
    return function(*args) if device.type == "cpu" else cast(T, Later(function, args))


def brought(tree: T, device: torch.device) -> T:
    """Copy a tree, with all its tensors on `device`. Those that are there already stay; the others come in
    one copy on the current stream, which the host does not wait for.
    """
    kept: dict[int, torch.Tensor] = {}  # by id: what stands in two places is brought once
    passing: dict[int, torch.Tensor] = {}
    calls: dict[int, Later] = {}

    def note(leaf: Any) -> Any:
        if isinstance(leaf, Later):
            calls[id(leaf)] = leaf
            passing.update((id(x), x) for x in leaf.args if isinstance(x, torch.Tensor) and x.is_cpu)
        elif leaf.is_cpu:
            kept[id(leaf)] = leaf
        return leaf

    mapped(tree, note)
    tensors = kept | passing  # in this order: a dict keeps the place of what it has
    ends = _ends(tensors.values())
    buffer = _copied(tensors.values(), ends, device)
    there: dict[int, Any] = dict(zip(tensors, _views(buffer, tensors.values(), ends), strict=True))
    made = {key: of.function(*(there.get(id(x), x) for x in of.args)) for key, of in calls.items()}
    if len(kept) < len(tensors):
        # Views would keep the whole buffer, with what was only there to make other tensors of.
        buffer = buffer[: ends[len(kept) - 1] if kept else 0].clone()
    there = dict(zip(kept, _views(buffer, kept.values(), ends), strict=True)) | made
    found: T = mapped(tree, lambda leaf: there.get(id(leaf), leaf))
    return found


def arrival(tree: Any, stream: torch.cuda.Stream) -> Callable[[], None]:
    """Return what lets the stream that is then current read what was brought on `stream`: call it once, ahead
    of the first use. The stream waits, not the host.
    """
    event = stream.record_event()
    by_storage: dict[int, torch.Tensor] = {}

    def note(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.is_cuda:
            by_storage.setdefault(leaf.untyped_storage()._cdata, leaf)
        return leaf

    mapped(tree, note)

    def arrive() -> None:
        reader = torch.cuda.current_stream(stream.device)
        reader.wait_event(event)
        for tensor in by_storage.values():
            # Memory that nobody refers to goes back at once to the stream that it was taken on. The next
            # copy would land in it while kernels that are queued on the reading stream still read.
            tensor.record_stream(reader)

    return arrive


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Copy nested dataclasses, mappings, tuples and lists with every tensor and `Later` changed."""
    if isinstance(value, torch.Tensor | Later):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        copy = object.__new__(type(value))
        for field in fields(value):
            own = getattr(value, field.name)
            new = own if "on_host" in field.metadata else mapped(own, change)
            object.__setattr__(copy, field.name, new)
        return copy
    if isinstance(value, Mapping):
        return {key: mapped(entry, change) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(mapped(entry, change) for entry in value)
    return value


def _ends(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Where the places of tensors end in the buffer, of whole `ALIGNED` bytes each."""
    ends, end = [], 0
    for tensor in tensors:
        end += -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED
        ends.append(end)
    return ends


def _copied(tensors: Iterable[torch.Tensor], ends: list[int], device: torch.device) -> torch.Tensor:
    """Lay tensors side by side: uint8 [bytes] on the device.

    The pinned buffer may go before the copy is done: torch hands its memory to nobody until then. It is a new
    one each time, since what is written into one that is being copied may arrive.
    """
    host = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for view, tensor in zip(_views(host, tensors, ends), tensors, strict=True):
        view.copy_(tensor)
    return host.to(device, non_blocking=True)


def _views(buffer: torch.Tensor, tensors: Iterable[torch.Tensor], ends: list[int]) -> list[torch.Tensor]:
    """The tensors' places in a buffer, in their dtypes and shapes, for as many as there are."""
    views = []
    for tensor, start in zip(tensors, [0, *ends], strict=False):
        place = buffer[start : start + tensor.numel() * tensor.element_size()]
        views.append(place.view(tensor.dtype).view(tensor.shape))
    return views
