"""Use every communicator once before the first step, in one order on all ranks.

A communicator connects when it is first used, and so does each pair of ranks that exchange something by it.
On a GPU that takes seconds and device memory, and it may wait for kernels that wait for a peer: if it happens
while a step's receives are under way, the step may hang. So each is used once while nothing else is.

    groups      an all-reduce, an all-gather and a reduce-scatter of one number a rank
    all peers   besides, an all-to-all of one number a pair: what rows and sequences travel by
    stages      a message from every stage to the next by `forward`, and back by `backward`

All ranks go through groups in the order in which these were made, and through stages in the pipeline's, so
nobody waits for a peer that waits for somebody else.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import psutil
import torch
import torch.distributed as dist

from parallel.groups import Groups
from parallel.waiting import waiting

_ALL_PEERS = ("ship", "back", "pool", "ep")


@dataclass(frozen=True)
class Warmed:
    """What a warm-up used: groups with other ranks, their peers in sum, pairs of ranks for messages; and the
    seconds and MiB of memory (of the device, or of the process on a CPU) that it took.
    """

    groups: int
    peers: int
    pairs: int
    seconds: float
    mib: float

    def __str__(self) -> str:
        return (
            f"{self.groups} groups and {self.pairs} pairs of stages used once, in {self.seconds:.1f} s and "
            f"{self.mib:.0f} MiB"
        )

    def metrics(self) -> dict[str, float]:
        """Its metrics, by name."""
        return {"startup/groups": self.groups, "startup/warm_s": self.seconds, "startup/warm_mib": self.mib}


def warm_up(groups: Groups, device: torch.device, *, wraps: bool) -> Warmed:
    """Use all communicators of this rank once; every rank calls it, while it does nothing else. With `wraps`
    the last stage hands on to the first, as where a rank holds several virtual stages.

    Raises:
        StallError: naming the group, if a rank of it does not answer in time.
    """
    used, start = memory_in_use(device), time.perf_counter()
    shared = list(shared_groups(groups))
    for name, group in shared:
        with waiting(f"warming the group {name}", group):
            _collectives(group, _device_of(group, device), name in _ALL_PEERS)
    pairs = 0
    for name, group, forward in (("forward", groups.forward, True), ("backward", groups.backward, False)):
        for source, target in messages(group.size(), forward, wraps):
            if group.rank() in (source, target):
                with waiting(f"warming the pair {source}, {target} of the group {name}", group):
                    _message(group, source, target, _device_of(group, device))
                pairs += 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Warmed(
        groups=len(shared),
        peers=sum(group.size() - 1 for _, group in shared),
        pairs=pairs,
        seconds=time.perf_counter() - start,
        mib=(memory_in_use(device) - used) / 2**20,
    )


def shared_groups(groups: Groups) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Yield the groups of a rank that have other ranks in them, with a name of each, in the order in which
    they were made. One that has several names has the first, unless its peers are to be met one by one.
    """
    named: list[tuple[str, Any]] = [*vars(groups).items()]
    for collection in groups.components.values():
        named += vars(collection).items()
    named = [(name, group) for name, group in named if isinstance(group, dist.ProcessGroup)]
    names: dict[int, str] = {}
    for name, group in named:
        if id(group) not in names or name in _ALL_PEERS:
            names[id(group)] = name
    once = {id(group): group for _, group in named if group.size() > 1}
    for key, group in once.items():
        yield names[key], group


def messages(stages: int, forward: bool, wraps: bool) -> list[tuple[int, int]]:
    """Return which stage sends to which, in the order in which they are warmed."""
    pairs = [*pairwise(range(stages)), *([(stages - 1, 0)] if wraps and stages > 1 else [])]
    return pairs if forward else [(target, source) for source, target in pairs]


def memory_in_use(device: torch.device) -> int:
    """Return the bytes in use on a GPU, by anyone, or else by this process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return int(psutil.Process().memory_info().rss)


def _device_of(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else device


def _collectives(group: dist.ProcessGroup, device: torch.device, all_peers: bool) -> None:
    one, many = torch.ones(1, device=device), torch.ones(group.size(), device=device)
    dist.all_reduce(one, group=group)
    dist.all_gather_into_tensor(many, one, group=group)
    dist.reduce_scatter_tensor(one, many, group=group)
    if all_peers:
        dist.all_to_all_single(torch.empty_like(many), many, group=group)


def _message(group: dist.ProcessGroup, source: int, target: int, device: torch.device) -> None:
    number = torch.ones(1, device=device)
    if group.rank() == source:
        work = dist.isend(number, dist.get_global_rank(group, target), group=group)
    else:
        work = dist.irecv(number, dist.get_global_rank(group, source), group=group)
    assert work is not None
    work.wait()
