"""Policies of other systems in a package of their own: what each promises, and how it is chosen."""

import json
import os
import sys
from itertools import product
from pathlib import Path
from random import Random
from statistics import mean

import numpy as np
import pytest
import torch
from domain_plans import Shape, make_plan, random_shape, random_work
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_baselines.dynamic_pow2 import DYNAMIC_POW2
from omni_baselines.fitted_lpt import FITTED_LPT, fitted
from omni_baselines.gpipe import GPIPE
from omni_baselines.karmarkar_karp import KARMARKAR_KARP
from omni_baselines.orchmllm import ORCHMLLM
from omni_baselines.wlb import BALANCE, PACKING
from own_policies import entry_points_of, own
from packages import pip_install
from ranks import RankPool
from runs import Running
from samples import (
    bins_of,
    chart_samples,
    largest_of,
    largest_sum,
    samples_of,
    samples_of_trace,
    sized,
    variation,
)
from sequences import VIT, heavy_tailed, ideal, lengths_of, makespan, pools
from small import overrides, write_mixed

from dataloader.balance import BalancePolicy
from dataloader.balance.costs import bin_ns
from dataloader.balance.simple import LPT, NONE
from dataloader.packing.first_fit import FIRST_FIT_DECREASING
from dataloader.packing.policy import pack_of
from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.planning.prepare import prepare_run
from omni.policies import KINDS
from omni.training import parity
from omni.training.parity import TOLERANCE, WEIGHT_TOLERANCE, Measurement, compare, compare_weights
from parallel.policies import make_pool
from parallel.policies.dynamic import shard_dynamic
from pipeline.builders.passes import held_at_most
from pipeline.ops import Kind
from pipeline.simulator import run
from pipeline.verifier import verify

ROOT = Path(__file__).parents[2]
BASELINES = ROOT / "examples/baselines"
ALL = (
    "balance=karmarkar_karp",
    "packing=wlb",
    "pipeline=gpipe",
    "llm_sp=dynamic_pow2",
    "encoder_sp=dynamic_pow2",
)
OF_BALANCE = {p.name: p for p in (BALANCE, FITTED_LPT, KARMARKAR_KARP, ORCHMLLM)}
one_cost = st.integers(0, 10**12)
two_phases = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=6)


def test_none_has_the_name_of_one_of_the_platform() -> None:
    found = 0
    groups = {section.kind.group: section.kind for section in KINDS}
    for group, kind in groups.items():
        if group in (BASELINES / "pyproject.toml").read_text():
            theirs = own(kind, BASELINES / "pyproject.toml")
            assert all(policy.name == name for name, policy in theirs.items())
            assert not theirs.keys() & entry_points_of(ROOT / "pyproject.toml", group).keys()
            found += len(theirs)
    assert found == 7


# Balance.


@settings(deadline=None)
@given(
    st.lists(st.tuples(one_cost, one_cost), max_size=40),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from(sorted(OF_BALANCE)),
)
def test_each_sample_goes_to_a_bin(costs, count, width, name):
    samples, bins = samples_of(costs), bins_of(count, width, 2)
    chosen = OF_BALANCE[name](samples, bins)  # the kind checks its promise
    assert chosen == OF_BALANCE[name](samples, bins)


@settings(deadline=None)
@given(two_phases, st.integers(1, 3), st.sampled_from([KARMARKAR_KARP, ORCHMLLM]))
def test_the_largest_sum_is_within_four_thirds_of_the_optimum(rows, n, policy):
    samples, bins = samples_of(rows), bins_of(n, 1, 2)
    evened = [llm for llm, _ in rows] if policy is ORCHMLLM else samples.total_ns
    optimum = min(largest_of(evened, n, chosen) for chosen in product(range(n), repeat=len(rows)))
    assert 3 * n * largest_of(evened, n, policy(samples, bins)) <= (4 * n - 1) * optimum


