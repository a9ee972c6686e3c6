"""What ranks take to tell each other something, by kind of collective.

Bytes are those that one rank sends to others, counted as statements of work count them: over n ranks an
all-gather and a reduce-scatter send n - 1 shards, an all-reduce twice that, a message all of it.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from omni.calibration.machine import timed

_ELEMENT = 4
SIZES = (2**8, 2**14, 2**20, 2**23)  # elements that a collective is given; a GPU adds one
_MORE = 2**26
_REPETITIONS = 9


def link_times(group: dist.ProcessGroup, device: torch.device) -> dict[str, list[tuple[int, int]]]:
    """Return (bytes, nanoseconds) for each size by kind of collective; nothing for a rank that is alone.

    Every rank of the group calls it, and counts the same repetitions: the time is that of the slowest.
    """
    if group.size() == 1:
        return {}
    sizes = (*SIZES, _MORE) if device.type == "cuda" else SIZES
    found: dict[str, list[tuple[int, int]]] = {}
    for size in sizes:
        for kind, (sent, call) in _collectives(size // group.size() * group.size(), group, device).items():
            found.setdefault(kind, []).append((sent * _ELEMENT, timed_together(call, group, device)))
    return found


def issuing_ns(group: dist.ProcessGroup, device: torch.device) -> int:
    """Median nanoseconds that this rank itself spends on issuing a message, or on taking one in; none on a
    GPU, whose host does it meanwhile, and for a rank that is alone.
    """
    if group.size() == 1 or device.type == "cuda":
        return 0
    outgoing, incoming = torch.zeros(SIZES[1]), torch.empty(SIZES[1])
    times = []
    for _ in range(10 * _REPETITIONS):
        start = time.thread_time_ns()
        _round(outgoing, incoming, group)
        times.append(time.thread_time_ns() - start)
    return statistics.median_low(times) // 4  # a round sends and receives, and waits for both


def timed_together(call: Callable[[], object], group: dist.ProcessGroup, device: torch.device) -> int:
    """Median nanoseconds of a collective on the rank where it is largest; as many repetitions on each."""
    dist.barrier(group)
    times = torch.tensor([timed(call, device, repetitions=_REPETITIONS)], dtype=torch.int64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group)
    return int(times.item())


def _collectives(
    size: int, group: dist.ProcessGroup, device: torch.device
) -> dict[str, tuple[int, Callable[[], object]]]:
    """By kind: elements that a rank sends, and the call."""
    ranks, shard = group.size(), size // group.size()
    whole = torch.zeros(size, device=device)
    other, part = torch.empty_like(whole), torch.zeros(shard, device=device)
    return {
        "all_gather": (
            (ranks - 1) * shard,
            partial(dist.all_gather_into_tensor, other, part, group=group),
        ),
        "reduce_scatter": (
            (ranks - 1) * shard,
            partial(dist.reduce_scatter_tensor, part, whole, group=group),
        ),
        "all_reduce": (2 * (ranks - 1) * shard, partial(dist.all_reduce, whole, group=group)),
        "all_to_all": ((ranks - 1) * shard, partial(dist.all_to_all_single, other, whole, group=group)),
        "message": (size, partial(_round, whole, other, group)),
    }


def _round(outgoing: torch.Tensor, incoming: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Each rank sends to the next and receives from the one before, as stages of a pipeline do."""
    rank, ranks = group.rank(), group.size()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, outgoing, group=group, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % ranks),
        ]
    )
    for work in works:
        work.wait()
