import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloader.stream import SourceSpec, Stream, _unpermute, permute

specs = st.builds(SourceSpec, st.integers(1, 300), st.integers(1, 9), st.integers(1, 5))


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(n, key):
    image = [permute(x, n, key) for x in range(n)]
    assert sorted(image) == list(range(n))
    assert [_unpermute(y, n, key) for y in image] == list(range(n))


def test_permute_spreads_evenly():
    """Over keys, each value lands in each place about equally often (a chi-square far from its tail)."""
    for n in (2, 3, 7, 10):
        counts = Counter(permute(0, n, key * 7919) for key in range(5_000))
        chi2 = sum((counts[place] - 5_000 / n) ** 2 / (5_000 / n) for place in range(n))
        assert chi2 < 4 * n + 12


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 8), st.integers(-5, 2**70))
def test_every_sample_once_per_epoch(size, rows, window, seed):
    stream = Stream({"a": SourceSpec(size, rows, 3)}, seed, window)
    for epoch in range(3):
        drawn = [stream.at(epoch * size + k) for k in range(size)]
        assert {name for name, _, _ in drawn} == {"a"}
        assert {e for _, _, e in drawn} == {epoch}
        assert sorted(i for _, i, _ in drawn) == list(range(size))


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcd"), specs, min_size=1), st.integers(0, 99), st.integers(0, 50))
def test_the_mixture_is_exact_in_every_period(sources, seed, period):
    stream = Stream(sources, seed)
    drawn = Counter(stream.at(period * stream.period + k)[0] for k in range(stream.period))
    total = sum(spec.weight for spec in sources.values())
    for name, spec in sources.items():
        assert drawn[name] * total == spec.weight * stream.period


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcd"), specs, min_size=1), st.integers(0, 99), st.randoms())
def test_within_the_mixture_each_source_runs_through_its_epochs_in_order(sources, seed, random):
    stream = Stream(sources, seed, window_groups=3)
    positions = list(range(600))
    random.shuffle(positions)  # the order of calls does not matter
    drawn = {position: stream.at(position) for position in positions}
    fresh = Stream(dict(reversed(sources.items())), seed, window_groups=3)
    for name, spec in sources.items():
        own = [(i, epoch) for p in range(600) for n, i, epoch in [drawn[p]] if n == name]
        assert [epoch for _, epoch in own] == [k // spec.size for k in range(len(own))]
        for begin in range(0, len(own) - spec.size + 1, spec.size):
            assert sorted(i for i, _ in own[begin : begin + spec.size]) == list(range(spec.size))
    assert all(fresh.at(p) == drawn[p] for p in random.sample(positions, 50))


def test_another_source_does_not_change_the_order_within_one():
    one = Stream({"a": SourceSpec(50, 4, 1)}, 1)
    two = Stream({"a": SourceSpec(50, 4, 1), "b": SourceSpec(9, 4, 3)}, 1)
    alone = [one.at(p)[1] for p in range(50)]
    assert [i for name, i, _ in map(two.at, range(200)) if name == "a"] == alone


def test_seeds_and_epochs_give_other_orders():
    orders = [
        [Stream({"a": SourceSpec(100, 4, 1)}, seed).at(epoch * 100 + k)[1] for k in range(100)]
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sum(i == k for k, i in enumerate(order)) < 10 for order in orders)


def test_reads_stay_local():
    """Any window's worth of consecutive positions touches at most two windows of row groups, far from all."""
    rows, window = 8, 4
    stream = Stream({"a": SourceSpec(8_000, rows, 1)}, 5, window)
    for begin in range(0, 7_900, 97):
        groups = {stream.at(begin + k)[1] // rows for k in range(rows * window)}
        assert len(groups) <= 2 * window
    assert len({stream.at(k)[1] // rows for k in range(rows * window)}) == window
    neighbours = [stream.at(k)[1] // rows for k in range(rows)]
    assert len(set(neighbours)) > 1  # shuffled across the groups of a window


def test_the_order_is_the_same_in_another_process_and_forever():
    code = (
        "from dataloader.stream import *;"
        "s = Stream({'x': SourceSpec(1000, 32, 2), 'y': SourceSpec(77, 32, 3)}, 42, 2);"
        "print([s.at(p) for p in (0, 1, 2, 3, 4, 123456789)])"
    )
    root = str(Path(__file__).parents[2])
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": root}, check=True
    )
    assert out.stdout.strip() == RECORDED  # a change here changes what resumed runs train on


RECORDED = "[('x', 379, 0), ('y', 24, 0), ('x', 256, 0), ('y', 62, 0), ('y', 61, 0), ('y', 39, 962000)]"


def test_bad_sources_are_refused():
    with pytest.raises(ValueError, match="source 'a': size 0"):
        Stream({"a": SourceSpec(0, 4, 1)}, 0)
    with pytest.raises(ValueError, match="weight -1"):
        Stream({"a": SourceSpec(5, 4, -1)}, 0)
    with pytest.raises(ValueError, match="no positive weight"):
        Stream({"a": SourceSpec(5, 4, 0)}, 0)
    with pytest.raises(ValueError, match="no positive weight"):
        Stream({}, 0)
    with pytest.raises(ValueError, match="round them"):
        Stream({"a": SourceSpec(5, 4, 10**6), "b": SourceSpec(5, 4, 10**6 + 1)}, 0)
    with pytest.raises(ValueError, match="before the start"):
        Stream({"a": SourceSpec(5, 4, 1)}, 0).at(-1)
    zero = Stream({"a": SourceSpec(5, 4, 1), "b": SourceSpec(5, 4, 0)}, 0)
    assert {zero.at(p)[0] for p in range(20)} == {"a"}