def test_differencing_finds_what_longest_first_does_not():
    samples, bins = samples_of([8, 7, 6, 5, 4]), bins_of(2)
    assert largest_sum(samples, bins, LPT(samples, bins)) == 17
    assert largest_sum(samples, bins, KARMARKAR_KARP(samples, bins)) == 16


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12),
    st.integers(1, 4),
)
def test_wlb_keeps_tokens_under_its_bound_where_it_finds_room(rows, n):
    samples = sized(rows)
    chosen = BALANCE(samples, bins_of(n, 1, 2))
    held = np.bincount(chosen, samples.tokens, n)
    room = max(samples.tokens.max(), samples.tokens.sum() * 9 // (8 * n))
    assert held.max() <= room or chosen == ORCHMLLM(samples, bins_of(n, 1, 2))


def test_a_fit_of_a_quadratic_is_exact_and_falls_back_on_the_mean():
    tokens = [400, 500, 900, 1_000]
    exact = [3 * t * t + 7 * t + 20 for t in tokens]
    assert fitted(tokens, exact) == exact
    assert fitted([10, 10, 30], [4, 6, 20]) == [6, 6, 18]
    assert fitted([], []) == []
    assert all(cost > 0 for cost in fitted([1, 50, 60, 70], [0, 900, 900, 1_000]))


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=40), st.integers(1, 6))
def test_fitted_swaps_never_make_the_fullest_bin_fuller(costs, n):
    samples, bins = samples_of(costs), bins_of(n)
    predicted = samples_of(fitted(samples.tokens.tolist(), samples.total_ns))
    swapped = largest_sum(predicted, bins, FITTED_LPT(samples, bins))
    least = max(sum(predicted.total_ns) / n, *predicted.total_ns)
    assert swapped <= max(largest_sum(predicted, bins, LPT(predicted, bins)), least * 7 / 6)


def test_others_join_a_sample_that_nobody_can_part():
    """One text takes longer than all others together: these had their encoder work in one bin."""
    samples, bins = samples_of([(100, 0), *[(1, 10)] * 4]), bins_of(2, 1, 2)
    assert bin_ns(ORCHMLLM(samples, bins), samples, bins)[:, 1].max() < 40


@pytest.mark.parametrize("trace", ["longtail", "shift"])
@pytest.mark.parametrize("count, width", [(16, 1), (4, 8)])
def test_none_is_worse_than_in_turn_in_the_mean_of_20_seeds_in_any_column(trace, count, width):
    steps, bins = [samples_of_trace(trace, seed, width) for seed in range(20)], bins_of(count, width, 2)

    def means(policy: BalancePolicy) -> np.ndarray:
        taken = [bin_ns(policy(samples, bins), samples, bins).max(0).tolist() for samples in steps]
        return np.mean([[*each, sum(each)] for each in taken], 0)

    in_turn = means(NONE)
    assert [name for name, policy in OF_BALANCE.items() if (means(policy) > in_turn).any()] == []


# Packing.


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 10**9), st.integers(0, 10**9)), max_size=60),
    st.integers(30, 100),
)
def test_every_sample_is_packed_once(rows, budget):
    costs = sized(rows)
    assert PACKING(costs, budget) == PACKING(costs, budget)  # the kind checks its promise


def test_wlb_levels_the_llm_better_than_filling_packs():
    gains = []
    for seed in range(20):
        samples = chart_samples(seed, 64)
        costs = sized(samples)
        filled, level = (pack_of(policy(costs, 16_384)) for policy in (FIRST_FIT_DECREASING, PACKING))
        assert max(level) <= max(filled) + 1
        gains.append(variation(samples, filled, 1) / variation(samples, level, 1))
    assert mean(gains) > 2


def test_wlb_by_hand():
    # The two outliers go apart, though they fit one pack, and the rest where less work is.
    costs = sized([(4, 16, 0), (4, 16, 0), (1, 1, 0), (1, 1, 0)])
    assert PACKING(costs, 8) in (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2)))
    assert FIRST_FIT_DECREASING(costs, 8) == ((0, 1), (2, 3))


def test_what_is_longer_than_the_budget_has_a_pack_of_its_own():
    packs = PACKING(sized([(3, 1, 1), (30, 9, 9), (4, 1, 0), (20, 5, 5)]), 10)
    assert {(1,), (3,)} < set(packs)
    assert (0, 2) in packs


# Sharing.


