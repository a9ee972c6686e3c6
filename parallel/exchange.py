"""A linear exchange of blocks between the ranks of a group: planned ahead, one collective, its own adjoint.

Every rank has source tensors, from which it sends blocks, and target tensors, to which it receives blocks:
which ones is planned (`parallel/exchange_plan.py`). Sender and receiver list the parcels of a message in the
same order, so nothing but the values travels, in one flat buffer and one uneven all-to-all that every rank
of the group takes part in, also with nothing to send or receive. What a rank keeps does not enter the
collective: it goes to the front of the buffer in which the others' messages land.

What is copied where is listed by cells (`parallel/exchange_lists.py`), once for all layers. Source tensors
are laid side by side; the outgoing buffer, what the rank keeps and each target tensor are then one indexed
copy, however many blocks there are.

Invariant: the way back is the same code with source and target swapped. A cell that was sent twice receives
the sum of two gradients, added in fp32 at least and in a fixed order, so ⟨A x, y⟩ = ⟨x, Aᵀ y⟩ and results do
not vary between runs.

`start` and `finish` are two autograd functions: what is computed between them overlaps with the exchange, in
the forward and in the backward.

Shapes: tensors are [rows, heads, size], cells [cells, heads of a cell · size].
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ops.one_copy import ON_HOST
from parallel.exchange_lists import Lists, Sums, lists_of
from parallel.exchange_plan import Exchange


@dataclass(frozen=True)
class Prepared:
    """An exchange, with the lists of its two sides."""

    exchange: Exchange = field(metadata=ON_HOST)
    source: Lists[torch.Tensor]
    target: Lists[torch.Tensor]

    def transpose(self) -> "Prepared":
        """Return the adjoint."""
        return Prepared(self.exchange.transpose(), self.target, self.source)


def prepare(exchanges: Sequence[Exchange]) -> tuple[Prepared, ...]:
    """Make the lists of `exchanges`, on the host: once a microbatch, ahead of use."""
    return tuple(
        Prepared(one, *(lists_of(side, one.rank).each(torch.from_numpy) for side in (one.source, one.target)))
        for one in exchanges
    )


@dataclass
class Flight:
    """An exchange on its way. `graph` is empty and carries the graph. `landing` holds this rank's own parcels
    and then those of the others, which may be read once `work` was waited for.
    """

    prepared: Prepared
    group: dist.ProcessGroup
    graph: torch.Tensor | None = None
    landing: torch.Tensor | None = None
    outgoing: torch.Tensor | None = None
    work: dist.Work | None = None


def start(prepared: Prepared, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> Flight:
    """Begin an exchange of the source `tensors`; every rank of `group` calls it, in the same order.

    The tensors have one dtype. If autograd is to run, every rank must reach `finish`'s outputs in its
    backward, or the others wait for it.
    """
    exchange, shapes = prepared.exchange, tuple(tuple(x.shape) for x in tensors)
    assert shapes == exchange.source.shapes, f"{shapes} for an exchange of {exchange.source.shapes}"
    here, planned = (group.rank(), group.size()), (exchange.rank, len(exchange.source.parcels))
    assert here == planned, f"rank and size {here} of the group for a plan of {planned}"
    flight = Flight(prepared, group)
    flight.graph = _Start.apply(flight, *tensors)
    return flight


def finish(flight: Flight) -> tuple[torch.Tensor, ...]:
    """Wait for an exchange and return its target tensors. On CUDA the stream waits, not the host."""
    graph, flight.graph = flight.graph, None
    outputs: tuple[torch.Tensor, ...] = _Finish.apply(flight, graph)
    return outputs


class _Start(torch.autograd.Function):
    """Forward: pack and send. Backward: wait for the gradients that `_Finish` sent off, and unpack."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.flight = flight
        _send(flight, flight.prepared, tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *_receive(ctx.flight, ctx.flight.prepared.transpose())


class _Finish(torch.autograd.Function):
    """Forward: wait and unpack. Backward: pack the gradients and send them off."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, graph: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.flight = flight
        # A recomputation without re-entry runs when a saved tensor is first asked for and stops at the last
        # one. This one makes every rank run through the whole exchange, also a rank that saves nothing else.
        ctx.save_for_backward(graph.new_empty(0))
        return tuple(_receive(flight, flight.prepared))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        _send(ctx.flight, ctx.flight.prepared.transpose(), gradients)
        return None, gradients[0].new_empty(0)


def _send(flight: Flight, prepared: Prepared, tensors: Sequence[torch.Tensor]) -> None:
    """Pack the source `tensors` and start the collective: first what the others wait for. The flight keeps
    both buffers alive until it has landed.
    """
    exchange, lists = prepared.exchange, prepared.source
    send, receive = [*exchange.source.counts], [*exchange.target.counts]
    own, send[exchange.rank], receive[exchange.rank] = send[exchange.rank], 0, 0
    cells = _side_by_side(tensors).reshape(-1, lists.heads * exchange.source.size)
    outgoing = _sum(lists.others, cells).view(-1)
    landing = outgoing.new_empty(own + sum(receive))
    kept, arriving = landing.split([own, sum(receive)])
    flight.outgoing, flight.landing = outgoing, landing
    flight.work = dist.all_to_all_single(arriving, outgoing, receive, send, group=flight.group, async_op=True)
    kept = kept.view(-1, cells.shape[1])
    if lists.own.starts is None:
        torch.index_select(cells, 0, lists.own.index, out=kept)
    else:
        kept.copy_(_sum(lists.own, cells))


def _receive(flight: Flight, prepared: Prepared) -> list[torch.Tensor]:
    """Wait for the collective and unpack the target tensors; cells that no parcel reaches are zero."""
    work, landing = flight.work, flight.landing
    assert work is not None, "an exchange is started once and finished once"
    assert landing is not None
    work.wait()
    flight.work = flight.outgoing = flight.landing = None
    side, lists = prepared.exchange.target, prepared.target
    cells = landing.view(-1, lists.heads * side.size)
    return [_sum(of, cells).view(shape) for of, shape in zip(lists.tensors, side.shapes, strict=True)]


def _side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of heads of all tensors, one after the other: [rows · heads, size]."""
    first, *more = (x.reshape(-1, x.shape[2]) for x in tensors)
    return torch.cat([first, *more]) if more else first


def _sum(sums: Sums[torch.Tensor], cells: torch.Tensor) -> torch.Tensor:
    """Copy cells, or add them up: a bag is added up one by one, in fp32 at least."""
    if sums.starts is None:
        return cells.index_select(0, sums.index)
    return F.embedding_bag(sums.index, cells, sums.starts, mode="sum", include_last_offset=True)
