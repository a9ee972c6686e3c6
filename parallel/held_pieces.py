"""What a rank holds of the sequences of a pack: runs of its tokens, by when they are attended.

Tokens of shared sequences travel. Sequences that live on the rank are attended while the exchange in is under
way, or while the exchange out is.
"""

from collections.abc import Sequence

from parallel.exchange_plan import Exchange
from parallel.sequence import SequenceLayout
from parallel.tile_plan import TilePlan
from parallel.tiles import Tile

SHARED, EARLY, LATE = range(3)


def pieces_of(layout: SequenceLayout, tiles: Sequence[Sequence[Tile]], rank: int) -> list[tuple[bool, int]]:
    """Whether each sequence is shared, and how many of its tokens `rank` holds."""
    pieces = []
    for number, (shards, sequence_tiles) in enumerate(zip(layout.shards, tiles, strict=True)):
        holders = {shard.cp_rank for shard in shards if shard.length}
        assert sequence_tiles or len(holders) <= 1, f"sequence {number} on ranks {holders} has no tiles"
        held = sum(shard.length for shard in shards if shard.cp_rank == rank)
        pieces.append((bool(sequence_tiles), held))
    return pieces


def num_during_incoming(local: Sequence[int], window: int | None, tiles: TilePlan) -> int:
    """How many of the `local` sequences to attend during the exchange in: work in proportion to elements."""
    into, out = _elements(tiles.incoming), _elements(tiles.outgoing)
    works = [length * (length if window is None else min(length, window + 1)) for length in local]
    done, total = 0, sum(works)
    for number, work in enumerate(works):
        # A sequence belongs to the exchange in which its middle falls.
        if (2 * done + work) * (into + out) > 2 * total * into:
            return number
        done += work
    return len(works)


def _elements(exchange: Exchange) -> int:
    return exchange.moved_elements() + exchange.transpose().moved_elements()


def runs_of(pieces: Sequence[tuple[bool, int]], num_early: int) -> tuple[tuple[int, int], ...]:
    """Neighbours of one kind, and how many tokens they are; every kind has a run, if an empty one, because
    ranks without shared tokens belong to the graph too.
    """
    runs: list[tuple[int, int]] = []
    num_local = 0
    for shared, length in pieces:
        kind = SHARED if shared else EARLY if num_local < num_early else LATE
        num_local += not shared
        before = runs.pop()[1] if runs and runs[-1][0] == kind else 0
        runs.append((kind, before + length))
    missing = {SHARED, EARLY, LATE} - {kind for kind, _ in runs}
    return (*runs, *((kind, 0) for kind in sorted(missing)))
