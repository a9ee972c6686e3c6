"""A linear exchange of blocks between the ranks of a group: planned ahead, one collective, its own adjoint.

Every rank has source tensors, from which it sends blocks, and target tensors, to which it receives blocks:
which ones is planned (`parallel/exchange_plan.py`). Sender and receiver list the parcels of a message in the
same order, so nothing but the values travels, in one flat buffer and one uneven all-to-all that every rank
of the group takes part in, also with nothing to send or receive. What a rank keeps does not enter the
collective.

Invariant: the way back is the same code with source and target swapped. A cell that was sent twice receives
the sum of two gradients, added in fp32 at least and in a fixed order, so ⟨A x, y⟩ = ⟨x, Aᵀ y⟩ and results do
not vary between runs.

`start` and `finish` are two autograd functions: what is computed between them overlaps with the exchange, in
the forward and in the backward.

Shapes: tensors are [rows, heads, size].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from parallel.exchange_plan import Block, Exchange, Parcel, Side


@dataclass
class Flight:
    """An exchange on its way. `wire` holds what the forward sends, this rank's own parcels first, and carries
    the graph; `kept` are the own parcels of the backward. `landing` may be read once `work` was waited for.
    """

    exchange: Exchange
    group: dist.ProcessGroup
    wire: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    landing: torch.Tensor | None = None
    outgoing: torch.Tensor | None = None
    work: dist.Work | None = None


def start(exchange: Exchange, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> Flight:
    """Begin an exchange of the source `tensors`; every rank of `group` calls it, in the same order.

    The tensors have one dtype. If autograd is to run, every rank must reach `finish`'s outputs in its
    backward, or the others wait for it.
    """
    shapes = tuple(tuple(x.shape) for x in tensors)
    assert shapes == exchange.source.shapes, f"{shapes} for an exchange of {exchange.source.shapes}"
    here, planned = (group.rank(), group.size()), (exchange.rank, len(exchange.source.parcels))
    assert here == planned, f"rank and size {here} of the group for a plan of {planned}"
    flight = Flight(exchange, group)
    flight.wire = _Start.apply(flight, *tensors)
    return flight


def finish(flight: Flight) -> tuple[torch.Tensor, ...]:
    """Wait for an exchange and return its target tensors. On CUDA the stream waits, not the host."""
    wire, flight.wire = flight.wire, None
    outputs: tuple[torch.Tensor, ...] = _Finish.apply(flight, wire)
    return outputs


class _Start(torch.autograd.Function):
    """Forward: pack and send. Backward: wait for the gradients that `_Finish` sent off, and unpack."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.flight = flight
        side, rank = flight.exchange.source, flight.exchange.rank
        wire = tensors[0].new_empty(sum(side.counts))
        own, others = wire.split([side.counts[rank], len(wire) - side.counts[rank]])
        _read(side, _others(side, rank), tensors, others)
        target = flight.exchange.target
        landing = wire.new_empty(sum(target.counts) - target.counts[rank])
        _launch(flight, others, landing, flight.exchange)
        _read(side, _own(side, rank), tensors, own)
        return wire

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flight = ctx.flight
        side, rank = flight.exchange.source, flight.exchange.rank
        landing = _land(flight)
        own, flight.kept = flight.kept, None
        return None, *_write(side, [(_own(side, rank), own), (_others(side, rank), landing)])


class _Finish(torch.autograd.Function):
    """Forward: wait and unpack. Backward: pack the gradients and send them off.

    The gradient of the wire is in flight when the backward returns, so what it returns only has the shape.
    """

    @staticmethod
    def forward(ctx: Any, flight: Flight, wire: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.flight = flight
        # A recomputation without re-entry runs when a saved tensor is first asked for and stops at the last
        # one. This one makes every rank run through the whole exchange, also a rank that saves nothing else.
        ctx.save_for_backward(wire.new_empty(0))
        side, rank = flight.exchange.target, flight.exchange.rank
        landing = _land(flight)
        own = wire[: side.counts[rank]]
        return tuple(_write(side, [(_own(side, rank), own), (_others(side, rank), landing)]))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        flight = ctx.flight
        back, rank = flight.exchange.transpose(), flight.exchange.rank
        side, counts = back.source, back.target.counts
        outgoing = gradients[0].new_empty(sum(side.counts) - side.counts[rank])
        _read(side, _others(side, rank), gradients, outgoing)
        landing = outgoing.new_empty(sum(counts) - counts[rank])
        _launch(flight, outgoing, landing, back)
        flight.kept = outgoing.new_empty(counts[rank])
        _read(side, _own(side, rank), gradients, flight.kept)
        return None, outgoing.new_zeros(()).expand(sum(counts))


def _own(side: Side, rank: int) -> list[Parcel]:
    return [*side.parcels[rank]]


def _others(side: Side, rank: int) -> list[Parcel]:
    return [parcel for peer, message in enumerate(side.parcels) if peer != rank for parcel in message]


def _launch(flight: Flight, outgoing: torch.Tensor, landing: torch.Tensor, exchange: Exchange) -> None:
    """Start the collective. The flight keeps both buffers alive until it has landed."""
    receive, send = ([*side.counts] for side in (exchange.target, exchange.source))
    receive[exchange.rank] = send[exchange.rank] = 0
    flight.outgoing, flight.landing = outgoing, landing
    flight.work = dist.all_to_all_single(landing, outgoing, receive, send, group=flight.group, async_op=True)


def _land(flight: Flight) -> torch.Tensor:
    work, landing = flight.work, flight.landing
    assert work is not None, "an exchange is started once and finished once"
    assert landing is not None
    work.wait()
    flight.work = flight.outgoing = flight.landing = None
    return landing


def _read(side: Side, parcels: Sequence[Parcel], tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Copy `parcels` of `tensors` one after the other into `flat`."""
    for parcel, place in zip(parcels, flat.split([side.elements(p) for p in parcels]), strict=True):
        first, *more = (_view(tensors, block) for block in parcel)
        if more:
            first = first.to(_wide(first.dtype), copy=True)
            for view in more:
                first.add_(view)
        place.view(first.shape).copy_(first)


def _write(side: Side, sections: Sequence[tuple[Sequence[Parcel], torch.Tensor]]) -> list[torch.Tensor]:
    """Make the tensors of `side` from flat buffers of parcels; cells that no parcel reaches are zero."""
    dtype = sections[0][1].dtype
    tensors = []
    for shape, disjoint, complete in zip(side.shapes, side.disjoint, side.complete, strict=True):
        make = sections[0][1].new_empty if complete else sections[0][1].new_zeros
        tensors.append(make(shape, dtype=dtype if disjoint else _wide(dtype)))
    for parcels, flat in sections:
        for parcel, piece in zip(parcels, flat.split([side.elements(p) for p in parcels]), strict=True):
            for block in parcel:
                place = _view(tensors, block)
                piece = piece.view(place.shape)
                place.copy_(piece) if side.disjoint[block.tensor] else place.add_(piece)
    return [x.to(dtype) for x in tensors]


def _view(tensors: Sequence[torch.Tensor], block: Block) -> torch.Tensor:
    return tensors[block.tensor].narrow(0, block.row, block.rows).narrow(1, block.head, block.heads)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
