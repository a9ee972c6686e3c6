"""Who computes which part of a sequence's attention, apart from where its tokens live.

Shards say where the tokens of a sequence live; tiles say which rank attends for which query heads and rows.
What travels follows from the two: queries, keys and values to the tiles that need them, outputs back to the
tokens. So every scheme of sequence parallelism is a way to make tiles, and all of them are exact.

Invariant: the tiles of a sequence partition its heads × rows, whatever the degree. Every scheme gives a rank
work in proportion to the tokens it holds, as closely as whole heads (Ulysses, hybrid) or, where rows are
unequal work, its own rows (gather) allow.

A head row is one head of one token: H numbers. Volumes are counted in head rows for one layer's forward
pass; the backward pass moves as much.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isqrt

from parallel.sequence import Shard

Run = tuple[int, int, int, int]
"""Tokens [start, stop) of some heads that a rank wants: (rank, heads, start, stop)."""


@dataclass(frozen=True)
class Tile:
    """Query rows [row_start, row_start + row_count) of heads [head_start, head_start + head_count), computed
    by `cp_rank` of the pool. Key/value heads and, if causal, the context follow from these.
    """

    cp_rank: int
    head_start: int
    head_count: int
    row_start: int
    row_count: int


@dataclass(frozen=True)
class AttentionShape:
    """Heads N, key/value heads K (K divides N), and which keys a row sees.

    Under `causal` it sees none after itself, under a `window` none further away than that many tokens.
    """

    heads: int
    kv_heads: int
    causal: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0, f"{self.kv_heads} kv heads do not divide {self.heads} heads"
        assert self.window is None or self.window >= 0, f"window {self.window}: a row sees itself"


def context(row_start: int, row_count: int, length: int, shape: AttentionShape) -> tuple[int, int]:
    """First key that any of the rows sees, and the end of those that they see."""
    reach = length if shape.window is None else shape.window
    row_stop = row_start + row_count
    return max(0, row_start - reach), row_stop if shape.causal else min(length, row_stop + reach)


def pairs_before(row: int, length: int, shape: AttentionShape) -> int:
    """(Query, key) pairs of rows [0, row) of one head: the unit of attention work."""
    if shape.window is None:
        return row * (row + 1) // 2 if shape.causal else row * length
    pairs = row + _sum_capped(row, shape.window)
    if not shape.causal:
        pairs += _sum_capped(length, shape.window) - _sum_capped(length - row, shape.window)
    return pairs


def _sum_capped(count: int, cap: int) -> int:
    """Sum of min(i, cap) over i in [0, count)."""
    if count <= cap + 1:
        return count * (count - 1) // 2
    return cap * (cap + 1) // 2 + (count - cap - 1) * cap


def ulysses_tiles(shards: Sequence[Shard], shape: AttentionShape) -> tuple[Tile, ...]:
    """Whole heads over all rows (DeepSpeed-Ulysses; Jacobs et al., 2023). Key/value heads follow
    their query heads, replicated where they are fewer than ranks; ranks beyond the heads compute nothing.
    """
    return _blocks(_by_cp_rank(shards), shape, len(shards), _whole_heads)


def gather_tiles(shards: Sequence[Shard], shape: AttentionShape) -> tuple[Tile, ...]:
    """All heads of the rank's own rows: queries stay, keys and values travel (Llama 3; Grattafiori et al.,
    2024, section 3.3.2). Causal rows are unequal work.
    """
    return tuple(Tile(s.cp_rank, 0, shape.heads, s.start, s.length) for s in shards if s.length)


def hybrid_tiles(shards: Sequence[Shard], shape: AttentionShape, head_ways: int) -> tuple[Tile, ...]:
    """Blocks of `head_ways` neighbouring ranks: rows, of equal work, over the blocks and heads within each
    (USP; Fang and Zhao, 2024).
    """
    return _blocks(shards, shape, head_ways, _whole_heads)


def balanced_tiles(shards: Sequence[Shard], shape: AttentionShape) -> tuple[Tile, ...]:
    """The work of all heads, one after the other, as one line cut in proportion: a head at a cut is shared by
    rows, so heads need not be divisible.
    """
    return _blocks(_by_cp_rank(shards), shape, len(shards), _head_line)


def rows_tiles(shards: Sequence[Shard], shape: AttentionShape) -> tuple[Tile, ...]:
    """All heads of consecutive rows of equal work: where all rows are equal work, the rank's own."""
    return _blocks(shards, shape, 1, _whole_heads)


def node_tiles(
    shards: Sequence[Shard], shape: AttentionShape, nodes: Sequence[int], *, whole: bool
) -> tuple[Tile, ...]:
    """The rows that each node holds, divided over its ranks by `whole` heads, or as `balanced_tiles` does:
    queries and outputs stay on the node, and from other ones come keys and values of a rank's own heads
    alone. CP rank m is on `nodes[m]`. Causal rows are unequal work, unless nodes hold as many early ones as
    late ones.
    """
    tiles, length, split = list[Tile](), sum(s.length for s in shards), _whole_heads if whole else _head_line
    for node in sorted(set(nodes)):
        own = [s for s in shards if s.length and nodes[s.cp_rank] == node]
        edges = [s.start for s in own], [s.start + s.length for s in own]
        starts = [start for start in edges[0] if start not in edges[1]]
        stops = [stop for stop in edges[1] if stop not in edges[0]]
        ranks = _by_cp_rank(own)
        for start, stop in zip(starts, stops, strict=True):
            tiles += split(ranks, start, stop, length, shape)
    return tuple(tile for tile in tiles if tile.head_count and tile.row_count)


