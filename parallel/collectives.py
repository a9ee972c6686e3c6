"""The collectives of each transport (`parallel/transports.py`), all over the same parent group.

D is the width of a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist


class Handle(Protocol):
    """Communication under way. A timeout of zero stands for that of the group."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Return when the rows are there; on a GPU, make the current stream wait instead of the host.

        Raises:
            RuntimeError: if a peer does not answer.
        """


@dataclass(frozen=True)
class Stop:
    """What one rank passes on for others in a two-level transport.

    Rows arrive in counts of `receive_counts`; taken in `order` [rows] they leave in counts of `send_counts`,
    and `inverse` [rows] is the order of the way back.
    """

    receive_counts: tuple[int, ...]
    order: torch.Tensor
    inverse: torch.Tensor
    send_counts: tuple[int, ...]

    def transpose(self) -> "Stop":
        """Return the same rank's stop of the way back."""
        return Stop(self.send_counts, self.inverse, self.order, self.receive_counts)


@dataclass(frozen=True)
class Slots:
    """Places of this rank's rows in a buffer with `block` places for each rank of the group.

    `index` [rows] are those that it writes before a reduce-scatter, or reads after an all-gather.
    """

    block: int
    index: torch.Tensor


def all_to_all(
    incoming: torch.Tensor,
    outgoing: torch.Tensor,
    receive_counts: Sequence[int],
    send_counts: Sequence[int],
    group: dist.ProcessGroup,
) -> Handle:
    """Start one uneven all-to-all from `outgoing` [rows out, D] to `incoming` [rows in, D]."""
    work: Handle = dist.all_to_all_single(
        incoming, outgoing, list(receive_counts), list(send_counts), group=group, async_op=True
    )
    return work


def two_hops(
    incoming: torch.Tensor,
    outgoing: torch.Tensor,
    receive_counts: Sequence[int],
    send_counts: Sequence[int],
    stop: Stop,
    group: dist.ProcessGroup,
) -> Handle:
    """Run the first all-to-all to its end and start the second. Call it on a Lane."""
    held = outgoing.new_empty(len(stop.order), outgoing.shape[1])
    all_to_all(held, outgoing, stop.receive_counts, send_counts, group).wait()
    return all_to_all(incoming, held.index_select(0, stop.order), receive_counts, stop.send_counts, group)


def reduce_scatter(
    incoming: torch.Tensor, outgoing: torch.Tensor, slots: Slots, group: dist.ProcessGroup
) -> Handle:
    """Start bringing `outgoing` to the places of `slots`, and this rank's first places into `incoming`.

    The buffer is filled with -0.0, the only value with x + fill = x for every x, the sign of zero included.
    """
    buffer = outgoing.new_full((slots.block * group.size(), outgoing.shape[1]), -0.0)
    buffer.index_copy_(0, slots.index, outgoing)
    mine = outgoing.new_empty(slots.block, outgoing.shape[1])
    work = dist.reduce_scatter_tensor(mine, buffer, group=group, async_op=True)
    return _Then(work, lambda: incoming.copy_(mine[: len(incoming)]))


def all_gather(
    incoming: torch.Tensor, outgoing: torch.Tensor, slots: Slots, group: dist.ProcessGroup
) -> Handle:
    """Start bringing `outgoing` to every rank, and from it all the places of `slots` into `incoming`."""
    mine = outgoing.new_zeros(slots.block, outgoing.shape[1])
    mine[: len(outgoing)] = outgoing
    buffer = outgoing.new_empty(slots.block * group.size(), outgoing.shape[1])
    work = dist.all_gather_into_tensor(buffer, mine, group=group, async_op=True)
    return _Then(work, lambda: torch.index_select(buffer, 0, slots.index, out=incoming))


@dataclass(frozen=True)
class _Then:
    """Communication, and what its receiver does once it is there."""

    work: Handle
    then: Callable[[], object]

    def wait(self, timeout: timedelta = timedelta(0)) -> None:
        self.work.wait(timeout)
        self.then()
