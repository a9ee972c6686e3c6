"""Where the rows of a microbatch go: from the order of encoder work to a route."""

from collections import defaultdict
from collections.abc import Sequence

from parallel.boundary import Route, Rows, make_route
from parallel.sequence import SequenceLayout
from pipeline.plan import Chunk, PlannedItem


def plan_route(
    microbatch: int, layout: SequenceLayout, items: Sequence[PlannedItem], chunks: Sequence[Chunk]
) -> Route | None:
    """Return the route of a microbatch, None if it has no items.

    A rank's rows are counted chunk by chunk and item by item: the order in which the engine joins them.
    """
    runs = []
    filled: dict[int, int] = defaultdict(int)
    for chunk in chunks:
        if chunk.microbatch != microbatch:
            continue
        for number in chunk.items:
            item = items[number]
            runs.append(Rows(chunk.rank, filled[chunk.rank], item.start, item.rows))
            filled[chunk.rank] += item.rows
    return make_route(runs, layout) if runs else None
