"""The gated delta rule over sequences of which some are shared among ranks: each gets whole heads of them.

A state goes through all tokens of its sequence, so rows cannot be divided: what several ranks hold is brought
to them by heads (as DeepSpeed-Ulysses does for attention; Jacobs et al., 2023), each head of keys with its
heads of values, in proportion to the tokens that a rank holds. Ranks beyond the heads compute nothing of the
sequence. The convolution runs after the exchange, so it sees whole sequences too. Sequences that live on one
rank are computed while the exchange in is under way.

Invariant: outputs and gradients are those of every sequence computed whole on one rank. Which sequences are
shared is what attention's tiles say, so all ranks agree on whether anything is exchanged.

Shapes: T tokens of this rank; the others as in `ops/delta.py`, G being the heads of this rank's
tensor-parallel share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist

from ops.delta import DeltaPacking, make_delta_packing, packed_delta
from ops.delta_shape import DeltaHeads, DeltaShape
from parallel.delta_tiles import delta_exchanges, delta_tiles
from parallel.exchange import Prepared, finish, prepare, start
from parallel.held_pieces import EARLY, SHARED, pieces_of, runs_of
from parallel.sequence import SequenceLayout
from parallel.sharded_attention import divide, join
from parallel.tiles import Tile


@dataclass(frozen=True)
class HeadShare:
    """Neighbouring rows of a tile group: whole sequences in heads [head, head + heads) of this rank's."""

    head: int
    heads: int
    packing: DeltaPacking


@dataclass(frozen=True)
class DeltaPlan:
    """All that the rule on one rank needs to know of one microbatch, for every layer that has it.

    `runs` divide the rank's tokens into neighbours that are shared and others, `local` packs the latter. If
    nothing is shared anywhere, there are no exchanges. Else `shares` are what the rank computes of the shared
    sequences, by the tensors that `incoming` brings.
    """

    heads: DeltaHeads
    runs: tuple[tuple[int, int], ...]
    local: DeltaPacking
    incoming: Prepared | None = None
    outgoing: Prepared | None = None
    shares: tuple[tuple[HeadShare, ...], ...] = ()


def plan_delta(
    layout: SequenceLayout,
    tiles: Sequence[Sequence[Tile]],
    rank: int,
    heads: DeltaHeads,
    tail: int,
) -> DeltaPlan:
    """Plan the rule of `rank` over the sequences of `layout`: once a microbatch, ahead of use.

    `tiles` are attention's: those of a sequence are empty if it lives on one rank. The rank's tokens are its
    shards in packed order and then `tail` padding tokens, a sequence of their own.
    """
    pieces = [*pieces_of(layout, tiles, rank), (False, tail)]
    local = [length for shared, length in pieces if not shared]
    runs = runs_of(pieces, len(local))
    packing = make_delta_packing(local, heads.shape.taps)
    exchanges = delta_exchanges(layout, tiles, rank, heads)
    if exchanges is None:
        return DeltaPlan(heads, runs, packing)
    shares = _shares(layout, delta_tiles(layout, tiles, heads.count), rank, heads.shape.taps)
    incoming, outgoing = prepare(exchanges)
    return DeltaPlan(heads, runs, packing, incoming, outgoing, shares)


def _shares(
    layout: SequenceLayout,
    tiles: Sequence[Sequence[Tile]],
    rank: int,
    taps: int,
) -> tuple[tuple[HeadShare, ...], ...]:
    """What `rank` computes, in the order of the plan's groups: tiles of equally many heads lie in one tensor,
    neighbours in which of the same heads are one share.
    """
    groups: dict[int, list[tuple[int, int]]] = {}
    for sequence, length in zip(tiles, layout.lengths, strict=True):
        for tile in sequence:
            if tile.cp_rank == rank and tile.row_count:
                groups.setdefault(tile.head_count, []).append((tile.head_start, length))
    return tuple(
        tuple(
            HeadShare(head, heads, make_delta_packing([length for _, length in same], taps))
            for head, same in groupby(members, lambda member: member[0])
        )
        # There is always a group, if an empty one.
        for heads, members in (groups or {1: [(0, 0)]}).items()
    )


def sharded_delta(
    x: torch.Tensor,
    conv: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    plan: DeltaPlan,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Apply the rule within each sequence: x [T, G, width] of this rank → [T, G, R · V].

    If any sequence is shared, every rank of `group` calls it, also one without tokens, and if one runs the
    backward, all do. Otherwise it is `packed_delta` and needs no group.
    """
    weights, shape = (conv, a_log, dt_bias), plan.heads.shape
    if plan.incoming is None or plan.outgoing is None:
        return packed_delta(x, *weights, plan.local, shape)
    assert group is not None, "shared sequences need a communicator"
    kinds = divide(x, plan.runs)
    incoming = start(plan.incoming, (kinds[SHARED],), group)
    local = packed_delta(kinds[EARLY], *weights, plan.local, shape)
    tensors = [
        torch.cat(
            [_of_share(piece, weights, share, shape) for piece, share in zip(pieces, shares, strict=True)]
        )
        for pieces, shares in (
            (tensor.split([share.packing.tokens for share in shares]), shares)
            for tensor, shares in zip(finish(incoming), plan.shares, strict=True)
        )
    ]
    (shared,) = finish(start(plan.outgoing, tensors, group))
    return join((shared, local, local[:0]), plan.runs)


def _of_share(
    x: torch.Tensor, weights: Sequence[torch.Tensor], share: HeadShare, shape: DeltaShape
) -> torch.Tensor:
    own = (weight.narrow(0, share.head, share.heads) for weight in weights)
    conv, a_log, dt_bias = own
    return packed_delta(x, conv, a_log, dt_bias, share.packing, shape)
