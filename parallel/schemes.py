"""Which tiles a shared sequence gets, and how long every rank of a layout takes: arithmetic on exact volumes.

A cost is an integer number of nanoseconds of one forward pass through all layers of a component.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np

from parallel.cluster import Link
from parallel.costs import CostTable
from parallel.sequence import SequenceLayout, Shard
from parallel.tiles import (
    AttentionShape,
    Tile,
    balanced_tiles,
    check_tiles,
    gather_tiles,
    hybrid_tiles,
    node_tiles,
    pairs_before,
    rows_tiles,
    ulysses_tiles,
)
from parallel.tilings import Table, busier, compare

_FS_PER_NS = 1_000_000


@dataclass(frozen=True)
class SequenceCost:
    """What sequences of one component cost.

    `token_fs` is the work of a token outside attention and `pair_fs` that of a (query, key) pair in all
    heads, in femtoseconds for all layers. `layers` of them exchange, once in and once out; a head row has
    `head_bytes`. Layers whose attention never leaves a rank, such as those of windows that no cut divides,
    belong to `token_fs`.

    CP ranks exchange with those of other nodes over `link`, and with those of their own, of which each
    cp rank's is given by number in `nodes`, over `inside`. Without nodes there is one link.
    """

    shape: AttentionShape
    layers: int
    token_fs: int
    pair_fs: int
    head_bytes: int
    link: Link
    inside: Link | None = None
    nodes: tuple[int, ...] = ()

    @cached_property
    def far(self) -> "SequenceCost":
        """The cost of sequences whose cp ranks are on several nodes, whichever these are."""
        return replace(self, nodes=())

    @cached_property
    def near(self) -> "SequenceCost":
        """The cost of sequences whose cp ranks are on one node."""
        return replace(self, link=self.inside or self.link, inside=None, nodes=())

    def over(self, cp_ranks: Collection[int]) -> "SequenceCost":
        """The cost of a sequence that these cp ranks share."""
        if not self.nodes:
            return self
        return self.near if len({self.nodes[cp_rank] for cp_rank in cp_ranks}) == 1 else self.far

    def places(self, cp_ranks: Collection[int]) -> tuple[int, ...]:
        """The node of each of some cp ranks, numbered from 0 on; () where one link serves all: they are on
        one node, or each on its own.
        """
        numbers: dict[int, int] = {}
        found = [numbers.setdefault(self.nodes[m], len(numbers)) for m in cp_ranks] if self.nodes else []
        return tuple(found) if 1 < len(numbers) < len(found) else ()

    def linear_ns(self, tokens: int) -> int:
        """Work on tokens outside attention."""
        return tokens * self.token_fs // _FS_PER_NS

    def attention_ns(self, work: int) -> int:
        """Attention over `work` pairs × heads in each layer."""
        return work * self.pair_fs // (self.shape.heads * _FS_PER_NS)

    def transfer_ns(self, head_rows: int, inside: int = 0) -> int:
        """What links take to carry `head_rows` in each layer, and so many more `inside` a node meanwhile,
        latency apart.
        """
        far, near = (self.layers * rows * self.head_bytes for rows in (head_rows, inside))
        return max(self.link.bytes_ns(far), (self.inside or self.link).bytes_ns(near))

    @property
    def sharing_ns(self) -> int:
        """What a rank pays for taking part in exchanges at all: the latency of two in each layer."""
        return 2 * self.layers * self.link.latency_ns


def sequence_cost(
    table: CostTable,
    part: str,
    shape: AttentionShape,
    head_bytes: int,
    link: Link,
    inside: Link | None = None,
    nodes: tuple[int, ...] = (),
) -> SequenceCost:
    """Take the costs of `part` from a table; `head_bytes` is H times the bytes of a number, and sequences are
    exchanged over `link`, or `inside` those `nodes` whose cp ranks share one alone.
    """
    work = table.parts[part]
    forward = work.laws.forward
    # The table times a causal sequence by its square, of which it has half the pairs.
    pair_fs = forward.square_fs * (2 if shape.causal else 1)
    return SequenceCost(shape, work.exchanges, forward.token_fs, pair_fs, head_bytes, link, inside, nodes)


def scheme_tiles(
    shards: Sequence[Shard], shape: AttentionShape, nodes: Sequence[int] = ()
) -> Iterator[tuple[str, tuple[Tile, ...]]]:
    """Yield the schemes worth trying and their tiles, in the order that decides ties; cp ranks are on
    `nodes`, if on several.

    The head ways of a hybrid divide the degree, so that its blocks are equal, or are the key/value heads. A
    sequence of which cp ranks hold several runs has no neighbours to make blocks of.
    """
    degree = len(shards)
    yield "ulysses", ulysses_tiles(shards, shape)
    yield "gather", gather_tiles(shards, shape)
    if nodes:
        yield "nodes", node_tiles(shards, shape, nodes, whole=True)
        yield "balanced nodes", node_tiles(shards, shape, nodes, whole=False)
    if degree > len({shard.cp_rank for shard in shards}):
        yield "balanced", balanced_tiles(shards, shape)
        return
    for ways in range(2, degree):
        if degree % ways == 0 or shape.kv_heads == ways:
            yield f"hybrid{ways}", hybrid_tiles(shards, shape, ways)
    yield "balanced", balanced_tiles(shards, shape)
    if shape.causal or shape.window is not None:
        yield "rows", rows_tiles(shards, shape)


@dataclass(frozen=True)
class Tiling:
    """Tiles of a sequence over the ranks 0 … R - 1, with each one's attention work [R] and volume [R, 4], and
    what of that leaves its node, which is all where there is one link.
    """

    tiles: tuple[Tile, ...]
    work: Table
    volumes: Table
    leaving: Table


def layer_exchange_ns(layout: SequenceLayout, cost: SequenceCost) -> tuple[int, ...]:
    """Time that each rank's exchanges take in the forward pass of one layer, with the tiles that
    `choose_tiles` gives; empty if nothing is shared.
    """
    exchanges = Exchanges(cost, layout.num_cp_ranks)
    for shards in layout.shards:
        if found := choose_tiling(shards, cost):
            exchanges.add(*found)
    spent = exchanges.ns(1)
    return tuple(spent) if any(spent) else ()


class Exchanges:
    """What `num_cp_ranks` ranks exchange of the sequences that they share, by the link that it goes over:
    that inside a node, or that between nodes.

    Both work at the same time, so a rank waits for the slower one.
    """

    def __init__(self, cost: SequenceCost, num_cp_ranks: int) -> None:
        self.cost, self.num_cp_ranks = cost, num_cp_ranks
        self.volumes: dict[Link, Table] = {}

    def add(self, ranks: list[int], tiling: "Tiling") -> None:
        """Add a sequence that is tiled over `ranks`."""
        cost = self.cost.over(ranks)
        self._add(cost.link, ranks, tiling.leaving)
        if cost.inside is not None:
            self._add(cost.inside, ranks, tiling.volumes - tiling.leaving)

    def _add(self, link: Link, ranks: list[int], volumes: Table) -> None:
        own = self.volumes.setdefault(link, np.zeros((self.num_cp_ranks, 4), np.int64))
        own[ranks] += volumes

    def ns(self, layers: int) -> list[int]:
        """Time of each rank's exchanges in the forward pass of so many layers: in each of them one goes in
        and one out, each of a latency and the bytes of the busier direction of the rank's link.
        """
        longest = [0] * self.num_cp_ranks
        for link, volumes in self.volumes.items():
            rows, shares = busier(volumes).tolist(), (volumes.sum(1) > 0).tolist()
            for rank, (count, takes_part) in enumerate(zip(rows, shares, strict=True)):
                spent = link.bytes_ns(layers * count * self.cost.head_bytes)
                longest[rank] = max(longest[rank], spent + 2 * layers * link.latency_ns * takes_part)
        return longest


def choose_tiles(shards: Sequence[Shard], cost: SequenceCost) -> tuple[Tile, ...]:
    """Return the tiles of the scheme that costs its slowest rank the least, or none if the sequence lives on
    one rank.

    What a scheme costs a rank is the time of its attention and exchange, less the attention that its share of
    the tokens stands for. A rank that has other work got fewer tokens and shall compute as much less, so
    every rank is compared with its own share. Where all shares are equal, the slowest rank is the one that
    takes longest.
    """
    found = choose_tiling(shards, cost)
    if found is None:
        return ()
    ranks, tiling = found
    tiles = tuple(
        Tile(ranks[t.cp_rank], t.head_start, t.head_count, t.row_start, t.row_count) for t in tiling.tiles
    )
    check_tiles(tiles, sum(s.length for s in shards), cost.shape)
    return tiles


def choose_tiling(shards: Sequence[Shard], cost: SequenceCost) -> tuple[list[int], Tiling] | None:
    """Return the ranks that hold a sequence, in its order, and its tiling over their numbers; None if that is
    one rank.
    """
    if len(shards) == 1:
        return None
    held = [s for s in shards if s.length]
    numbers: dict[int, int] = {}
    pieces = tuple((numbers.setdefault(s.cp_rank, len(numbers)), s.length) for s in held)
    if len(numbers) == 1:
        return None
    return list(numbers), _tiling_of(pieces, cost.over(numbers), cost.places(numbers))


# Policies, tiles and times ask for the same sequences, and other ranks may share one that is cut alike.
@lru_cache(maxsize=4096)
def _tiling_of(pieces: tuple[tuple[int, int], ...], cost: SequenceCost, nodes: tuple[int, ...]) -> Tiling:
    """The best tiling of a sequence that is cut into `pieces`: (rank, tokens), ranks numbered from 0 on, each
    on one of `nodes`, if there are several.
    """
    ends = [0, *accumulate(tokens for _, tokens in pieces)]
    shards = [Shard(rank, start, tokens) for (rank, tokens), start in zip(pieces, ends, strict=False)]
    candidates = [tiles for _, tiles in scheme_tiles(shards, cost.shape, nodes)]
    works, volumes, leaving = compare(candidates, shards, cost.shape, nodes)
    total = cost.attention_ns(int(works[0].sum()))
    slowest = []
    for work, spent in zip(works.tolist(), transfers_ns(volumes, leaving, cost), strict=True):
        beyond = [cost.attention_ns(w) + ns for w, ns in zip(work, spent, strict=True)]
        for shard in shards:
            beyond[shard.cp_rank] -= total * shard.length // ends[-1]
        slowest.append(max(beyond))
    chosen = slowest.index(min(slowest))
    return Tiling(candidates[chosen], works[chosen], volumes[chosen], leaving[chosen])


def transfers_ns(volumes: Table, leaving: Table, cost: SequenceCost) -> list[list[int]]:
    """What links take to carry each rank's volumes [C, R, 4], of which so much is `leaving` its node."""
    far, near = busier(leaving).tolist(), busier(volumes - leaving).tolist()
    return [list(map(cost.transfer_ns, *of)) for of in zip(far, near, strict=True)]


@dataclass(frozen=True)
class RankTime:
    """Where the time of a rank goes: work on its tokens, attention of sequences that live on it alone,
    attention of its tiles, exchanges (`Exchanges.ns`).
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
    local = [0] * layout.num_cp_ranks
    tiled = np.zeros(layout.num_cp_ranks, np.int64)
    exchanges = Exchanges(cost, layout.num_cp_ranks)
    for shards in layout.shards:
        found = choose_tiling(shards, cost)
        if found is None:
            length = sum(s.length for s in shards)
            pairs = pairs_before(length, length, cost.shape)
            local[next((s.cp_rank for s in shards if s.length), 0)] += pairs * cost.shape.heads
            continue
        ranks, tiling = found
        tiled[ranks] += tiling.work
        exchanges.add(ranks, tiling)
    exchanged = exchanges.ns(cost.layers)
    return [
        RankTime(
            cost.linear_ns(layout.local_tokens(rank)),
            cost.attention_ns(alone),
            cost.attention_ns(work),
            exchanged[rank],
        )
        for rank, (alone, work) in enumerate(zip(local, tiled.tolist(), strict=True))
    ]
