"""The boundary: where rows that encoders put out become embeddings that the LLM takes in.

Invariant: every row is sent once, from the rank that encoded it to the one rank that holds its position in
the packed sequence. The way back is the transposed route through the same code, so that for any rows x and
gradients y, ⟨A x, y⟩ = ⟨x, Aᵀ y⟩.

A route is planned from metadata by interval arithmetic: ragged counts, ranks that send or receive nothing,
ranks that only encode, any number of sources for one destination and the reverse are all the same case. How
the rows travel is the route's transport (`parallel/transports.py`): it is part of the plan, and changes
neither the rows nor where they land.

Rows may enter the model at several named attach points, such as the embeddings and a later layer: an encoder
puts out rows of its own for each of its points, and a segment says of which item its rows are and at which
point they enter.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from parallel.sequence import Interval
from parallel.transports import (
    TRANSPOSED,
    TWO_LEVEL,
    Handle,
    Ints,
    Lane,
    Slots,
    Stop,
    all_gather,
    all_to_all,
    reduce_scatter,
    relays,
    two_hops,
)


class Rows(NamedTuple):
    """Rows [source_start, source_start + length) of `source`, which are of `item`, belong at `start` of the
    packed axis.
    """

    source: int
    source_start: int
    start: int
    length: int
    item: int = 0


@dataclass(frozen=True)
class Segment:
    """A run of rows of one item that moves together: between local starts on two ranks of the group.

    `point` is the number of the attach point where the rows enter, of those of the model.
    """

    source: int
    source_start: int
    destination: int
    destination_start: int
    length: int
    item: int = 0
    point: int = 0

    def transpose(self) -> "Segment":
        """Return the way back of the same rows."""
        return Segment(
            self.destination,
            self.destination_start,
            self.source,
            self.source_start,
            self.length,
            self.item,
            self.point,
        )


@dataclass(frozen=True)
class Route:
    """All segments of one microbatch, in packed order, over a group of `num_ranks`.

    `nodes` is the node of each rank; only two-level transports need it. `ns` is the time of the transport in
    nanoseconds, by which it was chosen; the way back takes as long. 0 until a transport is chosen.
    """

    num_ranks: int
    segments: tuple[Segment, ...]
    transport: str = "direct"
    nodes: tuple[int, ...] = ()
    ns: int = 0

    @property
    def is_local(self) -> bool:
        """Whether no row leaves its rank, so that no collective is needed."""
        return all(s.source == s.destination for s in self.segments)

    @property
    def num_rows(self) -> int:
        """Rows that the route carries, over all ranks."""
        return sum(s.length for s in self.segments)

    def traffic(self) -> Counter[tuple[int, int]]:
        """Return the rows for each (source, destination)."""
        rows: Counter[tuple[int, int]] = Counter()
        for s in self.segments:
            rows[s.source, s.destination] += s.length
        return rows

    def moved_rows(self) -> int:
        """Rows that cross between ranks: the least that any transport can send."""
        return sum(s.length for s in self.segments if s.source != s.destination)

    def over(self, transport: str, nodes: Sequence[int] = (), ns: int = 0) -> "Route":
        """Return the same route over another transport, which takes `ns`; `nodes` may be left out if that
        needs none.
        """
        assert transport in TRANSPOSED, f"unknown transport {transport}: known are {', '.join(TRANSPOSED)}"
        assert transport != "local" or self.is_local, "rows leave their rank: the route is not local"
        if transport not in TWO_LEVEL:
            return replace(self, transport=transport, nodes=(), ns=ns)
        assert len(nodes) == self.num_ranks, f"{len(nodes)} nodes for {self.num_ranks} ranks"
        return replace(self, transport=transport, nodes=tuple(nodes), ns=ns)

    def transpose(self) -> "Route":
        """Return the way back: what a rank received, it sends, in the same order."""
        swapped = tuple(segment.transpose() for segment in self.segments)
        return Route(self.num_ranks, swapped, TRANSPOSED[self.transport], self.nodes, self.ns)


def make_route(rows: Iterable[Rows], intervals: Iterable[Interval], num_ranks: int, point: int = 0) -> Route:
    """Find for each run of rows the ranks that hold its positions, at attach point number `point`.

    `intervals` say which of the `num_ranks` ranks of the group holds which positions, in any order: one
    holder for a position, or none. Sources are any ranks of the group.

    Raises:
        AssertionError: if a run reaches positions that nobody holds, which would lose rows, or if runs claim
            the same positions or the same rows of a source.
    """
    held = sorted((i for i in intervals if i.length), key=lambda i: i.start)
    runs = sorted((r for r in rows if r.length), key=lambda r: r.start)
    place_start, place_length, rank, local_start = _columns(held, 4)
    source, source_start, start, length, item = _columns(runs, 5)
    _assert_ranks(held, rank, num_ranks)
    _assert_apart(held, place_start, place_length, "hold the same places")
    _assert_ranks(runs, source, num_ranks)
    _assert_apart(runs, start, length, "claim the same places")
    span = (source_start + length).max(initial=0)  # lays the rows of all sources on one line
    order = np.lexsort((source_start, source))
    on_line = (source * span + source_start)[order]
    _assert_apart([runs[i] for i in order], on_line, length[order], "send the same rows")
    # A run is cut where one place ends and the next begins: a piece for each place that it meets.
    stop, place_stop = start + length, place_start + place_length
    first = np.searchsorted(place_stop, start, side="right")
    pieces = np.maximum(np.searchsorted(place_start, stop, side="left") - first, 0)
    run = np.repeat(np.arange(len(runs)), pieces)
    place = np.arange(len(run)) + np.repeat(first - np.cumsum(pieces) + pieces, pieces)
    piece_start = np.maximum(start[run], place_start[place])
    piece_length = np.minimum(stop[run], place_stop[place]) - piece_start
    _assert_placed(runs, run, piece_start, piece_length)
    columns = (
        source[run],
        source_start[run] + piece_start - start[run],
        rank[place],
        local_start[place] + piece_start - place_start[place],
        piece_length,
        item[run],
    )
    segments = map(Segment, *(column.tolist() for column in columns), repeat(point))
    return Route(num_ranks, tuple(segments))


def _columns(records: Sequence[tuple[int, ...]], width: int) -> Ints:
    """Return the columns [width, records] of a table."""
    return np.fromiter(chain.from_iterable(records), np.int64, width * len(records)).reshape(-1, width).T


def _assert_ranks(records: Sequence[object], ranks: Ints, num_ranks: int) -> None:
    for number in np.flatnonzero((ranks < 0) | (ranks >= num_ranks)).tolist():
        raise AssertionError(f"{records[number]}: the group has {num_ranks} ranks")


def _assert_apart(records: Sequence[object], starts: Ints, lengths: Ints, what: str) -> None:
    """Check that records, sorted by start, do not overlap."""
    for number in np.flatnonzero(starts[:-1] + lengths[:-1] > starts[1:]).tolist():
        raise AssertionError(f"{records[number]} and {records[number + 1]} {what}")


def _assert_placed(runs: Sequence[Rows], run: Ints, starts: Ints, lengths: Ints) -> None:
    """Check that the pieces of each run, in its order, cover it."""
    placed = np.zeros(len(runs), np.int64)
    np.add.at(placed, run, lengths)
    for number in np.flatnonzero(placed != [r.length for r in runs]).tolist():
        covered, mine = 0, run == number
        for start, length in zip(starts[mine], lengths[mine], strict=True):
            if start == runs[number].start + covered:
                covered += length
        raise AssertionError(f"{runs[number]}: only {covered} of {runs[number].length} rows have a place")


@dataclass(frozen=True)
class Ends:
    """One rank's ends of a route, on its device: which rows leave in which order, where the others land.

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


