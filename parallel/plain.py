"""What ranks tell each other in Python's own values, none of which can run anything where it arrives.

torch's own `all_gather_object` unpickles what comes, so whoever takes a rank's place in a connection would
run code on its peers. Here it is read as files of weights are: numbers, texts, tensors, and tuples, lists and
dicts of these, and nothing else.
"""

import io
from typing import Any

import torch
import torch.distributed as dist


def gather_plain(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value of every rank of a group, the world if there is none, by rank. All of them call it.

    Raises:
        pickle.UnpicklingError: for a value that is of another kind.
    """
    own, size, most = _padded(value, group)
    all_of = own.new_empty(dist.get_world_size(group), most)
    dist.all_gather(list(all_of), own, group=group)
    return [_read(each, count) for each, count in zip(all_of, size, strict=True)]


def collect_plain(value: Any, group: dist.ProcessGroup) -> list[Any] | None:
    """Return the value of every rank of a group, by rank, on its first rank, and None on the others.

    Raises:
        pickle.UnpicklingError: for a value that is of another kind.
    """
    own, size, most = _padded(value, group)
    if dist.get_rank(group):
        dist.gather(own, group=group, group_dst=0)
        return None
    all_of = own.new_empty(len(size), most)
    dist.gather(own, list(all_of), group=group, group_dst=0)
    return [_read(each, count) for each, count in zip(all_of, size, strict=True)]


def _padded(value: Any, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, list[int], int]:
    """A value as bytes on the device that the group sends from; how many each rank has, and the most."""
    out = io.BytesIO()
    torch.save(value, out)
    on_gpu = dist.get_backend(group) == dist.Backend.NCCL
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    content = torch.frombuffer(bytearray(out.getvalue()), dtype=torch.uint8)
    sizes = torch.empty(dist.get_world_size(group), 1, dtype=torch.int64, device=device)
    dist.all_gather(list(sizes), torch.tensor([len(content)], device=device), group=group)
    size: list[int] = sizes.flatten().tolist()
    own = torch.zeros(max(size), dtype=torch.uint8, device=device)
    own[: len(content)] = content.to(device)
    return own, size, max(size)


def _read(content: torch.Tensor, size: int) -> Any:
    return torch.load(io.BytesIO(content[:size].cpu().numpy().tobytes()), weights_only=True)
