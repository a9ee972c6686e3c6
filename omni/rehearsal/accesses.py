"""What memory an operator reads and writes, by its schema."""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

# What c10d writes: its schemas do not say. Of other collectives, all tensors.
_RESULTS = {
    "allreduce_": (0,),
    "_allgather_base_": (0,),
    "_reduce_scatter_base_": (0,),
    "alltoall_base_": (0,),
    "allgather_into_tensor_coalesced_": (0,),
    "reduce_scatter_tensor_coalesced_": (0,),
    "send": (),
    "recv_": (0,),
}


class Issued(NamedTuple):
    """A collective: its group's name, the peer of a message, and whether the host goes on without it."""

    group: str
    peer: int | None
    is_async: bool


def accesses(func: Any, args: Any, kwargs: Any, out: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield the tensors of a call that runs something, and whether it writes them."""
    places, names = _written(func)
    name = func._opname
    if not (name.startswith("new_") or name.endswith("_like")):  # these take a shape alone
        for place, argument in enumerate(args):
            for tensor in tensors_in(argument):
                yield tensor, place in places
    for name, argument in kwargs.items():
        for tensor in tensors_in(argument):
            yield tensor, name in names
    if func.namespace != "c10d":
        for tensor in tensors_in(out):
            yield tensor, True


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operator's arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from tensors_in(entry)


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a GPU's."""
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device.type == "cuda"


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes [start, stop) of its storage among which a tensor's lie: all of them, if it has no gaps."""
    if not tensor.numel():
        return 0, 0
    size, first = tensor.element_size(), int(tensor.storage_offset())
    last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return first * size, (last + 1) * size


def issued(func: Any, args: Any, kwargs: Any) -> Issued:
    """What a collective is."""
    of_group, of_async, of_peer = _places(func)
    group = dist.ProcessGroup.unbox(args[of_group])
    if of_async is None:
        is_async = True  # messages
    else:
        is_async = args[of_async] if of_async < len(args) else kwargs.get("async_op", True)
    return Issued(group.group_name, None if of_peer is None else args[of_peer], bool(is_async))


@cache
def _written(func: Any) -> tuple[frozenset[int], frozenset[str]]:
    arguments = func._schema.arguments
    if func.namespace == "c10d":
        return frozenset(_RESULTS.get(func._opname, range(len(arguments)))), frozenset()
    return (
        frozenset(place for place, of in enumerate(arguments) if of.is_write),
        frozenset(of.name for of in arguments if of.is_write),
    )


@cache
def _places(func: Any) -> tuple[int, int | None, int | None]:
    """Where the group, the choice of an asynchronous call and the peer stand among the arguments."""
    at = {of.name: place for place, of in enumerate(func._schema.arguments)}
    return at["process_group"], at.get("async_op"), at.get("dst", at.get("src"))
