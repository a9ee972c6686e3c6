"""Where the rows of a microbatch go: from the order of encoder work to a route."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from parallel.boundary import Route, Rows, make_route
from parallel.layout import split_evenly
from parallel.sequence import SequenceLayout
from pipeline.plan import Chunk, PlannedItem


def row_counts(items: Sequence[PlannedItem], layout: SequenceLayout, tp: int) -> tuple[int, ...]:
    """Return the rows that each rank of a chunk puts out: those of its slot, evenly divided over `tp`.

    `items` are the chunk's, in the order of the sequences of `layout`.
    """
    slots = [0] * layout.num_ranks
    for slot, _, _, rows in _rows_by_slot(items, layout):
        slots[slot] += rows
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


def _rows_of(chunk: Chunk, items: Sequence[PlannedItem]) -> Iterator[tuple[int, PlannedItem, int, int]]:
    """Yield (position, item, first row, rows) of what each rank of a chunk puts out, in its order."""
    parts = [list(chunk.rows[s * chunk.tp : (s + 1) * chunk.tp]) for s in range(chunk.layout.num_ranks)]
    part = [0] * chunk.layout.num_ranks
    for slot, item, first, rows in _rows_by_slot([items[i] for i in chunk.items], chunk.layout):
        while rows:
            while not parts[slot][part[slot]]:
                part[slot] += 1
            length = min(rows, parts[slot][part[slot]])
            yield chunk.ranks[slot * chunk.tp + part[slot]], item, first, length
            parts[slot][part[slot]] -= length
            first += length
            rows -= length


def plan_route(
    microbatch: int,
    layout: SequenceLayout,
    tp: int,
    num_ranks: int,
    items: Sequence[PlannedItem],
    chunks: Sequence[Chunk],
) -> Route | None:
    """Return the route of a microbatch over the `num_ranks` positions of its domain, None without items.

    A rank's rows are counted chunk by chunk and item by item: the order in which the engine joins them.
    """
    runs = []
    filled: dict[int, int] = defaultdict(int)
    for chunk in chunks:
        if chunk.microbatch != microbatch:
            continue
        for rank, item, first, rows in _rows_of(chunk, items):
            runs.append(Rows(rank, filled[rank], item.start + first, rows))
            filled[rank] += rows
    has_items = any(chunk.microbatch == microbatch for chunk in chunks)
    return make_route(runs, layout.intervals(tp), num_ranks) if has_items else None
