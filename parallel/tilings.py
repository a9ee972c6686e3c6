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
    num_members = 1 + max(s.member for s in shards)
    if shape.window is not None:
        assert not nodes, "windowed layers belong to the cost of a token"
        return _compare_windows(tilings, shards, shape, num_members)
    length = sum(s.length for s in shards)
    fields = chain.from_iterable(
        (number, t.member, t.head_start, t.head_count, t.row_start, t.row_count)
        for number, tiles in enumerate(tilings)
        for t in tiles
    )
    tiling, rank, head, heads, row, rows = np.fromiter(fields, np.int64).reshape(-1, 6).T
    holder, start, tokens = np.array([(s.member, s.start, s.length) for s in shards], np.int64).T
    holds = holder[:, None] == np.arange(num_members)  # [S, R]
    stop, reader = row + rows, tiling * num_members + rank

    def of_reader(values: Table) -> Table:
        out = np.zeros(len(tilings) * num_members, np.int64)
        np.add.at(out, reader, values)
        return out.reshape(len(tilings), num_members)

    pairs = (stop * (stop + 1) - row * (row + 1)) // 2 if shape.causal else rows * length
    work = of_reader(heads * pairs)
    # Query rows of a tile that each shard holds [T, S], in head rows.
    here = np.minimum(stop[:, None], start + tokens) - np.maximum(row[:, None], start)
    queries = heads[:, None] * np.maximum(here, 0)
    # Without a window a rank reads the keys of each key/value head from the first on: up to reach [C, R, K],
    # of each shard so many [C, R, S], once.
    group, kv = shape.heads // shape.kv_heads, np.arange(shape.kv_heads)
    reads = (kv >= (head // group)[:, None]) & (kv <= ((head + heads - 1) // group)[:, None])
    ends = np.zeros((len(tilings) * num_members, shape.kv_heads), np.int64)
    np.maximum.at(ends, reader, reads * (stop[:, None] if shape.causal else length))
    reach = ends.reshape(len(tilings), num_members, shape.kv_heads, 1)
    keys = np.clip(reach - start, 0, tokens).sum(2)

    def volumes_to(others: Table) -> Table:
        """What ranks exchange with `others` [R, R], true of those that count."""
        moved = queries * others[rank][:, holder]
        sent = np.zeros((len(tilings), len(holder)), np.int64)
        np.add.at(sent, tiling, moved)
        query_sent, query_received = sent @ holds, of_reader(moved.sum(1))
        read = keys * others[:, holder]
        key_sent, key_received = read.sum(1) @ holds, read.sum(2)
        volumes = [query_sent + 2 * key_sent, query_received + 2 * key_received, query_received, query_sent]
        return np.stack(volumes, 2)

    of_node = np.array(nodes or range(num_members))
    every = volumes_to(~np.eye(num_members, dtype=bool))
    return work, every, volumes_to(of_node[:, None] != of_node) if nodes else every


def _compare_windows(
    tilings: Sequence[Sequence[Tile]], shards: Sequence[Shard], shape: AttentionShape, num_members: int
) -> tuple[Table, Table, Table]:
    length = sum(s.length for s in shards)
    work = np.zeros((len(tilings), num_members), np.int64)
    volumes = np.zeros((len(tilings), num_members, 4), np.int64)
    for number, tiles in enumerate(tilings):
        for rank, pairs in attention_work(tiles, length, shape).items():
            work[number, rank] = pairs
        for rank, volume in exchange_volume(tiles, shards, shape).items():
            volumes[number, rank] = astuple(volume)
    return work, volumes, volumes