def _by_cp_rank(shards: Sequence[Shard]) -> list[Shard]:
    """One shard for all that each cp rank holds, as if it were one run of tokens."""
    tokens: dict[int, int] = defaultdict(int)
    for shard in shards:
        tokens[shard.cp_rank] += shard.length
    starts = accumulate(tokens.values(), initial=0)
    return [
        Shard(cp_rank, start, length)
        for start, (cp_rank, length) in zip(starts, tokens.items(), strict=False)
    ]


def _blocks(
    shards: Sequence[Shard],
    shape: AttentionShape,
    size: int,
    split: Callable[[Sequence[Shard], int, int, int, AttentionShape], Iterator[Tile]],
) -> tuple[Tile, ...]:
    """Consecutive rows for each block of `size` shards, which `split` divides within the block."""
    held = [s for s in shards if s.length]
    length = sum(s.length for s in held)
    blocks = [held[at : at + size] for at in range(0, len(held), size)]
    work = pairs_before(length, length, shape)
    # The work before a block is to all of it as the tokens before it are to the length.
    cuts = [_row_at(work * block[0].start // length, length, shape) for block in blocks]
    return tuple(
        tile
        for block, (start, stop) in zip(blocks, pairwise([*cuts, length]), strict=True)
        for tile in split(block, start, stop, length, shape)
        if tile.head_count and tile.row_count
    )


def _row_at(pairs: int, length: int, shape: AttentionShape) -> int:
    """The row before which there are most nearly `pairs` pairs of one head."""
    if shape.window is None and not shape.causal:
        return _nearest(pairs, length)
    low, high = 0, length
    if shape.window is None:
        low = isqrt(2 * pairs)  # row·(row + 1) / 2 reaches `pairs` here or one row on
        high = min(length, low + 1)
    row = bisect_left(range(length), pairs, low, high, key=lambda r: pairs_before(r, length, shape))
    if row == 0:
        return 0
    before, after = pairs_before(row - 1, length, shape), pairs_before(row, length, shape)
    return row - 1 if pairs - before < after - pairs else row


def _nearest(value: int, by: int) -> int:
    return (2 * value + by) // (2 * by)


def _whole_heads(
    block: Sequence[Shard], start: int, stop: int, length: int, shape: AttentionShape
) -> Iterator[Tile]:
    first, tokens = block[0].start, sum(s.length for s in block)
    head = 0
    for shard in block:
        end = _nearest(shape.heads * (shard.start + shard.length - first), tokens)
        if end > head:
            yield Tile(shard.cp_rank, head, end - head, start, stop - start)
        head = end


def _head_line(
    block: Sequence[Shard], start: int, stop: int, length: int, shape: AttentionShape
) -> Iterator[Tile]:
    """Cut the line "rows of head 0, rows of head 1, …" in proportion to the tokens of the block."""
    first, tokens = block[0].start, sum(s.length for s in block)
    above = pairs_before(start, length, shape)
    work = pairs_before(stop, length, shape) - above
    head, row = 0, start
    for shard in block:
        after = shard.start + shard.length - first
        end, rest = divmod(shape.heads * work * after // tokens, work)
        end_row = _row_at(above + rest, length, shape)
        if head == end:
            yield Tile(shard.cp_rank, head, 1, row, end_row - row)
        else:
            whole = head + (row > start)
            if row > start:
                yield Tile(shard.cp_rank, head, 1, row, stop - row)
            if end > whole:
                yield Tile(shard.cp_rank, whole, end - whole, start, stop - start)
            if end_row > start:
                yield Tile(shard.cp_rank, end, 1, start, end_row - start)
        head, row = end, end_row


def check_tiles(tiles: Sequence[Tile], length: int, shape: AttentionShape) -> None:
    """Assert that the tiles partition heads × rows of a sequence of `length` tokens."""
    runs: dict[int, list[tuple[int, int]]] = {head: [] for head in range(shape.heads)}
    for tile in tiles:
        assert tile.head_count > 0 < tile.row_count, f"{tile} is empty"
        assert 0 <= tile.head_start <= shape.heads - tile.head_count, f"{tile}: there are {shape.heads} heads"
        for head in range(tile.head_start, tile.head_start + tile.head_count):
            runs[head].append((tile.row_start, tile.row_start + tile.row_count))
    for head, rows in runs.items():
        covered = 0
        for start, stop in sorted(rows):
            assert start == covered, f"head {head}: row {min(start, covered)} is not covered once"
            covered = stop
        assert covered == length, f"head {head}: {covered} rows are covered, not {length}"


def attention_work(tiles: Sequence[Tile], length: int, shape: AttentionShape) -> dict[int, int]:
    """(Query, key) pairs × heads that each rank computes; ranks without a tile are left out."""
    work: dict[int, int] = defaultdict(int)
    for t in tiles:
        pairs = pairs_before(t.row_start + t.row_count, length, shape)
        work[t.cp_rank] += (pairs - pairs_before(t.row_start, length, shape)) * t.head_count
    return dict(work)


@dataclass(frozen=True)
class Volume:
    """Head rows that one rank sends and receives in a layer's forward pass: queries, keys and values to the
    tiles ("in"), outputs back to the tokens ("out"). What stays on its rank is not counted.
    """

    sent_in: int = 0
    received_in: int = 0
    sent_out: int = 0
    received_out: int = 0

    @property
    def busier(self) -> int:
        """Head rows of the busier direction of the rank's link on the way in, and on the way out."""
        return max(self.sent_in, self.received_in) + max(self.sent_out, self.received_out)


def exchange_volume(
    tiles: Sequence[Tile], shards: Sequence[Shard], shape: AttentionShape
) -> dict[int, Volume]:
    """Volume of every rank that holds tokens or tiles of a sequence.

    A row of a key/value head travels once to each rank that needs it, however many tiles there read it.
    """
    length = sum(s.length for s in shards)
    ranks = sorted({s.cp_rank for s in shards} | {t.cp_rank for t in tiles})
    queries = [(t.cp_rank, t.head_count, t.row_start, t.row_start + t.row_count) for t in tiles]
    # The tiles are a partition: every token's query is wanted once by each head.
    query_sent, query_received = _crossing(queries, shards, ranks, shape.heads)
    keys = _wanted_keys(tiles, length, shape)
    whole = all(stop - start == length for _, _, start, stop in keys)
    key_sent, key_received = _crossing(keys, shards, ranks, sum(run[1] for run in keys) if whole else None)
    return {
        rank: Volume(
            query_sent[rank] + 2 * key_sent[rank],
            query_received[rank] + 2 * key_received[rank],
            # An output takes its query's way back.
            query_received[rank],
            query_sent[rank],
        )
        for rank in ranks
    }


def _wanted_keys(tiles: Sequence[Tile], length: int, shape: AttentionShape) -> list[Run]:
    """Keys that the tiles of each rank read, in key/value heads, none named twice."""
    group = shape.heads // shape.kv_heads
    read: dict[int, list[tuple[tuple[int, int], tuple[int, int]]]] = defaultdict(list)
    for t in tiles:
        heads = t.head_start // group, (t.head_start + t.head_count - 1) // group + 1
        read[t.cp_rank].append((heads, context(t.row_start, t.row_count, length, shape)))
    wanted: list[Run] = []
    for rank, needs in read.items():
        if len({keys for _, keys in needs}) == 1:
            num_heads = sum(stop - first for first, stop in _union([heads for heads, _ in needs]))
            wanted.append((rank, num_heads, *needs[0][1]))
            continue
        of_head: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for heads, keys in needs:
            for head in range(*heads):
                of_head[head].append(keys)
        wanted += [(rank, 1, *keys) for runs in of_head.values() for keys in _union(runs)]
    return wanted


def _union(runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Disjoint runs that cover the same."""
    covered = 0
    for start, stop in sorted(runs):
        if stop > covered:
            yield max(start, covered), stop
            covered = stop


def _crossing(
    wanted: Sequence[Run], shards: Sequence[Shard], ranks: Sequence[int], everywhere: int | None
) -> tuple[dict[int, int], dict[int, int]]:
    """Head rows that each rank sends and receives when what is wanted comes from where the tokens live.

    `everywhere` counts the heads in which a token is wanted, over all ranks, if that is the same for all.
    """
    sent, received = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    own: dict[int, list[tuple[int, int]]] = {rank: [] for rank in ranks}
    up_to = _demand(wanted) if everywhere is None else None
    for s in shards:
        stop = s.start + s.length
        own[s.cp_rank].append((s.start, stop))
        sent[s.cp_rank] += up_to(stop) - up_to(s.start) if up_to else (everywhere or 0) * s.length
    for rank, heads, start, stop in wanted:
        received[rank] += heads * (stop - start)
        for first, end in own[rank]:
            here = heads * (min(stop, end) - max(start, first))
            if here > 0:
                received[rank] -= here
                sent[rank] -= here
    return sent, received


def _demand(wanted: Sequence[Run]) -> Callable[[int], int]:
    """Return how many head rows are wanted of the tokens before a place in the sequence."""
    change: dict[int, int] = defaultdict(int)
    for _, heads, start, stop in wanted:
        change[start] += heads
        change[stop] -= heads
    edges = sorted(change)
    before, after = [0], [0]  # head rows wanted before each edge, heads wanted from it on
    for edge, following in pairwise([*edges, edges[-1]]):
        after.append(after[-1] + change[edge])
        before.append(before[-1] + after[-1] * (following - edge))

    def up_to(token: int) -> int:
        at = bisect_right(edges, token)
        return before[at - 1] + after[at] * (token - edges[at - 1]) if at else 0

    return up_to
