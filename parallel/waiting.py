"""Waits on peers that say who waits for whom."""

import contextlib
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from parallel.stalls import StallError

SHOWN_RANKS = 8  # that are waited for, before the rest is only counted
OF_GLOO = (
    "/gloo/",  # the source file that gloo's own errors begin with
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection timed out",
    "broken pipe",
    "timed out",  # "Operation timed out!", "Timed out waiting 3000ms for recv operation to complete"
    "timeout caused pair closure",
)


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
    """Whether an error is a failure to communicate: those of NCCL are DistErrors, those of gloo are bare and
    known by their words.

    Any other error keeps its class and its words, such as tensors whose shapes do not fit, or memory that ran
    out: peers have nothing to do with it.
    """
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return type(error) is RuntimeError and any(words in text for words in OF_GLOO)


def stall(where: str, ranks: Sequence[int], me: int, error: RuntimeError) -> StallError:
    """Make the error of rank `me`, which waited for the others of `ranks`."""
    others = [rank for rank in ranks if rank != me]
    text = ", ".join(map(str, others[:SHOWN_RANKS])) or "none"
    if len(others) > SHOWN_RANKS:
        text += f", … and {len(others) - SHOWN_RANKS} more"
    return StallError(f"rank {me} waited at {where} for rank {text}: {error}")
