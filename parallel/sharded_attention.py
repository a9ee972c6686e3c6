"""Attention over sequences of which some are shared among ranks, each among ranks of its own.

The idea: token by token, layers work on what a rank holds and communicate nothing; attention brings the
rows of shared sequences to the tiles that read them, and its outputs back to the tokens. Splitting heads
(Ulysses), moving keys and values (gather), both at once (hybrid) and balanced causal rows are one operation
that differs only in its tiles. Sequences that live on one rank are never exchanged: part of their attention
is computed while the exchange in is under way, the rest during the exchange out.

Invariant: outputs and gradients are those of every sequence attended whole on one rank. Whether anything is
exchanged follows from the tiles of all ranks, so all ranks agree.

Shapes: T tokens of this rank, N query heads, K key/value heads, H head size.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ops.attention import Packing, make_tile_packing, packed_attention
from ops.one_copy import ON_HOST
from ops.span import Span
from parallel.exchange import Prepared, finish, prepare, start
from parallel.held_pieces import EARLY, LATE, SHARED, num_during_incoming, pieces_of, runs_of
from parallel.sequence import SequenceLayout
from parallel.tile_plan import TileGroup, TilePlan, plan_tiles
from parallel.tiles import AttentionShape, Tile

Inside = Callable[[], AbstractContextManager[object]]
"""What kernels are called inside of."""


@dataclass(frozen=True)
class AttentionPlan:
    """All that attention on one rank needs to know of one microbatch, for every layer of one kind.

    `runs` divide the rank's `tokens` into neighbours that are SHARED, attended during the exchange in (EARLY)
    or out (LATE). `packings` are those of the tile groups, `exchanges` bring queries, keys and values to the
    tiles and outputs back. If nothing is shared anywhere, `tiles` is None and all tokens are EARLY.
    """

    tokens: int
    runs: tuple[tuple[int, int], ...]
    early: Packing
    late: Packing
    tiles: TilePlan | None = field(metadata=ON_HOST)
    packings: tuple[Packing, ...]
    exchanges: tuple[Prepared, ...]


def plan_attention(
    layout: SequenceLayout,
    tiles: Sequence[Sequence[Tile]],
    rank: int,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    causal: bool,
    window: int | None = None,
    tail: int = 0,
    seen: Sequence[int] = (),
    device: torch.device,
    dtype: torch.dtype,
) -> AttentionPlan:
    """Plan the attention of `rank` over the sequences of `layout`: once a microbatch, ahead of use.

    `tiles[s]` partition heads × rows of sequence s; they are empty for a sequence that lives on one rank. The
    rank's tokens are its shards in packed order and then `tail` padding tokens, a sequence of their own.
    `heads` and `kv_heads` are those of this rank's tensor-parallel share. A token sees those at most `window`
    tokens away, on both sides or, if causal, before it. `seen` are the tokens of each sequence whose keys and
    values passes before this one have left here: new ones follow them, and attend to them too.

    Raises:
        AssertionError: if tiles do not partition their sequence, or a sequence on several ranks has none.
    """
    tile_plan = plan_tiles(layout, tiles, rank, AttentionShape(heads, kv_heads, causal, window), head_dim)
    pieces = pieces_of(layout, tiles, rank)
    pieces.append((False, tail))
    before = [*(seen or (0,) * len(tiles)), 0]
    assert tile_plan is None or not any(before), "sequences that ranks share are not continued"
    local = [length for shared, length in pieces if not shared]
    spans = [
        Span(length, at + length, at)
        for (shared, length), at in zip(pieces, before, strict=True)
        if not shared
    ]
    num_early = len(local) if tile_plan is None else num_during_incoming(local, window, tile_plan)
    early, late = (
        make_tile_packing(part, causal, heads * head_dim, device, dtype, window)
        for part in (spans[:num_early], spans[num_early:])
    )
    groups = [
        make_tile_packing(group.spans, causal, group.heads * head_dim, device, dtype, window)
        for group in (tile_plan.groups if tile_plan else ())
    ]
    tokens = sum(length for _, length in pieces)
    exchanges = prepare((tile_plan.incoming, tile_plan.outgoing)) if tile_plan else ()
    runs = runs_of(pieces, num_early)
    return AttentionPlan(tokens, runs, early, late, tile_plan, tuple(groups), exchanges)


def sharded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    group: dist.ProcessGroup | None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    inside: Inside = nullcontext,
) -> torch.Tensor:
    """Attend within each sequence: query [T, N, H], key and value [T, K, H] of this rank → [T, N, H].
    `sinks` [N], the same on all ranks of the group, take part in the softmax of each head. What is computed
    here, exchanges apart, runs `inside`.

    If any sequence is shared, every rank of `group` calls it, also one without tokens, and if one runs the
    backward, all do. Otherwise it is `packed_attention` and needs no group.
    """
    assert query.shape[0] == plan.tokens, f"{query.shape[0]} tokens for a plan of {plan.tokens}"
    if plan.tiles is None:
        with inside():
            return packed_attention(query, key, value, plan.early, scale, sinks)
    assert group is not None, "shared sequences need a communicator"
    q, k, v = (divide(x, plan.runs) for x in (query, key, value))
    into, out = plan.exchanges
    incoming = start(into, (q[SHARED], k[SHARED], v[SHARED]), group)
    early = _attend_here(q[EARLY], k[EARLY], v[EARLY], plan.early, scale, sinks, inside)
    tensors = finish(incoming)
    with inside():
        tiles = _attend_tiles(tensors, plan, scale, sinks)
    outgoing = start(out, tiles, group)
    late = _attend_here(q[LATE], k[LATE], v[LATE], plan.late, scale, sinks, inside)
    (shared,) = finish(outgoing)
    return join((shared, early, late), plan.runs)


def _attend_here(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packing: Packing,
    scale: float | None,
    sinks: torch.Tensor | None,
    inside: Inside,
) -> torch.Tensor:
    """Without tokens nothing is launched: tiles alone keep all inputs in the graph."""
    if not packing.tokens:
        return q
    with inside():
        return packed_attention(q, k, v, packing, scale, sinks)


def _attend_tiles(
    tensors: Sequence[torch.Tensor], plan: AttentionPlan, scale: float | None, sinks: torch.Tensor | None
) -> list[torch.Tensor]:
    assert plan.tiles is not None
    num, groups = len(plan.packings), plan.tiles.groups
    own = [None if sinks is None else _sinks_of(group, sinks) for group in groups]
    by_group = zip(tensors[:num], tensors[num : 2 * num], tensors[2 * num :], plan.packings, own, strict=True)
    return [packed_attention(q, k, v, packing, scale, of) for q, k, v, packing, of in by_group]


def _sinks_of(group: TileGroup, sinks: torch.Tensor) -> torch.Tensor:
    """The sinks [T, N] of the rows of a group, whose tiles may be of different heads."""
    if not group.spans:
        return sinks[: group.heads].expand(0, -1)
    heads = (sinks[first : first + group.heads] for first in group.firsts)
    return torch.cat([of.expand(span.rows, -1) for of, span in zip(heads, group.spans, strict=True)])


def divide(x: torch.Tensor, runs: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """The tokens of each kind. split() and cat(): the backward of a slice adds a zero tensor of full size. A
    view would keep all that it is a view of for its backward, so what is attended here is copied. Where all
    tokens are shared, nothing is.
    """
    if _all_shared(runs):
        return [x, *(x.new_empty((0, *x.shape[1:])) for _ in (EARLY, LATE))]
    kinds: list[list[torch.Tensor]] = [[], [], []]
    for (kind, _), piece in zip(runs, x.split([length for _, length in runs]), strict=True):
        kinds[kind].append(piece)
    views = (kind == SHARED or not len(pieces[0]) for kind, pieces in enumerate(kinds))
    return [
        pieces[0] if view and len(pieces) == 1 else torch.cat(pieces)
        for view, pieces in zip(views, kinds, strict=True)
    ]


def join(kinds: Sequence[torch.Tensor], runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Undo `divide`."""
    if _all_shared(runs):
        return kinds[SHARED]
    pieces = [iter(x.split([n for kind, n in runs if kind == which])) for which, x in enumerate(kinds)]
    return torch.cat([next(pieces[kind]) for kind, _ in runs])


def _all_shared(runs: Sequence[tuple[int, int]]) -> bool:
    return all(kind == SHARED or not length for kind, length in runs)
