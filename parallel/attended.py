"""What attention does and exchanges on one rank, counted from shards and tiles."""

from collections.abc import Sequence
from itertools import pairwise

from ops.delta_shape import DeltaHeads
from parallel.delta_tiles import delta_exchanges
from parallel.exchange_lists import beside, sizes_of, total
from parallel.exchange_plan import Exchange
from parallel.held_pieces import num_during_incoming, pieces_of
from parallel.sequence import SequenceLayout
from parallel.tile_plan import KEY, own_groups, plan_tiles
from parallel.tiles import AttentionShape, Tile
from parallel.work import Attended


def attended(
    layout: SequenceLayout,
    tiles: Sequence[Sequence[Tile]],
    rank: int,
    tail: int,
    shape: AttentionShape,
    head_dim: int,
    messages: bool = True,
    delta: DeltaHeads | None = None,
) -> Attended:
    """Count what cp rank `rank` of a pack attends to, `tail` padding tokens included, in heads of `shape`,
    and what layers whose delta nets have the heads `delta` exchange.

    Without `messages`, what it sends to each cp rank, lists, adds up and attends late is counted as nothing,
    which takes far less time.
    """
    plan = plan_tiles(layout, tiles, rank, shape, head_dim) if messages else None
    groups = plan.groups if plan else own_groups(layout, tiles, rank, shape)
    tokens = layout.local_tokens(rank) + tail
    if groups is None:
        return Attended(tokens, tokens)
    pieces = [*pieces_of(layout, tiles, rank), (False, tail)]
    alone = [length for shared, length in pieces if not shared]
    local = sum(alone)
    calls = tuple(
        (
            group.heads * sum(span.rows for span in group.spans),
            group.kv_heads * sum(span.context for span in group.spans),
        )
        for group in groups
    )
    rows, context = (sum(of) for of in zip((0, 0), *calls, strict=True))
    nothing = (0,) * layout.num_cp_ranks
    kinds = [shared for shared, _ in pieces]
    apart = sum(of and not before for before, of in pairwise((False, *kinds))) > 1
    if plan is None:
        sent = (nothing,) * 4
        return Attended(tokens, local, rows, context, *sent, groups=calls, apart=apart)
    into, out, into_back, out_back = _sent(plan.incoming, plan.outgoing)
    exchanges = delta_exchanges(layout, tiles, rank, delta) if delta is not None else None
    of_delta = _sent(*exchanges) if exchanges is not None else ()
    own = plan.incoming.source.counts[rank]
    tokens_in, tiles_in = (sizes_of(side, rank) for side in (plan.incoming.source, plan.incoming.target))
    lists = total(tokens_in) + total(tiles_in)
    for one in (plan.outgoing, *(exchanges or ())):
        lists += sum(total(sizes_of(side, rank)) for side in (one.source, one.target))
    adding = beside(tiles_in.others), beside(tiles_in.own), beside(tokens_in.tensors[KEY])
    late = sum(alone[num_during_incoming(alone, shape.window, plan) :])
    sent = into, out, into_back, out_back
    return Attended(tokens, local, rows, context, *sent, of_delta, own, calls, apart, lists, adding, late)


def _sent(into: Exchange, out: Exchange) -> tuple[tuple[int, ...], ...]:
    """Numbers sent to each cp rank in two exchanges, and in the transposes of both."""
    return tuple(
        tuple(0 if to == into.rank else count for to, count in enumerate(side.counts))
        for side in (into.source, out.source, into.target, out.target)
    )
