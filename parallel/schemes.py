"""Which tiles a shared sequence gets, and how long every rank of a layout takes: arithmetic on exact volumes.

A cost is an integer number of nanoseconds of one forward pass through all layers of a component.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from parallel.costs import CostTable, Link
from parallel.sequence import SequenceLayout, Shard
from parallel.tiles import (
    AttentionShape,
    Tile,
    Volume,
    attention_work,
    balanced_tiles,
    check_tiles,
    exchange_volume,
    gather_tiles,
    hybrid_tiles,
    pairs_before,
    rows_tiles,
    ulysses_tiles,
)

_FS_PER_NS = 1_000_000


@dataclass(frozen=True)
class SequenceCost:
    """What sequences of one component cost.

    `token_fs` is the work of a token outside attention and `pair_fs` that of a (query, key) pair in all
    heads, in femtoseconds for all layers. `layers` of them exchange, once in and once out; a head row has
    `head_bytes`. Layers whose attention never leaves a rank, such as those of windows that no cut divides,
    belong to `token_fs`.
    """

    shape: AttentionShape
    layers: int
    token_fs: int
    pair_fs: int
    head_bytes: int
    link: Link

    def linear_ns(self, tokens: int) -> int:
        """Work on tokens outside attention."""
        return tokens * self.token_fs // _FS_PER_NS

    def attention_ns(self, work: int) -> int:
        """Attention over `work` pairs × heads in each layer."""
        return work * self.pair_fs // (self.shape.heads * _FS_PER_NS)

    def transfer_ns(self, head_rows: int) -> int:
        """What a link takes to carry `head_rows` in each layer, latency apart."""
        return self.link.bytes_ns(self.layers * head_rows * self.head_bytes)

    @property
    def sharing_ns(self) -> int:
        """What a rank pays for taking part in exchanges at all: the latency of two in each layer."""
        return 2 * self.layers * self.link.latency_ns


def sequence_cost(
    table: CostTable, part: str, shape: AttentionShape, head_bytes: int, link: Link
) -> SequenceCost:
    """Take the costs of `part` from a table; `head_bytes` is H times the bytes of a number, and sequences are
    exchanged over `link`.
    """
    work = table.parts[part]
    # The table times a causal sequence by its square, of which it has half the pairs.
    pair_fs = work.square_fs * (2 if shape.causal else 1)
    return SequenceCost(shape, work.exchanges, work.token_fs, pair_fs, head_bytes, link)


def scheme_tiles(shards: Sequence[Shard], shape: AttentionShape) -> Iterator[tuple[str, tuple[Tile, ...]]]:
    """Yield the schemes worth trying and their tiles, in the order that decides ties.

    The head ways of a hybrid divide the degree, so that its blocks are equal, or are the key/value heads.
    """
    degree = len(shards)
    yield "ulysses", ulysses_tiles(shards, shape)
    yield "gather", gather_tiles(shards, shape)
    for ways in range(2, degree):
        if degree % ways == 0 or shape.kv_heads == ways:
            yield f"hybrid{ways}", hybrid_tiles(shards, shape, ways)
    yield "balanced", balanced_tiles(shards, shape)
    if shape.causal or shape.window is not None:
        yield "rows", rows_tiles(shards, shape)


@dataclass(frozen=True)
class Tiling:
    """Tiles of a sequence, with each rank's attention work and exchange."""

    tiles: tuple[Tile, ...]
    work: Mapping[int, int]
    volumes: Mapping[int, Volume]


def layer_exchange_ns(layout: SequenceLayout, cost: SequenceCost) -> tuple[int, ...]:
    """Time that each rank's exchanges take in the forward pass of one layer, with the tiles that
    `choose_tiles` gives; empty if nothing is shared.
    """
    volumes = [Volume()] * layout.num_ranks
    for shards in layout.shards:
        tiling = _choose_tiling(shards, cost)
        for rank, volume in tiling.volumes.items() if tiling else ():
            volumes[rank] += volume
    if not any(volume.busier for volume in volumes):
        return ()
    latency = 2 * cost.link.latency_ns
    return tuple(
        cost.link.bytes_ns(volume.busier * cost.head_bytes) + latency * (volume != Volume())
        for volume in volumes
    )


