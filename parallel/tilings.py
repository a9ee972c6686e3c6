"""Work and volumes of many tilings of one sequence at once, in arrays: what a search over schemes compares.

`parallel.tiles` says the same of one tiling, tile by tile.

Shapes: C tilings, R ranks numbered from 0 on, T tiles in all, S shards, K key/value heads.
"""

from collections.abc import Sequence
from dataclasses import astuple
from itertools import chain

import numpy as np
import numpy.typing as npt

from parallel.sequence import Shard
from parallel.tiles import AttentionShape, Tile, attention_work, exchange_volume

Table = npt.NDArray[np.int64]


def busier(volumes: Table) -> Table:
    """`Volume.busier` of volumes [..., 4]."""
    sides: Table = np.maximum(volumes[..., 0], volumes[..., 1]) + np.maximum(volumes[..., 2], volumes[..., 3])
    return sides


# long: one computation, over a dozen arrays of the same tiles and shards
def compare(
    tilings: Sequence[Sequence[Tile]],
    shards: Sequence[Shard],
    shape: AttentionShape,
    nodes: Sequence[int] = (),
) -> tuple[Table, Table, Table]:
    """Work [C, R] and volumes [C, R, 4] of C ways to tile one sequence over the ranks 0 … R - 1: what
    `attention_work` and `exchange_volume` say, of all at once, for a search that asks for many. The last are
    the volumes that go to or come from another node, where each rank is on one of `nodes` [R]: all, if these
    are not given.
    """
    num_cp_ranks = 1 + max(s.cp_rank for s in shards)
    if shape.window is not None:
        assert not nodes, "windowed layers belong to the cost of a token"
        return _compare_windows(tilings, shards, shape, num_cp_ranks)
    length = sum(s.length for s in shards)
    fields = chain.from_iterable(
        (number, t.cp_rank, t.head_start, t.head_count, t.row_start, t.row_count)
        for number, tiles in enumerate(tilings)
        for t in tiles
    )
    tiling, rank, head, heads, row, rows = np.fromiter(fields, np.int64).reshape(-1, 6).T
    holder, start, tokens = np.array([(s.cp_rank, s.start, s.length) for s in shards], np.int64).T
    stop, end, reader = row + rows, start + tokens, tiling * num_cp_ranks + rank
    readers = np.arange(len(tilings) * num_cp_ranks)  # [C · R]

    def of_ranks(values: Table, at: Table) -> Table:
        """Sum values by tiling and rank [C, R]."""
        out = np.zeros(len(readers), np.int64)
        np.add.at(out, at, values)
        return out.reshape(len(tilings), num_cp_ranks)

    def of_holders(values: Table) -> Table:
        """Sum values of shards [C, S] by tiling and rank [C, R]."""
        return values @ (holder[:, None] == np.arange(num_cp_ranks))

    pairs = (stop * (stop + 1) - row * (row + 1)) // 2 if shape.causal else rows * length
    work = of_ranks(heads * pairs, reader)
    # Without a window a rank reads the keys of each key/value head from the first on: up to reach [C · R, K],
    # of each shard so many, once.
    group, kv = shape.heads // shape.kv_heads, np.arange(shape.kv_heads)
    reads = (kv >= (head // group)[:, None]) & (kv <= ((head + heads - 1) // group)[:, None])
    reach = np.zeros((len(readers), shape.kv_heads), np.int64)
    np.maximum.at(reach, reader, reads * (stop[:, None] if shape.causal else length))
    # What is wanted of each shard, and by each reader, in head rows: queries by one tile in each head. Less
    # what is at hand, it travels.
    query_wanted = of_holders(np.broadcast_to(shape.heads * tokens, (len(tilings), len(shards))))
    query_wants = of_ranks(heads * rows, reader)
    key_wanted = of_holders(_read(reach.reshape(len(tilings), -1), start, end))
    key_wants = reach.reshape(len(tilings), num_cp_ranks, -1).sum(2)

    def volumes_between(places: Table) -> Table:
        """What travels between ranks at different `places` [R]."""
        at, shard = _matches(places[rank], places[holder])
        here = np.minimum(stop[at], end[shard]) - np.maximum(row[at], start[shard])
        here = heads[at] * np.maximum(here, 0)
        query_sent = query_wanted - of_ranks(here, tiling[at] * num_cp_ranks + holder[shard])
        query_received = query_wants - of_ranks(here, reader[at])
        at, shard = _matches(places[readers % num_cp_ranks], places[holder])
        read = np.clip(reach[at] - start[shard, None], 0, tokens[shard, None]).sum(1)
        key_sent = key_wanted - of_ranks(read, at - at % num_cp_ranks + holder[shard])
        key_received = key_wants - of_ranks(read, at)
        volumes = [query_sent + 2 * key_sent, query_received + 2 * key_received, query_received, query_sent]
        return np.stack(volumes, 2)

    every = volumes_between(np.arange(num_cp_ranks))
    return work, every, volumes_between(np.array(nodes)) if nodes else every


def _matches(left: Table, right: Table) -> tuple[Table, Table]:
    """Return all (i, j) with left[i] = right[j]."""
    order = np.argsort(right, kind="stable")
    first, after = (np.searchsorted(right[order], left, side) for side in ("left", "right"))
    count = after - first
    at = np.repeat(np.arange(len(left)), count)
    return at, order[np.arange(len(at)) + (first - np.cumsum(count) + count)[at]]


def _read(reach: Table, start: Table, end: Table) -> Table:
    """How often tokens [start, end) of shards are read [C, S], if C sets of readers [C, N] read the tokens
    before their `reach`.
    """
    ascending = np.sort(reach, axis=1)
    before = np.concatenate([np.zeros_like(reach[:, :1]), np.cumsum(ascending, axis=1)], axis=1)

    def up_to(token: Table) -> Table:
        count = np.stack([np.searchsorted(own, token) for own in ascending])  # that do not reach it [C, S]
        return np.take_along_axis(before, count, 1) + (reach.shape[1] - count) * token

    return up_to(end) - up_to(start)


def _compare_windows(
    tilings: Sequence[Sequence[Tile]], shards: Sequence[Shard], shape: AttentionShape, num_cp_ranks: int
) -> tuple[Table, Table, Table]:
    length = sum(s.length for s in shards)
    work = np.zeros((len(tilings), num_cp_ranks), np.int64)
    volumes = np.zeros((len(tilings), num_cp_ranks, 4), np.int64)
    for number, tiles in enumerate(tilings):
        for rank, pairs in attention_work(tiles, length, shape).items():
            work[number, rank] = pairs
        for rank, volume in exchange_volume(tiles, shards, shape).items():
            volumes[number, rank] = astuple(volume)
    return work, volumes, volumes
