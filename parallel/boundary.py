"""The boundary: where rows that encoders put out become embeddings that the LLM takes in.

Invariant: every row is sent once, straight from the rank that encoded it to the rank that holds its position
in the packed sequence. The way back is the transposed route through the same code, so that for any rows x
and gradients y, ⟨A x, y⟩ = ⟨x, Aᵀ y⟩.

A route is planned from metadata by interval arithmetic: ragged counts, ranks that send or receive nothing,
any number of sources for one destination and the reverse are all the same case. Rows travel in one uneven
all-to-all; a route that never leaves its ranks needs no communicator.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from parallel.sequence import SequenceLayout


@dataclass(frozen=True)
class Rows:
    """Rows [source_start, source_start + length) of `source` belong at `start` of the packed axis."""

    source: int
    source_start: int
    start: int
    length: int


@dataclass(frozen=True)
class Segment:
    """A run of rows that moves together: between local starts on two ranks of the group."""

    source: int
    source_start: int
    destination: int
    destination_start: int
    length: int


@dataclass(frozen=True)
class Route:
    """All segments of one microbatch, in packed order, over a group of `num_ranks`."""

    num_ranks: int
    segments: tuple[Segment, ...]

    @property
    def is_local(self) -> bool:
        """Whether no row leaves its rank, so that no collective is needed."""
        return all(s.source == s.destination for s in self.segments)

    @property
    def num_rows(self) -> int:
        """Rows that the route carries, over all ranks."""
        return sum(s.length for s in self.segments)

    def transpose(self) -> "Route":
        """Return the way back: what a rank received, it sends, in the same order."""
        swapped = (
            Segment(s.destination, s.destination_start, s.source, s.source_start, s.length)
            for s in self.segments
        )
        return Route(self.num_ranks, tuple(swapped))

    def sends(self, rank: int) -> tuple[Segment, ...]:
        """Segments that leave `rank`, by destination and then in packed order."""
        mine = (s for s in self.segments if s.source == rank)
        return tuple(sorted(mine, key=lambda s: s.destination))

    def receives(self, rank: int) -> tuple[Segment, ...]:
        """Segments that arrive at `rank`, by source and then in packed order."""
        mine = (s for s in self.segments if s.destination == rank)
        return tuple(sorted(mine, key=lambda s: s.source))

    def moved_rows(self) -> int:
        """Rows that cross between ranks: the least that any transport can send."""
        return sum(s.length for s in self.segments if s.source != s.destination)


def make_route(rows: Iterable[Rows], layout: SequenceLayout) -> Route:
    """Find for each run of rows the ranks that hold its positions.

    Raises:
        AssertionError: if a run reaches beyond the packed axis, which would lose rows.
    """
    intervals = [i for i in layout.intervals() if i.length]
    starts = [i.start for i in intervals]
    segments = []
    ordered = sorted((r for r in rows if r.length), key=lambda r: r.start)
    for before, after in pairwise(ordered):
        assert before.start + before.length <= after.start, f"{before} and {after} claim the same places"
    for run in ordered:
        assert 0 <= run.source < layout.num_ranks, f"{run}: the group has {layout.num_ranks} ranks"
        covered = 0
        at = bisect_right(starts, run.start) - 1
        while 0 <= at < len(intervals) and covered < run.length:
            place = intervals[at]
            start = run.start + covered
            stop = min(run.start + run.length, place.start + place.length)
            if start < stop:
                source_start = run.source_start + covered
                local = place.local_start + start - place.start
                segments.append(Segment(run.source, source_start, place.rank, local, stop - start))
                covered += stop - start
            at += 1
        assert covered == run.length, f"{run}: only {covered} of {run.length} rows have a place"
    return Route(layout.num_ranks, tuple(segments))


@dataclass(frozen=True)
class Ends:
    """One rank's ends of a route, on its device: which rows leave in which order, where the others land.

    `send` [rows out] and `receive` [rows in] are int64 indices; the counts are rows for each peer.
    """

    is_local: bool
    send: torch.Tensor
    receive: torch.Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]

    def transpose(self) -> "Ends":
        """Return the same rank's ends of the way back."""
        return Ends(self.is_local, self.receive, self.send, self.receive_counts, self.send_counts)


def make_ends(route: Route, rank: int, device: torch.device) -> Ends:
    """Build the index lists of `rank` once a step, ahead of use."""
    sends, receives = route.sends(rank), route.receives(rank)
    send_counts, receive_counts = [0] * route.num_ranks, [0] * route.num_ranks
    for s in sends:
        send_counts[s.destination] += s.length
    for s in receives:
        receive_counts[s.source] += s.length
    send = _ranges([(s.source_start, s.length) for s in sends]).to(device)
    receive = _ranges([(s.destination_start, s.length) for s in receives]).to(device)
    return Ends(route.is_local, send, receive, tuple(send_counts), tuple(receive_counts))


def _ranges(runs: list[tuple[int, int]]) -> torch.Tensor:
    parts = [torch.arange(start, start + length) for start, length in runs]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)


@dataclass
class Shipment:
    """Rows on their way. `rows` [rows in, D] may be read once `work` was waited for."""

    rows: torch.Tensor
    outgoing: torch.Tensor
    work: "dist.Work | None"


def ship(ends: Ends, outgoing: torch.Tensor, group: "dist.ProcessGroup | None") -> Shipment:
    """Start sending `outgoing` [rows out, D], already in the order of `ends.send`, along a route.

    Every rank of the group calls it. The rows arrive in the order of `ends.receive`, and a local route
    delivers them at once. Over the transposed ends, the same call carries their gradients back.
    """
    assert outgoing.shape[0] == sum(ends.send_counts), f"{outgoing.shape[0]} rows for {ends.send_counts}"
    if ends.is_local:
        return Shipment(outgoing, outgoing, None)
    assert group is not None, "a route between ranks needs a communicator"
    incoming = outgoing.new_empty(sum(ends.receive_counts), outgoing.shape[1])
    work = dist.all_to_all_single(
        incoming, outgoing, list(ends.receive_counts), list(ends.send_counts), group=group, async_op=True
    )
    return Shipment(incoming, outgoing, work)
