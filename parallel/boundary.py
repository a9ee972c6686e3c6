"""The boundary: where rows that encoders put out become embeddings that the LLM takes in.

Invariant: every row is sent once, from the rank that encoded it to the one rank that holds its position in
the packed sequence. The way back is the transposed route through the same code, so that for any rows x and
gradients y, ⟨A x, y⟩ = ⟨x, Aᵀ y⟩.

A route is planned from metadata by interval arithmetic: ragged counts, ranks that send or receive nothing,
ranks that only encode, any number of sources for one destination and the reverse are all the same case. How
the rows travel is the route's transport (`parallel/transports.py`): it is part of the plan, and changes
neither the rows nor where they land. Ranks carry a route out in `parallel/shipping.py`.

Rows may enter the model at several named attach points, such as the embeddings and a later layer: an encoder
puts out rows of its own for each of its points, and a segment says of which item its rows are and at which
point they enter.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np

from ops.ints import Ints
from parallel.sequence import Interval
from parallel.transports import TRANSPOSED, TWO_LEVEL, relays


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

    def __getstate__(self) -> dict[str, object]:
        """The fields alone: what is found once on each process is not sent."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
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

    @cached_property
    def block(self) -> int:
        """Rows of each rank's share of the buffer of a reduce-scatter or all-gather."""
        rows = self.leaving if self.transport == "all_gather" else self.arriving
        return max(rows.values(), default=0)

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
        return self._back

    @cached_property
    def _back(self) -> "Route":
        swapped = tuple(segment.transpose() for segment in self.segments)
        return Route(self.num_ranks, swapped, TRANSPOSED[self.transport], self.nodes, self.ns)

    @cached_property
    def leaving(self) -> Counter[int]:
        """Rows that leave each rank, or stay there."""
        rows: Counter[int] = Counter()
        for s in self.segments:
            rows[s.source] += s.length
        return rows

    @cached_property
    def stopping(self) -> Counter[int]:
        """Rows that pass through each rank on a two-level transport."""
        rows: Counter[int] = Counter()
        if self.transport in TWO_LEVEL and not self.is_local:
            relay = relays(self.transport, self.nodes)
            for s in self.segments:
                rows[relay(s.source, s.destination)] += s.length
        return rows

    @cached_property
    def arriving(self) -> Counter[int]:
        """Rows that come to each rank, or stay there."""
        rows: Counter[int] = Counter()
        for s in self.segments:
            rows[s.destination] += s.length
        return rows


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
