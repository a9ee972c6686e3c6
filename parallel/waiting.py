"""Waits on peers that say who waits for whom."""

import contextlib
from collections.abc import Iterator, Sequence

import torch.distributed as dist

SHOWN_RANKS = 8  # that are waited for, before the rest is only counted


class StallError(RuntimeError):
    """A rank waited for peers in vain, or they went away; the message says who waited for whom, and where."""


@contextlib.contextmanager
def waiting(where: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Turn the failure of a collective inside the block into a StallError naming the ranks of `group`."""
    try:
        yield
    except RuntimeError as error:
        if not is_communication(error):
            raise
        raise stall(where, dist.get_process_group_ranks(group), dist.get_rank(), error) from error


def is_communication(error: RuntimeError) -> bool:
    """Whether an error may be a failure to communicate: those of gloo are bare, those of NCCL DistErrors.

    What has a class of its own is something else: out of memory on a GPU, an error of the device, an error of
    ours. So is what the allocator of the CPU says, which is bare too.
    """
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and "DefaultCPUAllocator" not in str(error)


def stall(where: str, ranks: Sequence[int], me: int, error: RuntimeError) -> StallError:
    """Make the error of rank `me`, which waited for the others of `ranks`."""
    others = [rank for rank in ranks if rank != me]
    text = ", ".join(map(str, others[:SHOWN_RANKS])) or "none"
    if len(others) > SHOWN_RANKS:
        text += f", … and {len(others) - SHOWN_RANKS} more"
    return StallError(f"rank {me} waited at {where} for rank {text}: {error}")
