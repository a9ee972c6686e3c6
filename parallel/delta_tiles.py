"""Which heads of the gated delta rule a rank computes of shared sequences, and what is exchanged: no tensors.

`parallel/sharded_delta.py` carries it out and says why.
"""

from collections.abc import Sequence

from ops.delta_shape import DeltaHeads
from parallel.exchange_plan import Exchange
from parallel.sequence import SequenceLayout
from parallel.tile_plan import plan_tiles
from parallel.tiles import AttentionShape, Tile, ulysses_tiles


def delta_tiles(
    layout: SequenceLayout, tiles: Sequence[Sequence[Tile]], heads: int
) -> tuple[tuple[Tile, ...], ...]:
    """Tiles of whole heads for the sequences that have any `tiles`."""
    shape = AttentionShape(heads, heads, causal=True)
    return tuple(
        ulysses_tiles(shards, shape) if of else () for shards, of in zip(layout.shards, tiles, strict=True)
    )


def delta_exchanges(
    layout: SequenceLayout, tiles: Sequence[Sequence[Tile]], rank: int, heads: DeltaHeads
) -> tuple[Exchange, Exchange] | None:
    """Return the exchanges in and out of `rank`; None if nothing is shared. `tiles` are attention's."""
    shape, of_heads = heads.shape, delta_tiles(layout, tiles, heads.count)
    square = AttentionShape(heads.count, heads.count, causal=True)
    into, out = (plan_tiles(layout, of_heads, rank, square, size) for size in (shape.width, shape.out))
    # Of a plan of tiles only the way of the outputs counts: inputs take it the other way round.
    return None if into is None or out is None else (into.outgoing.transpose(), out.outgoing)
