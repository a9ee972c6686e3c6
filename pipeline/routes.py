"""Which rows encoders put out, and where those of each microbatch go: from items to blocks to a route."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from parallel.boundary import Route, Rows, make_route
from parallel.layout import split_evenly
from parallel.sequence import Interval, SequenceLayout
from pipeline.plan import Block, DomainPlan, PlannedItem, Point


def outputs_of(
    numbers: Sequence[int], items: Sequence[PlannedItem], layout: SequenceLayout, tp: int, num_points: int = 1
) -> tuple[tuple[Block, ...], ...]:
    """Return the rows that each rank of a chunk puts out: those of its slot, evenly divided over `tp`.

    `numbers` are the chunk's `items`, in the order of the sequences of `layout`. They have rows for each of
    `num_points` attach points, one point after the other. A shard is cut at whole units of its encoder, so
    its rows are whole too.
    """
    slots: list[list[Block]] = [[] for _ in range(layout.num_ranks)]
    for point in range(num_points):
        for number, pieces in zip(numbers, layout.shards, strict=True):
            item = items[number]
            tokens = max(1, item.tokens)  # an item may be empty
            for piece in pieces:
                first = piece.start * item.rows // tokens
                stop = (piece.start + piece.length) * item.rows // tokens
                if stop > first:
                    slots[piece.rank].append(Block(number, point, first, stop - first))
    return tuple(part for blocks in slots for part in _divided(blocks, tp))


def _divided(blocks: list[Block], tp: int) -> Iterator[tuple[Block, ...]]:
    """Cut the rows of a slot into those of its ranks."""
    if tp == 1:
        yield tuple(blocks)
        return
    at, taken = 0, 0  # the block that goes on, and its rows that earlier ranks have
    for share in split_evenly(sum(block.rows for block in blocks), tp):
        own = []
        while share:
            block = blocks[at]
            rows = min(share, block.rows - taken)
            own.append(Block(block.item, block.point, block.first + taken, rows))
            share, taken = share - rows, taken + rows
            if taken == block.rows:
                at, taken = at + 1, 0
        yield tuple(own)


def plan_routes(domain: DomainPlan) -> tuple[Route | None, ...]:
    """Return the route of every microbatch over the positions of the domain, None without items.

    A rank's rows are counted chunk by chunk, in the order of `DomainPlan.joined`. At each attach point a row
    goes to the position that holds the token where it stands.

    Raises:
        AssertionError: if rows have no place, or overlap.
    """
    runs: dict[tuple[int, int], list[Rows]] = defaultdict(list)  # by microbatch and attach point
    number = {point: n for n, point in enumerate(domain.all_points)}
    for m, chunks in enumerate(domain.chunks_of):
        filled: dict[int, int] = defaultdict(int)
        for c in chunks:
            chunk = domain.chunks[c]
            points = [number[point] for point in domain.fed_by(chunk.component)]
            for rank, blocks in zip(chunk.ranks, chunk.outputs, strict=True):
                for block in blocks:
                    item = domain.items[block.item]
                    if item.microbatch == m:
                        start = item.start + block.first
                        run = Rows(rank, filled[rank], start, block.rows, block.item)
                        runs[m, points[block.point]].append(run)
                    filled[rank] += block.rows
    return tuple(
        _route(domain, m, [runs[m, n] for n in range(len(domain.all_points))]) if chunks else None
        for m, chunks in enumerate(domain.chunks_of)
    )


def _route(domain: DomainPlan, m: int, runs: Sequence[Sequence[Rows]]) -> Route:
    layout = domain.microbatches[m].layout
    segments = []
    for number, point in enumerate(domain.all_points):
        if runs[number]:
            places = [_at_point(interval, point, domain) for interval in layout.intervals(domain.tp)]
            segments += make_route(runs[number], places, domain.num_ranks, number).segments
    return Route(domain.num_ranks, tuple(segments))


def _at_point(interval: Interval, point: Point, domain: DomainPlan) -> Interval:
    """Where tokens live that a member and tp rank of any stage holds: with the holder of the point's part."""
    position = domain.holder(point.part, interval.rank)
    return Interval(interval.start, interval.length, position, interval.local_start)