def make_ends(route: Route, rank: int, device: torch.device) -> Ends:
    """Build the index lists of `rank` once a step, ahead of use."""
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
    receive = _ranges([(s.destination_start, s.length) for s in receives], device)
    return Ends(
        is_local=route.is_local,
        send=_ranges([(s.source_start, s.length) for s in sends], device),
        receive=receive,
        send_counts=_counts(sends, sent_to, route.num_ranks),
        receive_counts=_counts(receives, received_from, route.num_ranks),
        transport=route.transport,
        stop=None
        if relay is None
        else _stop(route, [s for s in route.segments if sent_to(s) == rank], device),
        slots=_slots(route, rank, device) if route.transport in ("reduce_scatter", "all_gather") else None,
        landings=_landings(receives, receive, device),
    )


def _landings(
    receives: Sequence[Segment], tokens: torch.Tensor, device: torch.device
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
        (p, _ranges(at[p], device), _ranges([(s.destination_start, s.length) for s in runs[p]], device))
        for p in points
    )


def _stop(route: Route, passing: list[Segment], device: torch.device) -> Stop:
    """Rows come in by source and leave by destination."""
    arriving = sorted(passing, key=lambda s: (s.source, s.destination))
    leaving = sorted(passing, key=lambda s: (s.destination, s.source))
    at_arrival, at_departure = _starts(arriving), _starts(leaving)
    return Stop(
        receive_counts=_counts(arriving, lambda s: s.source, route.num_ranks),
        order=_ranges([(at_arrival[s], s.length) for s in leaving], device),
        inverse=_ranges([(at_departure[s], s.length) for s in arriving], device),
        send_counts=_counts(leaving, lambda s: s.destination, route.num_ranks),
    )


def _slots(route: Route, rank: int, device: torch.device) -> Slots:
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
    return Slots(block, _ranges([(starts[s], s.length) for s in mine], device))


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


def _ranges(runs: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    parts = [torch.arange(start, start + length) for start, length in runs]
    return (torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)).to(device)


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
