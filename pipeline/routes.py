"""Which rows encoders put out, and where those of each microbatch go: from items to blocks to a route."""

from collections.abc import Iterator, Sequence

from parallel.boundary import Route, Rows, Segment, make_route
from parallel.layout import split_evenly
from parallel.sequence import Interval, SequenceLayout
from pipeline.domain_plan import DomainPlan, ItemRows, PlannedItem


def outputs_of(
    numbers: Sequence[int], items: Sequence[PlannedItem], layout: SequenceLayout, tp: int, num_points: int = 1
) -> tuple[tuple[ItemRows, ...], ...]:
    """Return the rows that each rank of an encoder batch puts out: those of its tp group, evenly divided over
    `tp`.

    `numbers` are the encoder batch's `items`, in the order of the sequences of `layout`. They have rows for
    each of `num_points` attach points, one point after the other. A shard is cut at whole units of its
    encoder, so its rows are whole too.
    """
    tp_groups: list[list[ItemRows]] = [[] for _ in range(layout.num_cp_ranks)]
    for point in range(num_points):
        for number, pieces in zip(numbers, layout.shards, strict=True):
            item = items[number]
            tokens = max(1, item.tokens)  # an item may be empty
            for piece in pieces:
                first = piece.start * item.rows // tokens
                stop = (piece.start + piece.length) * item.rows // tokens
                if stop > first:
                    tp_groups[piece.cp_rank].append(ItemRows(number, point, first, stop - first))
    return tuple(part for blocks in tp_groups for part in _divided(blocks, tp))


def _divided(blocks: list[ItemRows], tp: int) -> Iterator[tuple[ItemRows, ...]]:
    """Cut the rows of a tp group into those of its ranks."""
    if tp == 1:
        yield tuple(blocks)
        return
    at, taken = 0, 0  # the block that goes on, and its rows that earlier ranks have
    for share in split_evenly(sum(block.rows for block in blocks), tp):
        own = []
        while share:
            block = blocks[at]
            rows = min(share, block.rows - taken)
            own.append(ItemRows(block.item, block.point, block.first + taken, rows))
            share, taken = share - rows, taken + rows
            if taken == block.rows:
                at, taken = at + 1, 0
        yield tuple(own)


def plan_routes(domain: DomainPlan) -> tuple[Route | None, ...]:
    """Return the route of every microbatch over the ranks of the domain, None without items.

    A rank's rows are counted batch by batch, in the order of `DomainPlan.joined`. At each attach point a row
    goes to the domain rank that holds the token where it stands.

    Raises:
        AssertionError: if rows have no place, or overlap.
    """
    # By attach point, the domain rank that holds its virtual stage for each rank of a stage.
    holders = [
        [domain.holder(point.virtual_stage, rank) for rank in range(domain.stage_size)]
        for point in domain.all_points
    ]
    return tuple(
        _route(domain, m, encoder_batches, holders) if encoder_batches else None
        for m, encoder_batches in enumerate(domain.encoder_batches_of)
    )


def _route(
    domain: DomainPlan, m: int, encoder_batches: Sequence[int], holders: Sequence[Sequence[int]]
) -> Route:
    intervals = list(domain.microbatches[m].layout.intervals(domain.tp))
    segments: list[Segment] = []
    for number, runs in enumerate(_runs(domain, m, encoder_batches)):
        if runs:
            at = holders[number]
            places = [Interval(i.start, i.length, at[i.rank], i.local_start) for i in intervals]
            segments += make_route(runs, places, domain.num_ranks, number).segments
    return Route(domain.num_ranks, tuple(segments))


def _runs(domain: DomainPlan, m: int, encoder_batches: Sequence[int]) -> list[list[Rows]]:
    """The rows of a microbatch by attach point, each run with its place among all that its rank puts out."""
    number = {point: n for n, point in enumerate(domain.all_points)}
    runs: list[list[Rows]] = [[] for _ in number]
    filled = [0] * domain.num_ranks
    items = domain.items
    for c in encoder_batches:
        batch = domain.encoder_batches[c]
        of_point = [runs[number[point]] for point in domain.fed_by(batch.component)]
        for rank, blocks in zip(batch.ranks, batch.outputs, strict=True):
            at = filled[rank]
            for block in blocks:
                item = items[block.item]
                if item.microbatch != m:
                    at += block.rows
                    continue
                for start, rows in item.places(block.first, block.rows):
                    of_point[block.point].append(Rows(rank, at, start, rows, block.item))
                    at += rows
            filled[rank] = at
    return runs
