"""The gated delta rule of shared sequences, over real ranks, against every sequence whole on one."""

import random
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

from ops.delta import make_delta_packing, packed_delta
from ops.delta_shape import DeltaHeads, DeltaShape
from parallel.delta_tiles import delta_exchanges
from parallel.sequence import SequenceLayout, Shard
from parallel.sharded_delta import plan_delta, sharded_delta
from parallel.tiles import AttentionShape, gather_tiles

SHAPE = DeltaShape(key_dim=4, values=2, value_dim=3, taps=4)
TAIL = 2


def layout_of(seed: int, world: int) -> SequenceLayout:
    """Sequences on one rank and on several, cut unevenly, in any order of ranks."""
    rng, shards = random.Random(seed), []
    for _ in range(6):
        length, degree = rng.choice([1, 5, 70, 131]), rng.randint(1, world)
        holders = rng.sample(range(world), min(degree, length))
        edges = [0, *sorted(rng.sample(range(1, length), len(holders) - 1)), length]
        shards.append(tuple(Shard(r, a, b - a) for r, (a, b) in zip(holders, pairwise(edges), strict=True)))
    return SequenceLayout(world, tuple(shards))


def tiles_of(layout: SequenceLayout):
    shape = AttentionShape(4, 2, causal=True)
    return tuple(gather_tiles(of, shape) if len(of) > 1 else () for of in layout.shards)


def drawn(tokens: int, heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (tokens, heads, SHAPE.width), (heads, SHAPE.channels, SHAPE.taps), *[(heads, SHAPE.values)] * 2
    return [torch.randn(*of, generator=generator, dtype=torch.float64) for of in sizes]


def parts(x: torch.Tensor, layout: SequenceLayout, rank: int) -> torch.Tensor:
    """The tokens of one rank, in packed order."""
    own = [
        of[shard.start : shard.start + shard.length]
        for of, shards in zip(x.split(layout.lengths), layout.shards, strict=True)
        for shard in shards
        if shard.cp_rank == rank
    ]
    return torch.cat([*own, torch.zeros(TAIL, *x.shape[1:], dtype=x.dtype)])


def computed(rank: int, seed: int, heads: int) -> tuple[list[torch.Tensor], tuple[int, int]]:
    """Outputs and gradients of this rank, and the numbers that it sends and is said to send."""
    layout = layout_of(seed, dist.get_world_size())
    tiles, group = tiles_of(layout), dist.group.WORLD
    inputs = drawn(sum(layout.lengths), heads)
    weighed = parts(torch.ones(sum(layout.lengths), heads, SHAPE.out).double().cumsum(0).sin(), layout, rank)
    own = [of.requires_grad_() for of in (parts(inputs[0], layout, rank), *inputs[1:])]
    plan = plan_delta(layout, tiles, rank, DeltaHeads(heads, SHAPE), TAIL)
    out = sharded_delta(*own, plan, group)
    gradients = torch.autograd.grad((out * weighed).sum(), own)
    sent = delta_exchanges(layout, tiles, rank, DeltaHeads(heads, SHAPE))
    told = (plan.incoming and plan.incoming.exchange, sent and sent[0])
    counts = tuple(0 if of is None else of.moved_elements() for of in told)
    return [out.detach(), *gradients], counts


@pytest.mark.parametrize(("seed", "heads", "world"), [(0, 4, 2), (1, 3, 3), (2, 1, 3), (3, 5, 3)])
def test_shared_sequences_are_computed_as_if_they_were_whole(ranks: RankPool, seed, heads, world):
    layout = layout_of(seed, world)
    inputs = [of.requires_grad_() for of in drawn(sum(layout.lengths), heads)]
    packing = make_delta_packing(layout.lengths, SHAPE.taps)
    plain = packed_delta(*inputs, packing, SHAPE)
    weighed = torch.ones_like(plain).cumsum(0).sin()
    x, *weights = torch.autograd.grad((plain * weighed).sum(), inputs)
    results = ranks.run(world, computed, seed, heads)
    assert any(counts[0] for _, counts in results)
    for rank, ((out, own_x, *_), counts) in enumerate(results):
        torch.testing.assert_close(out[:-TAIL], parts(plain, layout, rank)[:-TAIL], rtol=0, atol=1e-12)
        torch.testing.assert_close(own_x[:-TAIL], parts(x, layout, rank)[:-TAIL], rtol=0, atol=1e-10)
        assert counts[0] == counts[1]
    for number, whole in enumerate(weights, start=2):
        total = sum(found[number] for found, _ in results)
        torch.testing.assert_close(total, whole, rtol=0, atol=1e-10)