def choose_tiles(shards: Sequence[Shard], cost: SequenceCost) -> tuple[Tile, ...]:
    """Return the tiles with the least time of the slowest rank, or none if the sequence lives on one rank.

    Slow is what a rank's attention and exchange take beyond its tokens' share of the attention, so that cuts
    which are uneven because the ranks have other work keep their proportion. Of even cuts it is the slowest.
    """
    tiling = _choose_tiling(shards, cost)
    if tiling is None:
        return ()
    check_tiles(tiling.tiles, sum(s.length for s in shards), cost.shape)
    return tiling.tiles


def _choose_tiling(shards: Sequence[Shard], cost: SequenceCost) -> Tiling | None:
    if len(shards) == 1:
        return None
    held = tuple(s for s in shards if s.length)
    return _tiling_of(held, cost) if len({s.rank for s in held}) > 1 else None


@lru_cache(maxsize=1024)  # the sequences of a microbatch: policies, tiles and times ask for the same ones
def _tiling_of(held: tuple[Shard, ...], cost: SequenceCost) -> Tiling:
    length = sum(s.length for s in held)
    candidates = []
    for number, (_, tiles) in enumerate(scheme_tiles(held, cost.shape)):
        work = attention_work(tiles, length, cost.shape)
        total = cost.attention_ns(sum(work.values()))
        beyond = {s.rank: cost.attention_ns(work.get(s.rank, 0)) for s in held}
        for s in held:
            beyond[s.rank] -= total * s.length // length
        candidates.append((max(beyond.values()), number, tiles, work, beyond))
    best: tuple[int, int] | None = None
    for bound, number, tiles, work, beyond in sorted(candidates, key=lambda candidate: candidate[0]):
        if best is not None and bound > best[0]:
            break  # with its exchange it is slower still
        volumes = exchange_volume(tiles, held, cost.shape)
        slowest = max(ns + cost.transfer_ns(volumes[rank].busier) for rank, ns in beyond.items())
        if best is None or (slowest, number) < best:
            best, tiling = (slowest, number), Tiling(tiles, work, volumes)
    return tiling


@dataclass(frozen=True)
class RankTime:
    """Where the time of a rank goes: work on its tokens, attention of sequences that live on it alone,
    attention of its tiles, exchanges.

    In each layer one exchange goes in and one out, each of a latency and the bytes of the busier direction of
    the rank's link.
    """

    linear_ns: int
    local_ns: int
    tiles_ns: int
    exchange_ns: int

    @property
    def total_ns(self) -> int:
        """All of it, one after the other."""
        return self.linear_ns + self.local_ns + self.tiles_ns + self.exchange_ns

    @property
    def overlapped_ns(self) -> int:
        """The least that overlap allows: exchanges hide behind local attention, and behind nothing else."""
        return self.linear_ns + self.tiles_ns + max(self.local_ns, self.exchange_ns)


def rank_times(layout: SequenceLayout, cost: SequenceCost) -> list[RankTime]:
    """Time every rank of a layout, with the tiles that `choose_tiles` gives.

    Ranks are taken to wait for each other once, at the end, not in every layer.
    """
    local, tiled = [0] * layout.num_ranks, [0] * layout.num_ranks
    volumes = [Volume()] * layout.num_ranks
    for shards, length in zip(layout.shards, layout.lengths, strict=True):
        tiling = _choose_tiling(shards, cost)
        if tiling is None:
            pairs = pairs_before(length, length, cost.shape)
            local[next((s.rank for s in shards if s.length), 0)] += pairs * cost.shape.heads
            continue
        for rank, work in tiling.work.items():
            tiled[rank] += work
        for rank, volume in tiling.volumes.items():
            volumes[rank] += volume
    return [
        RankTime(
            cost.linear_ns(layout.local_tokens(rank)),
            cost.attention_ns(local[rank]),
            cost.attention_ns(tiled[rank]),
            cost.transfer_ns(volumes[rank].busier) + cost.sharing_ns * (volumes[rank] != Volume()),
        )
        for rank in range(layout.num_ranks)
    ]
