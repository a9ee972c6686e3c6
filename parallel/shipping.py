"""Ships the rows of a route: a rank's ends of it as index lists, and the collectives that carry the rows.

The route says which rows go where (`parallel/boundary.py`). Every rank makes its ends of it once a step and
ships over them; over the transposed ends, the same code carries the gradients back. D is the width of a row.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from parallel.boundary import Route, Segment
from parallel.collectives import Handle, Slots, Stop, all_gather, all_to_all, reduce_scatter, two_hops
from parallel.lane import Lane
from parallel.transports import TRANSPOSED, TWO_LEVEL, relays


@dataclass(frozen=True)
class Ends:
    """One rank's ends of a route: which rows leave in which order, where the others land.

    `send` [rows out] and `receive` [rows in] are int64 indices into the rank's rows and tokens, in an order
    that suits the transport; the counts are rows for each peer that it sends to and receives from directly.
    `landings` are, by number of the attach point, which of the arriving rows enter there (None for all) and
    at which tokens.
    `stop` is what the rank passes on in a two-level transport, `slots` where its rows stand in the buffer of
    a reduce-scatter or all-gather.
    """

    is_local: bool
    send: torch.Tensor
    receive: torch.Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    transport: str = "direct"
    stop: Stop | None = None
    slots: Slots | None = None
    landings: tuple[tuple[int, torch.Tensor | None, torch.Tensor], ...] = ()

    def transpose(self) -> "Ends":
        """Return the same rank's ends of the way back, where nothing lands."""
        return Ends(
            self.is_local,
            self.receive,
            self.send,
            self.receive_counts,
            self.send_counts,
            TRANSPOSED[self.transport],
            None if self.stop is None else self.stop.transpose(),
            self.slots,
        )


def make_ends(route: Route, rank: int) -> Ends:
    """Build the index lists of `rank`, on the host: once a step, ahead of use."""
    relay = relays(route.transport, route.nodes) if route.transport in TWO_LEVEL else None

    def sent_to(s: Segment) -> int:
        return s.destination if relay is None else relay(s.source, s.destination)

    def received_from(s: Segment) -> int:
        return s.source if relay is None else relay(s.source, s.destination)

    # Both ends sort alike: by peer, then by the far end, then in packed order (sorting is stable).
    sends = sorted((s for s in route.segments if s.source == rank), key=lambda s: (sent_to(s), s.destination))
    receives = sorted(
        (s for s in route.segments if s.destination == rank), key=lambda s: (received_from(s), s.source)
    )
    receive = _ranges([(s.destination_start, s.length) for s in receives])
    return Ends(
        is_local=route.is_local,
        send=_ranges([(s.source_start, s.length) for s in sends]),
        receive=receive,
        send_counts=_counts(sends, sent_to, route.num_ranks),
        receive_counts=_counts(receives, received_from, route.num_ranks),
        transport=route.transport,
        stop=None if relay is None else _stop(route, [s for s in route.segments if sent_to(s) == rank]),
        slots=_slots(route, rank) if route.transport in ("reduce_scatter", "all_gather") else None,
        landings=_landings(receives, receive),
    )


def _landings(
    receives: Sequence[Segment], tokens: torch.Tensor
) -> tuple[tuple[int, torch.Tensor | None, torch.Tensor], ...]:
    """Divide the rows that arrive, in the order of `receives` and at `tokens`, among attach points."""
    points = sorted({s.point for s in receives})
    if len(points) == 1:
        return ((points[0], None, tokens),)
    runs: dict[int, list[Segment]] = {point: [] for point in points}
    at: dict[int, list[tuple[int, int]]] = {point: [] for point in points}
    filled = 0
    for s in receives:
        runs[s.point].append(s)
        at[s.point].append((filled, s.length))
        filled += s.length
    return tuple(
        (p, _ranges(at[p]), _ranges([(s.destination_start, s.length) for s in runs[p]])) for p in points
    )


