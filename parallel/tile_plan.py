"""What a rank exchanges and computes of shared sequences: planned from shards and tiles alone.

The idea: shards say where the tokens of a sequence live, tiles say who computes which heads and rows of its
attention. For each layer there is one exchange in, which brings queries, keys and values to the tiles, and
one out, the transpose of its query part.

Invariant: a rank receives each row of a key/value head of a sequence once, however many of its tiles read it.
Holder and reader derive the order of their message from the same walk over sequences, shards and needs.

Shapes: N query heads, K key/value heads, H head size.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ops.span import Span
from parallel.exchange_plan import Block, Exchange, Parcel, Side, make_side
from parallel.sequence import SequenceLayout, Shard
from parallel.tiles import AttentionShape, Tile, check_tiles, context

QUERY, KEY, VALUE = range(3)


@dataclass(frozen=True)
class TileGroup:
    """The tiles of one rank that have equally many heads, one after the other in tensors of their own."""

    heads: int
    kv_heads: int
    spans: tuple[Span, ...]
    firsts: tuple[int, ...] = ()


@dataclass(frozen=True)
class TilePlan:
    """What one rank computes of the shared sequences, and what it exchanges for that.

    The tensors on the side of the tokens are queries, keys and values of this rank's tokens of shared
    sequences, in packed order; on the side of the tiles, the queries of every group, then the keys, then the
    values. There is always a group, if an empty one, so that the exchanges of every rank are in its graph.
    """

    groups: tuple[TileGroup, ...]
    incoming: Exchange
    outgoing: Exchange


@dataclass(frozen=True)
class Moved:
    """Elements that one rank sends to others for one layer's forward; the backward moves as many."""

    query: int
    key: int
    value: int
    output: int

    @property
    def total(self) -> int:
        """Elements in all."""
        return self.query + self.key + self.value + self.output


def moved_elements(plan: TilePlan | None) -> Moved:
    """Count what a rank sends to others for one layer's forward."""
    if plan is None:
        return Moved(0, 0, 0, 0)
    query, key, value = (plan.incoming.moved_elements(kind) for kind in (QUERY, KEY, VALUE))
    return Moved(query, key, value, plan.outgoing.moved_elements())


