"""Parts of parameters by name and place, held against arrays of numbers."""

from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni.models.initialise import initialise
from omni.models.regions import Numbering, Region, canonical_name, named_parameters
from omni.rank.state import _overlaps


@st.composite
def regions(draw) -> Region:
    """Any runs along any dimension of a tensor of one to three."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    cuts = sorted(draw(st.sets(st.integers(0, shape[dim]), max_size=6)))
    runs = tuple((a, b - a) for number, (a, b) in enumerate(pairwise(cuts)) if number % 2 == 0)
    return Region(shape, dim, runs or ((0, shape[dim]),))


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape)).reshape(shape)


@given(regions())
def test_a_part_has_its_runs(region):
    part = region.cut(numbered(region.shape))
    kept = [i for start, length in region.runs for i in range(start, start + length)]
    expected = np.take(numbered(region.shape).numpy(), kept, axis=region.dim)
    assert np.array_equal(part.numpy(), expected)
    assert region.is_whole == (kept == list(range(region.shape[region.dim])) and len(region.runs) == 1)


@settings(deadline=None, max_examples=300)
@given(st.data(), regions())
def test_elements_lie_where_the_part_was_cut(data, region):
    flat = region.cut(numbered(region.shape)).flatten().numpy()
    start = data.draw(st.integers(0, len(flat)))
    stop = data.draw(st.integers(start, len(flat)))
    at, places, lengths = region.elements(start, stop)
    assert at.dtype == places.dtype == lengths.dtype == np.int64
    found = [place + i for place, length in zip(places, lengths, strict=True) for i in range(length)]
    assert found == flat[start:stop].tolist()
    assert at.tolist() == [0, *np.cumsum(lengths)[:-1]] if len(at) else start == stop
    assert all(length > 0 for length in lengths)
    assert all(a < b for a, b in pairwise(places))


def divided(draw, shape: tuple[int, ...], value: torch.Tensor) -> list[tuple[Region, int, torch.Tensor]]:
    """A tensor as ranks may hold it: equal parts along a dimension, or of both its halves, each in shards."""
    ways = [Region(shape, 0, ((0, shape[0]),))]
    dim = draw(st.integers(0, len(shape) - 1))
    for size in (2, 3):
        if shape[dim] % size == 0:
            held = shape[dim] // size
            ways = [Region(shape, dim, ((rank * held, held),)) for rank in range(size)]
            if held % 2 == 0 and draw(st.booleans()):
                half = held // 2
                ways = [
                    Region(shape, dim, ((rank * half, half), (half * size + rank * half, half)))
                    for rank in range(size)
                ]
            if draw(st.booleans()):
                break
    pieces = []
    for region in ways:
        flat = region.cut(value).flatten()
        cuts = sorted({0, len(flat), *draw(st.lists(st.integers(0, len(flat)), max_size=3))})
        pieces += [(region, a, flat[a:b].clone()) for a, b in pairwise(cuts)]
    return draw(st.permutations(pieces))


@settings(deadline=None, max_examples=200)
@given(st.data(), st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=1, max_size=3).map(tuple))
def test_whatever_ranks_hold_is_found_again_by_any_others(data, shape):
    value = torch.randperm(prod(shape), generator=torch.Generator().manual_seed(0)).reshape(shape)
    saved = divided(data.draw, shape, value)
    for region, start, expected in divided(data.draw, shape, value):
        filled = torch.full((len(expected),), -1)
        times = torch.zeros(len(expected), dtype=torch.long)
        for other, first, held in saved:
            wanted = region.elements(start, start + len(expected))
            for here, there, length in _overlaps(wanted, other.elements(first, first + len(held))):
                filled[here : here + length] = held[there : there + length]
                times[here : here + length] += 1
        assert torch.equal(filled, expected)
        assert (times == 1).all()


# Names.


@pytest.mark.parametrize(
    "name, numbering, expected",
    [
        ("decoder.layers.1.mlp.weight", Numbering(first_layer=6), "decoder.layers.7.mlp.weight"),
        ("output_layer.weight", Numbering(tied=True), "embedding.word_embeddings.weight"),
        ("output_layer.weight", Numbering(tied=False), "output_layer.weight"),
        ("layers.10.norm.weight", Numbering(first_layer=10), "layers.20.norm.weight"),
    ],
)
def test_names_count_from_the_start_of_the_model(name, numbering, expected):
    assert canonical_name(name, numbering) == expected


def halved(module: torch.nn.Module, name: str, dim: int) -> None:
    parameter = dict(module.named_parameters())[name]
    parameter.tensor_model_parallel, parameter.partition_dim = True, dim


class Gated(torch.nn.Module):
    """Half of a module whose first layer holds a gate and what it lets through."""

    class Config:
        gated_linear_unit = True

    def __init__(self, tp: int = 1) -> None:
        super().__init__()
        self.config = self.Config()
        self.linear_fc1 = torch.nn.Linear(3, 8 // tp, bias=False)
        self.linear_fc2 = torch.nn.Linear(4 // tp, 3)
        self.scale = torch.nn.Parameter(torch.zeros(()))
        if tp > 1:
            halved(self, "linear_fc1.weight", 0)
            halved(self, "linear_fc2.weight", 1)


def test_a_rank_holds_its_part_of_the_gate_and_its_part_of_the_rest():
    held = {n.name: n.region for n in named_parameters(Gated(2), Numbering(tp_rank=1, tp_size=2))}
    assert held["linear_fc1.weight"] == Region((8, 3), 0, ((2, 2), (6, 2)))
    assert held["linear_fc2.weight"] == Region((3, 4), 1, ((2, 2),))
    assert held["linear_fc2.bias"] == Region((3,), 0, ((0, 3),))
    assert held["scale"] == Region((1,), 0, ((0, 1),)), "a scalar is one element"


def test_every_rank_draws_its_part_of_the_same_weights():
    def drawn(tp: int, rank: int) -> Gated:
        module = Gated(tp)
        numbering = Numbering(tp_rank=rank, tp_size=tp)
        initialise(module, seed=3, component="x", num_layers=2, numbering=numbering)
        return module

    whole = drawn(1, 0)
    parts = [drawn(2, rank) for rank in range(2)]
    gates, rest = zip(*(part.linear_fc1.weight.chunk(2) for part in parts), strict=True)
    assert torch.equal(torch.cat([*gates, *rest]), whole.linear_fc1.weight)
    assert torch.equal(torch.cat([part.linear_fc2.weight for part in parts], 1), whole.linear_fc2.weight)
    assert whole.linear_fc1.weight.std() > 0.1