def _stop(route: Route, passing: list[Segment]) -> Stop:
    """Rows come in by source and leave by destination."""
    arriving = sorted(passing, key=lambda s: (s.source, s.destination))
    leaving = sorted(passing, key=lambda s: (s.destination, s.source))
    at_arrival, at_departure = _starts(arriving), _starts(leaving)
    return Stop(
        receive_counts=_counts(arriving, lambda s: s.source, route.num_ranks),
        order=_ranges([(at_arrival[s], s.length) for s in leaving]),
        inverse=_ranges([(at_departure[s], s.length) for s in arriving]),
        send_counts=_counts(leaving, lambda s: s.destination, route.num_ranks),
    )


def _slots(route: Route, rank: int) -> Slots:
    """The buffer of a reduce-scatter holds the rows of each destination, that of an all-gather each source's.

    Within the share of a rank, rows stand as that rank receives or sends them.
    """
    gathers = route.transport == "all_gather"
    owned: dict[int, list[Segment]] = defaultdict(list)
    mine = []
    for s in sorted(route.segments, key=lambda s: (s.source, s.destination)):
        owned[s.source if gathers else s.destination].append(s)
        if rank == (s.destination if gathers else s.source):
            mine.append(s)
    block = max((sum(s.length for s in segments) for segments in owned.values()), default=0)
    starts = {s: owner * block + at for owner, own in owned.items() for s, at in _starts(own).items()}
    return Slots(block, _ranges([(starts[s], s.length) for s in mine]))


def _starts(segments: Sequence[Segment]) -> dict[Segment, int]:
    """Where each segment begins when they stand one after the other."""
    starts, filled = {}, 0
    for s in segments:
        starts[s] = filled
        filled += s.length
    return starts


def _counts(segments: Iterable[Segment], peer: Callable[[Segment], int], num_ranks: int) -> tuple[int, ...]:
    counts = [0] * num_ranks
    for s in segments:
        counts[peer(s)] += s.length
    return tuple(counts)


def _ranges(runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    parts = [torch.arange(start, start + length) for start, length in runs]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)


@dataclass
class Shipment:
    """Rows on their way. `rows` [rows in, D] may be read once `work` was waited for."""

    rows: torch.Tensor
    outgoing: torch.Tensor
    work: Handle | None


def ship(
    ends: Ends, outgoing: torch.Tensor, group: "dist.ProcessGroup | None", lane: Lane | None = None
) -> Shipment:
    """Start sending `outgoing` [rows out, D], already in the order of `ends.send`, along a route.

    Every rank of the group calls it. The rows arrive in the order of `ends.receive`, and a local route
    delivers them at once. Over the transposed ends, the same call carries their gradients back. Two-level
    transports need the communicator's lane, and once it has one, all its shipments go through it.
    """
    assert outgoing.shape[0] == sum(ends.send_counts), f"{outgoing.shape[0]} rows for {ends.send_counts}"
    if ends.is_local:
        return Shipment(outgoing, outgoing, None)
    assert group is not None, "a route between ranks needs a communicator"
    incoming = outgoing.new_empty(sum(ends.receive_counts), outgoing.shape[1])
    start = partial(_start, ends, incoming, outgoing, group)
    if ends.stop is not None:
        assert lane is not None, f"{ends.transport} needs a lane"
        return Shipment(incoming, outgoing, lane.run_long(start))
    return Shipment(incoming, outgoing, start() if lane is None else lane.run(start))


def _start(ends: Ends, incoming: torch.Tensor, outgoing: torch.Tensor, group: dist.ProcessGroup) -> Handle:
    if ends.slots is not None:
        collective = reduce_scatter if ends.transport == "reduce_scatter" else all_gather
        return collective(incoming, outgoing, ends.slots, group)
    counts = ends.receive_counts, ends.send_counts
    if ends.stop is not None:
        return two_hops(incoming, outgoing, *counts, ends.stop, group)
    return all_to_all(incoming, outgoing, *counts, group)
