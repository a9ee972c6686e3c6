"""Waits on peers that say who waits for whom."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


class StallError(RuntimeError):
    """A rank waited for peers in vain, or they went away; the message says who waited for whom, and where."""


@contextlib.contextmanager
def waiting(where: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Turn the failure of a collective inside the block into a StallError naming the ranks of `group`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, StallError):
            raise
        me = dist.get_rank()
        others = ", ".join(str(rank) for rank in dist.get_process_group_ranks(group) if rank != me)
        raise StallError(f"rank {me} waited at {where} for rank {others or 'none'}: {error}") from error