@settings(deadline=None, max_examples=60)
@given(lengths=lengths_of, pool=pools())
def test_sequences_are_cut_over_powers_of_two(lengths, pool):
    layout = DYNAMIC_POW2(lengths, pool)  # the kind checks its promise
    assert layout == DYNAMIC_POW2(lengths, pool)
    degrees = [len({shard.cp_rank for shard in shards}) for shards in layout.shards]
    assert all(number & (number - 1) == 0 for number in degrees)


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 5), st.sampled_from([1, 4]))
def test_it_finds_room_wherever_units_do_not_outnumber_it(lengths, num_ranks, unit):
    units = sum(-(-length // unit) for length in lengths)
    pool = make_pool(VIT, num_ranks, unit, -(-units // num_ranks) * unit)
    assert DYNAMIC_POW2(lengths, pool).lengths == tuple(lengths)


def test_powers_of_two_cost_a_little():
    pool = make_pool(VIT, 8, 4)
    batches = [heavy_tailed(96, seed) for seed in range(12)]
    free, powers = (
        sum(makespan(shard(x, pool), VIT) / ideal(x, pool) for x in batches) / 12
        for shard in (shard_dynamic, DYNAMIC_POW2)
    )
    assert free < powers < free + 0.03


def test_long_sequences_are_shared_and_shares_of_less_than_a_rank_are_tried():
    shards = DYNAMIC_POW2(heavy_tailed(48, 5), make_pool(VIT, 12)).shards
    assert max(map(len, shards)) > 1
    lengths, pool = [250_000] * 5, make_pool(VIT, 8)
    assert makespan(DYNAMIC_POW2(lengths, pool), VIT) < 1.1 * ideal(lengths, pool)


# GPipe.


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [15, 24])
def test_the_bubble_is_that_of_the_paper_and_all_microbatches_are_held(stages, microbatches):
    domain = make_plan(stages, microbatches, [], GPIPE).domain
    times = {Kind.FORWARD: 420, Kind.BACKWARD: 840, Kind.REDUCE: 0}
    timeline = run(domain, lambda rank, op: times[op.kind], lambda op: 0)
    assert timeline.makespan_ns == (microbatches + stages - 1) * (420 + 840)
    for stage, ops in enumerate(domain.ops):
        assert held_at_most(ops)[stage] == microbatches == GPIPE.in_flight(domain, stage)


def test_several_parts_of_a_rank_go_back_in_the_order_opposite_to_that_forward():
    domain = make_plan(Shape(2, vpp=2), 2, [], GPIPE).domain
    passes = [
        (op.index, op.virtual_stage) for op in domain.ops[0] if op.kind in (Kind.FORWARD, Kind.BACKWARD)
    ]
    forward = [(0, 0), (1, 0), (0, 2), (1, 2)]
    assert passes == forward + forward[::-1]


@pytest.mark.parametrize("seed", range(40))
def test_random_plans_keep_all_rules(seed):
    random = Random(seed)
    shape, microbatches = random_shape(random, 4), random.randint(0, 6)
    plan = make_plan(shape, microbatches, random_work(random, shape, microbatches), GPIPE, cuts=random)
    verify(plan, lambda domain_rank, op: 1)
    encoded = [op for ops in plan.domain.ops for op in ops if op.kind is Kind.ENCODE]
    assert {op.index for op in encoded} == set(range(len(plan.domain.encoder_batches)))


# The package installed.


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the package is installed, as pip would into an environment."""
    return pip_install(BASELINES, tmp_path_factory.mktemp("site"))


def measure(rank: int, path: str, line: list[str], world: int) -> tuple[Measurement | None, str]:
    """Measure two steps with packages found in `path` too; also says which policies were chosen."""
    sys.path.append(path)
    try:
        spec = prepare_run(compose_config(line), world)
        folder = RunFolder.create(Path(spec.config.run.dir))
        found = parity.measure(spec, folder, rank, torch.device("cpu"), steps=2)
        return found, spec.policies.describe()
    finally:
        sys.path.remove(path)


def test_under_all_of_them_four_ranks_equal_one(ranks: RankPool, site: Path, tmp_path: Path) -> None:
    write_mixed(tmp_path / "mixed")
    one, four = (
        overrides(tmp_path / "mixed", tmp_path / name, "train.precision=fp32", "optim.eps=1e-4", *more)
        for name, more in (("one", ()), ("four", ("layout=pp2", "layout.domain=2", *ALL)))
    )
    alone, _ = ranks.run(1, measure, str(site), one, 1)[0]
    together, policies = ranks.run(4, measure, str(site), four, 4)[0]
    assert set(ALL) <= set(policies.split(", "))
    assert compare(alone, together)[0].relative <= TOLERANCE
    assert compare_weights(alone, together)[0].relative <= WEIGHT_TOLERANCE


def test_installed_they_are_chosen_and_compared_by_their_names(site: Path, tmp_path: Path) -> None:
    write_mixed(tmp_path / "mixed")
    line = overrides(tmp_path / "mixed", tmp_path / "run", "layout=pp2", "launch.ranks=2", *ALL)
    paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = Running(["-m", "omni", "plan", "--json", *line], tmp_path, {"PYTHONPATH": paths}).finish()
    assert done.code == 0, done.err
    assert set(ALL) <= set(json.loads(done.out)["policies"].split(", "))
