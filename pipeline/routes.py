"""Where the rows of a microbatch go: from the order of encoder work to a route."""

from collections.abc import Callable, Iterator, Sequence

from parallel.boundary import Route, Rows, make_route
from parallel.layout import split_evenly
from parallel.sequence import Interval, SequenceLayout
from pipeline.plan import EMBEDDING, Chunk, PlannedItem, Point


def row_counts(
    items: Sequence[PlannedItem], layout: SequenceLayout, tp: int, num_points: int = 1
) -> tuple[int, ...]:
    """Return the rows that each rank of a chunk puts out: those of its slot, evenly divided over `tp`.

    `items` are the chunk's, in the order of the sequences of `layout`. They have rows for each of
    `num_points` attach points, one point after the other.
    """
    slots = [0] * layout.num_ranks
    for slot, _, _, rows in _rows_by_slot(items, layout):
        slots[slot] += rows * num_points
    return tuple(share for rows in slots for share in split_evenly(rows, tp))


def _rows_by_slot(
    items: Sequence[PlannedItem], layout: SequenceLayout
) -> Iterator[tuple[int, PlannedItem, int, int]]:
    """Yield (slot, item, first row, rows) of every shard, in packed order.

    A shard is cut at whole units of its encoder, so its rows are whole too.
    """
    for item, pieces in zip(items, layout.shards, strict=True):
        tokens = max(1, item.tokens)  # an item may be empty
        for piece in pieces:
            first = piece.start * item.rows // tokens
            stop = (piece.start + piece.length) * item.rows // tokens
            yield piece.rank, item, first, stop - first


def _rows_of(
    chunk: Chunk, items: Sequence[PlannedItem], num_points: int
) -> Iterator[tuple[int, PlannedItem, int, int, int]]:
    """Yield (position, item, number of the point, first row, rows) of what each rank of a chunk puts out for
    `num_points` attach points, in its order.
    """
    parts = [list(chunk.rows[s * chunk.tp : (s + 1) * chunk.tp]) for s in range(chunk.layout.num_ranks)]
    part = [0] * chunk.layout.num_ranks
    shards = list(_rows_by_slot([items[i] for i in chunk.items], chunk.layout))
    tp, ranks = chunk.tp, chunk.ranks
    for point in range(num_points):
        for slot, item, first, rows in shards:
            left = parts[slot]
            while rows:
                while not left[part[slot]]:
                    part[slot] += 1
                length = min(rows, left[part[slot]])
                yield ranks[slot * tp + part[slot]], item, point, first, length
                left[part[slot]] -= length
                first += length
                rows -= length


def plan_route(
    microbatch: int,
    layout: SequenceLayout,
    tp: int,
    num_ranks: int,
    items: Sequence[PlannedItem],
    chunks: Sequence[Chunk],
    fed_by: Callable[[str], Sequence[Point]] = lambda component: (EMBEDDING,),
) -> Route | None:
    """Return the route of a microbatch over the `num_ranks` positions of its domain, None without items.

    A rank's rows are counted chunk by chunk, then point by point and item by item: the order in which the
    engine joins them. At each attach point of a stage the tokens have places of their own, those of its
    first point first.
    """
    mine = [(chunk, fed_by(chunk.component)) for chunk in chunks if chunk.microbatch == microbatch]
    if not mine:
        return None
    points = sorted({point for _, fed in mine for point in fed}, key=lambda p: (p.stage, p.place))
    axis = sum(layout.lengths)  # every point has a packed axis of its own, one after the other
    runs = []
    filled = [0] * num_ranks
    for chunk, fed in mine:
        axes = [points.index(point) * axis for point in fed]
        for rank, item, point, first, rows in _rows_of(chunk, items, len(fed)):
            runs.append(Rows(rank, filled[rank], axes[point] + item.start + first, rows))
            filled[rank] += rows
    intervals = list(layout.intervals(tp))
    shares = [layout.padded_tokens(member, tp) // tp for member in range(layout.num_ranks)]
    places = [
        Interval(
            interval.start + number * axis,
            interval.length,
            interval.rank + point.stage * layout.num_ranks * tp,
            interval.local_start + point.place * shares[interval.rank // tp],
        )
        for number, point in enumerate(points)
        for interval in intervals
    ]
    return make_route(runs, places, num_ranks)
