"""Rules of published models: numbers alone, without a model."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni.models.regions import Region
from omni.open_models.decode import from_mxfp4, into_slab, out_of_slab, times_scales
from omni.open_models.rules import Rule, Slab, boxes

sizes = st.integers(1, 4)


@st.composite
def rules(draw):
    groups = draw(sizes)
    rows = tuple(groups * n for n in draw(st.lists(sizes, min_size=1, max_size=3)))
    columns = draw(st.none() | st.just(draw(sizes) * 2))
    return Rule("ours", tuple(f"theirs{i}" for i in range(len(rows))), rows, columns, groups)


@st.composite
def mixed(draw):
    """A rule whose rows are mixed at random, of matrices or of tensors with a dimension more."""
    rows = tuple(draw(st.lists(sizes, min_size=1, max_size=3)))
    places = iter(draw(st.permutations(range(sum(rows)))))
    order = tuple(tuple((next(places), 1) for _ in range(count)) for count in rows)
    columns = draw(st.none() | sizes | st.tuples(st.just(1), sizes))
    return Rule("ours", tuple(f"theirs{i}" for i in range(len(rows))), rows, columns, order=order)


@st.composite
def parts(draw):
    """A rule, the part of ours that a rank holds, and the interval of it that it owns."""
    rule = draw(rules() | mixed())
    dim = draw(st.integers(0, 1 if len(rule.shape) == 2 else 0))
    edges = sorted(draw(st.sets(st.integers(0, rule.shape[dim]), min_size=2)))
    runs = tuple((low, high - low) for low, high in list(pairwise(edges))[::2])
    held = int(np.prod(rule.shape)) // rule.shape[dim]
    total = held * sum(length for _, length in runs)
    start = draw(st.integers(0, total - 1))
    return rule, Region(rule.shape, dim, runs), start, draw(st.integers(start + 1, total))


def numbered(rule):
    return torch.arange(np.prod(rule.shape)).view(rule.shape)


@given(rules() | mixed())
def test_what_is_cut_out_of_ours_puts_it_together_again(rule):
    ours, back = numbered(rule), torch.full(rule.shape, -1)
    for runs, shape in zip(rule.runs, rule.shapes, strict=True):
        theirs = Region(rule.shape, 0, runs).cut(ours)
        assert theirs.shape == shape
        at = 0
        for start, length in runs:
            assert (back[start : start + length] == -1).all()
            back[start : start + length] = theirs[at : at + length]
            at += length
    assert torch.equal(back, ours)


@given(parts())
def test_boxes_cover_a_part_exactly_once(part):
    rule, region, start, stop = part
    ours = numbered(rule)
    theirs = [Region(rule.shape, 0, runs).cut(ours) for runs in rule.runs]
    got = torch.full((stop - start,), -1)
    for box in boxes(rule, region.dim, region.runs, start, stop):
        matrix = theirs[box.tensor].reshape(len(theirs[box.tensor]), -1)
        values = matrix[slice(*box.rows), slice(*box.columns)]
        assert values.numel()
        place = got.as_strided(values.shape, (box.stride, 1), box.at)
        assert (place == -1).all()
        place.copy_(values)
    assert torch.equal(got, region.cut(ours).flatten()[start:stop])


@pytest.mark.parametrize("order", [(((0, 3),),), (((0, 1), (0, 1)),), (((0, 1), (2, 1)),)])
def test_an_order_that_leaves_rows_out_or_takes_them_twice_is_refused(order):
    with pytest.raises(ValueError, match="no order of rows"):
        Rule("ours", ("theirs",), (2,), order=order)


def test_heads_stand_group_by_group():
    rule = Rule("qkv", ("q", "k", "v"), (8, 4, 4), 3, groups=2)
    assert rule.runs == (((0, 4), (8, 4)), ((4, 2), (12, 2)), ((6, 2), (14, 2)))


def test_quantised_numbers_are_those_of_transformers_bit_for_bit():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 5, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(90, 140, (3, 5, 2), dtype=torch.uint8, generator=generator)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(from_mxfp4(blocks, scales).transpose(1, 2).bfloat16(), theirs)
    assert torch.equal(from_mxfp4(blocks, scales).transpose(1, 2), theirs.float())
    numbers = torch.randn(32, 48, generator=generator).to(torch.float8_e4m3fn)
    factors = torch.rand(2, 3, generator=generator)
    theirs = fp8.Fp8Dequantize(None)._dequantize_one(numbers, factors)
    assert torch.equal(times_scales(numbers, factors, (16, 16), (0, 0)), theirs)
    part = times_scales(numbers[5:30, 17:40], factors, (16, 16), (5, 17))
    assert torch.equal(part, theirs[5:30, 17:40])


@given(sizes, sizes, st.sampled_from([1, 2]), st.booleans())
def test_an_expert_comes_out_of_its_slab_and_back(rows, columns, parts, transposed):
    slab = Slab(1, parts, transposed)
    ours = torch.arange(parts * rows * columns).view(parts * rows, columns)
    theirs = into_slab(ours, slab)
    assert theirs.shape == (ours.shape[::-1] if transposed else ours.shape)
    assert torch.equal(out_of_slab(theirs, slab), ours)
    first = theirs.t() if transposed else theirs
    assert torch.equal(first[parts - 1], ours[(parts - 1) * rows])