def plan_tiles(
    layout: SequenceLayout,
    tiles: Sequence[Sequence[Tile]],
    rank: int,
    shape: AttentionShape,
    head_dim: int,
) -> TilePlan | None:
    """Plan what `rank` exchanges and computes of the shared sequences; None if no sequence has tiles.

    `tiles[s]` partition heads × rows of sequence s, or are empty if it lives on one rank.
    """
    assert len(tiles) == len(layout.shards), f"tiles of {len(tiles)} sequences for {len(layout.shards)}"
    if not any(tiles):
        return None
    parts = [
        _parts_by_rank(sequence, length, shape) if sequence else {}
        for sequence, length in zip(tiles, layout.lengths, strict=True)
    ]
    groups, places_of = _group_parts([by_rank.get(rank, []) for by_rank in parts])
    to_tiles: list[list[Parcel]] = [[] for _ in range(layout.num_cp_ranks)]
    from_tokens: list[list[Parcel]] = [[] for _ in range(layout.num_cp_ranks)]
    held = 0
    for shards, by_rank, own_places in zip(layout.shards, parts, places_of, strict=True):
        if not by_rank:
            continue
        holds = any(shard.cp_rank == rank for shard in shards)
        needs = {peer: list(_needs(its)) for peer, its in by_rank.items() if holds or peer == rank}
        own = by_rank.get(rank, [])
        for shard in shards:
            if shard.cp_rank == rank:
                for peer, its in needs.items():
                    to_tiles[peer] += [(_held_block(need, shard, held),) for need in _within(its, shard)]
                held += shard.length
            from_tokens[shard.cp_rank] += [
                tuple(_tile_block(need, own[i], own_places[i], len(groups)) for i in need.readers)
                for need in _within(needs.get(rank, ()), shard)
            ]
    token_shapes = [(held, heads, head_dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    token_side = make_side(token_shapes, to_tiles)
    tile_side = make_side(_tile_shapes(groups, head_dim), from_tokens)
    outgoing = Exchange(rank, _first(tile_side, len(groups)), _first(token_side, 1))
    return TilePlan(groups, Exchange(rank, token_side, tile_side), outgoing)


def own_groups(
    layout: SequenceLayout, tiles: Sequence[Sequence[Tile]], rank: int, shape: AttentionShape
) -> tuple[TileGroup, ...] | None:
    """Return the groups of what `plan_tiles` plans, at a fraction of its time: nothing that is exchanged."""
    if not any(tiles):
        return None
    own = [
        [part for tile in sequence if tile.cp_rank == rank for part in _parts(tile, length, shape)]
        for sequence, length in zip(tiles, layout.lengths, strict=True)
    ]
    return _group_parts(own)[0]


@dataclass(frozen=True)
class _Part:
    """A tile, or a share of its heads in which every key/value head serves equally many query heads.

    Query rows [row, row + rows) of heads [head, head + heads) of a sequence read the keys and values
    [start, stop) of key/value heads [kv_head, kv_head + kv_heads).
    """

    head: int
    heads: int
    row: int
    rows: int
    kv_head: int
    kv_heads: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Place:
    """Where a part lies on its rank: its group, and where its rows and its context begin there."""

    group: int
    row: int
    context: int


@dataclass(frozen=True)
class _Need:
    """Rows [start, stop) of a sequence and heads [head, head + heads) of its queries, keys or values, which
    the parts numbered `readers` of one rank read.
    """

    kind: int
    start: int
    stop: int
    head: int
    heads: int
    readers: tuple[int, ...]


def _parts_by_rank(tiles: Sequence[Tile], length: int, shape: AttentionShape) -> dict[int, list[_Part]]:
    """The parts of one sequence that each rank computes, in the order of its tiles."""
    tiles = [tile for tile in tiles if tile.head_count and tile.row_count]
    check_tiles(tiles, length, shape)
    parts: dict[int, list[_Part]] = {}
    for tile in tiles:
        parts.setdefault(tile.cp_rank, []).extend(_parts(tile, length, shape))
    return parts


def _parts(tile: Tile, length: int, shape: AttentionShape) -> Iterator[_Part]:
    """The parts of one tile of a sequence, none if it is empty."""
    if not (tile.head_count and tile.row_count):
        return
    group = shape.heads // shape.kv_heads
    reach = context(tile.row_start, tile.row_count, length, shape)
    for head, heads in _even_heads(tile.head_start, tile.head_count, group):
        kv_head = head // group
        kv_heads = (head + heads - 1) // group + 1 - kv_head
        yield _Part(head, heads, tile.row_start, tile.row_count, kv_head, kv_heads, *reach)


def _even_heads(head: int, heads: int, group: int) -> Iterator[tuple[int, int]]:
    """Cut a range of heads so that each piece lies within one key/value head or consists of whole ones."""
    stop = head + heads
    whole_start, whole_stop = -(-head // group) * group, stop // group * group
    cuts = {head, stop} | {cut for cut in (whole_start, whole_stop) if head < cut < stop}
    for begin, end in pairwise(sorted(cuts)):
        yield begin, end - begin


def _group_parts(own: Sequence[Sequence[_Part]]) -> tuple[tuple[TileGroup, ...], list[list[_Place]]]:
    """Group one rank's parts of every sequence by how many heads they have, and say where each part lies."""
    spans: dict[tuple[int, int], list[Span]] = {}
    firsts: dict[tuple[int, int], list[int]] = {}
    ends: dict[tuple[int, int], _Place] = {}  # where the next part of each group will lie
    places_of: list[list[_Place]] = [[] for _ in own]
    for parts, places in zip(own, places_of, strict=True):
        for part in parts:
            kind = part.heads, part.kv_heads
            place = ends.setdefault(kind, _Place(len(ends), 0, 0))
            span = Span(part.rows, part.stop - part.start, part.row - part.start)
            spans.setdefault(kind, []).append(span)
            firsts.setdefault(kind, []).append(part.head)
            places.append(place)
            ends[kind] = _Place(place.group, place.row + span.rows, place.context + span.context)
    groups = [TileGroup(*heads, tuple(of), tuple(firsts[heads])) for heads, of in spans.items()]
    return tuple(groups or [TileGroup(1, 1, ())]), places_of


def _within(needs: Iterable[_Need], shard: Shard) -> Iterator[_Need]:
    """What is read of one shard, in the order of the message."""
    for need in needs:
        start, stop = max(need.start, shard.start), min(need.stop, shard.start + shard.length)
        if start < stop:
            yield _Need(need.kind, start, stop, need.head, need.heads, need.readers)


def _needs(parts: Sequence[_Part]) -> Iterator[_Need]:
    """What the parts of one rank read of a sequence: the queries of each, then keys and values, each once."""
    for i, part in enumerate(parts):
        yield _Need(QUERY, part.row, part.row + part.rows, part.head, part.heads, (i,))
    head_cuts = {cut for part in parts for cut in (part.kv_head, part.kv_head + part.kv_heads)}
    for head, end_head in pairwise(sorted(head_cuts)):
        users = [i for i, part in enumerate(parts) if part.kv_head <= head < part.kv_head + part.kv_heads]
        row_cuts = {cut for i in users for cut in (parts[i].start, parts[i].stop)}
        for start, stop in pairwise(sorted(row_cuts)):
            readers = tuple(i for i in users if parts[i].start <= start < parts[i].stop)
            if readers:
                yield _Need(KEY, start, stop, head, end_head - head, readers)
                yield _Need(VALUE, start, stop, head, end_head - head, readers)


def _held_block(need: _Need, shard: Shard, held: int) -> Block:
    """Where the holder of a shard has it, `held` shared tokens lying before the shard."""
    return Block(need.kind, held + need.start - shard.start, need.stop - need.start, need.head, need.heads)


def _tile_block(need: _Need, part: _Part, place: _Place, num_groups: int) -> Block:
    """Where the reading rank puts it for one of its parts."""
    if need.kind == QUERY:
        row, head = place.row + need.start - part.row, need.head - part.head
    else:
        row, head = place.context + need.start - part.start, need.head - part.kv_head
    return Block(need.kind * num_groups + place.group, row, need.stop - need.start, head, need.heads)


def _tile_shapes(groups: Sequence[TileGroup], head_dim: int) -> list[tuple[int, int, int]]:
    rows = [(sum(span.rows for span in group.spans), group.heads, head_dim) for group in groups]
    contexts = [(sum(span.context for span in group.spans), group.kv_heads, head_dim) for group in groups]
    return rows + contexts + contexts


def _first(side: Side, tensors: int) -> Side:
    """The part of a side that concerns its first `tensors`."""
    kept = [[parcel for parcel in message if parcel[0].tensor < tensors] for message in side.parcels]
    return make_side(side.shapes[:tensors], kept)
