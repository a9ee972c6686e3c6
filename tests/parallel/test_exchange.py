"""Random exchanges against the same blocks copied one by one."""

import random
from collections import Counter
from math import gcd

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.exchange import finish, prepare, start
from parallel.exchange_lists import heads_of_cell, lists_of, sizes_of
from parallel.exchange_plan import Block, Exchange, make_side

SIZE = 3  # of a head
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
CPU = torch.device("cpu")


def random_shapes(rng, unit):
    """One to three tensors, of heads in multiples of `unit`."""
    return [(rng.randint(0, 6), unit * rng.randint(1, 4), SIZE) for _ in range(rng.randint(1, 3))]


def random_parcel(rng, shapes, rows, heads, unit, most):
    """Blocks of one shape anywhere in tensors that have room for it, none where no tensor has."""
    room = [i for i, (r, h, _) in enumerate(shapes) if r >= rows and h >= heads]
    places = [rng.choice(room) for _ in range(rng.randint(1, most))] if room else []
    return tuple(
        Block(
            i,
            rng.randint(0, shapes[i][0] - rows),
            rows,
            unit * rng.randint(0, (shapes[i][1] - heads) // unit),
            heads,
        )
        for i in places
    )


def random_exchanges(seed, world):
    """One exchange of all ranks: blocks that overlap, parcels of several, ranks that have nothing to say."""
    rng = random.Random(seed)
    unit, most = rng.choice([1, 2, 4]), rng.choice([1, 1, 3])
    shapes = [(random_shapes(rng, unit), random_shapes(rng, unit)) for _ in range(world)]
    sent = [[[] for _ in range(world)] for _ in range(world)]
    received = [[[] for _ in range(world)] for _ in range(world)]
    for _ in range(rng.choice([0, 3, 12, 12])):
        a, b = rng.randrange(world), rng.randrange(world)
        rows, heads = rng.randint(1, 4), unit * rng.randint(1, 3)
        parcel = random_parcel(rng, shapes[a][0], rows, heads, unit, rng.choice([1, most]))
        copies = random_parcel(rng, shapes[b][1], rows, heads, unit, most)
        if parcel and copies:
            sent[a][b].append(parcel)
            received[b][a].append(copies)
    return [
        Exchange(rank, make_side(shapes[rank][0], sent[rank]), make_side(shapes[rank][1], received[rank]))
        for rank in range(world)
    ]


def view(tensors, block):
    return tensors[block.tensor][block.row : block.row + block.rows, block.head : block.head + block.heads, :]


def one_by_one(exchanges, tensors, rank):
    """What `rank` receives, block by block: its own first. Sums are wide, and what travels is not."""
    dtype = tensors[0][0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    target = exchanges[rank].target
    out = [torch.zeros(shape, dtype=wide) for shape in target.shapes]
    for peer in sorted(range(len(exchanges)), key=lambda peer: peer != rank):
        for parcel, copies in zip(exchanges[peer].source.parcels[rank], target.parcels[peer], strict=True):
            value = sum(view(tensors[peer], block).to(wide) for block in parcel).to(dtype).to(wide)
            for block in copies:
                view(out, block).add_(value)
    return [x.to(dtype) for x in out]


def drawn(sides, dtype, seed):
    """Numbers at random: in bf16 small whole ones, whose sums are exact, as a CPU rounds ties up."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape):
        if dtype == torch.bfloat16:
            return torch.randint(-4, 5, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator, dtype=dtype)

    return [[draw(shape) for shape in side.shapes] for side in sides]


def dot(a, b):
    return sum(float((x.detach().double() * y.double()).sum()) for x, y in zip(a, b, strict=True))


def exchange_many(rank, world, seeds):
    """Dots of ⟨A x, y⟩ and ⟨x, Aᵀ y⟩ by seed, and what there was among the exchanges."""
    dots, seen = [], Counter()
    for seed in seeds:
        exchanges, dtype = random_exchanges(seed, world), DTYPES[seed % 3]
        own = exchanges[rank]
        inputs = drawn([one.source for one in exchanges], dtype, seed)
        weights = drawn([one.target for one in exchanges], dtype, seed + 1)
        x = [one.clone().requires_grad_() for one in inputs[rank]]
        if seed % 2:  # as the values of one linear that puts out queries and keys too
            x = [torch.cat([one, one], 2).detach().requires_grad_() for one in x]
        given = [one[:, :, :SIZE] for one in x]
        (prepared,) = prepare([own])
        out = finish(start(prepared, given, dist.group.WORLD))
        again = finish(start(prepared, given, dist.group.WORLD))
        grads = torch.autograd.grad(out, given, weights[rank])
        back = [one.transpose() for one in exchanges]
        for found, wanted in (
            (out, one_by_one(exchanges, inputs, rank)),
            (grads, one_by_one(back, weights, rank)),
            (again, out),
        ):
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), f"{seed}: {own}"
            assert all(a.dtype == dtype for a in found)
        dots.append((dot(out, weights[rank]), dot(inputs[rank], grads), dtype))
        for side in (own.source, own.target):
            seen["summed"] += not all(side.disjoint)
            seen["missed"] += not all(side.complete)
            seen["complete"] += all(side.complete) and any(rows for rows, _, _ in side.shapes)
            seen["several"] += any(len(parcel) > 1 for of in side.parcels for parcel in of)
            seen["kept several"] += any(len(parcel) > 1 for parcel in side.parcels[rank])
            seen["mute"] += not sum(side.counts)
            seen["some empty"] += 0 in side.counts and any(side.counts)
            seen["cells of heads"] += heads_of_cell(side) > 1
    return dots, seen


@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_exchanges_equal_blocks_copied_one_by_one(ranks, world):
    answers = ranks.run(world, exchange_many, world, range(90))
    seen = sum((seen for _, seen in answers), Counter())
    kinds = "summed, missed, complete, several, kept several, mute, some empty, cells of heads"
    assert all(seen[kind] for kind in kinds.split(", ")), seen
    for of_ranks in zip(*(dots for dots, _ in answers), strict=True):
        if of_ranks[0][2] == torch.float64:
            left, right = (sum(dots[i] for dots in of_ranks) for i in (0, 1))
            assert left == pytest.approx(right, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("seed", range(60))
def test_lists_are_as_long_as_was_said_and_cells_as_large_as_can_be(seed):
    for one in random_exchanges(seed, 3):
        for side in (one.source, one.target):
            lists = lists_of(side, one.rank)
            assert lists.each(len) == sizes_of(side, one.rank)
            blocks = [b for message in side.parcels for parcel in message for b in parcel]
            numbers = [n for block in blocks for n in (block.head, block.heads)]
            assert lists.heads == (gcd(*numbers, *(h for rows, h, _ in side.shapes if rows)) or 1)


class Launched(TorchDispatchMode):
    """Counts what is no view."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func._opname] += not func.is_view
        return func(*args, **(kwargs or {}))


def launched_by_blocks(rank, rows):
    """What an exchange of `rows` launches, each row a block, with keys that both ranks read."""
    parcels = [(Block(i, row, 1, 0, 2),) for row in range(rows) for i in range(3)]
    copies = [
        tuple(Block(block.tensor, row + peer * rows, 1, 0, 2) for row in {block.row, (block.row + 1) % rows})
        for peer in range(2)
        for (block,) in parcels
    ]
    source = make_side([(rows, 2, SIZE)] * 3, [parcels] * 2)
    target = make_side([(2 * rows, 2, SIZE)] * 3, [copies[: len(parcels)], copies[len(parcels) :]])
    x = [torch.ones(rows, 2, SIZE, requires_grad=True) for _ in range(3)]
    (prepared,) = prepare([Exchange(rank, source, target)])
    with Launched() as forward:
        out = finish(start(prepared, x, dist.group.WORLD))
    with Launched() as backward:
        torch.autograd.grad(out, x, [torch.ones_like(one) for one in out])
    return +forward.names, +backward.names


def compare_blocks(rank):
    few, many = (launched_by_blocks(rank, rows) for rows in (2, 40))
    assert few == many
    return sum(sum(names.values()) for names in few)


def test_an_exchange_launches_as_much_whatever_the_number_of_blocks(ranks):
    assert max(ranks.run(2, compare_blocks)) < 40
