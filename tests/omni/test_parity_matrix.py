"""The parity matrix: that its cases are the right ones, and that each of them equals one rank."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from parity_matrix import (
    AXES,
    FURTHER_AXES,
    LAYOUT_AXES,
    MOST_RANKS,
    REQUIRED,
    Case,
    covering_array,
    full_list,
    layouts,
    listed,
    named,
    space,
)
from parity_runs import command_line, configure, distance, narrowest_choices, run, write_data
from planners import plans_of_all_domains
from ranks import RankPool

from omni.compose import compose_config
from omni.planning import prepare, run_data
from omni.planning.prepare import prepare_run
from omni.training.parity import TOLERANCE, WEIGHT_TOLERANCE, Measurement
from pipeline.domain_plan import DomainPlan
from pipeline.plan import StepPlan

CASES = {case.name: case for case in listed()}


def shorter() -> Iterator[str]:
    """Name the cases on the fewest ranks among which each value of each axis occurs three times, and those
    that are required. What two values do together only the whole array says, with the longer cases.
    """
    seen = Counter[tuple[str, object]]()
    for case in dict.fromkeys((*REQUIRED, *sorted(listed(), key=lambda case: case.world))):
        values = [(axis, getattr(case, axis)) for axis in AXES]
        if case in REQUIRED or any(seen[value] < 3 for value in values):
            seen.update(values)
            yield case.name


LONGER = CASES.keys() - set(shorter())
# As a GPU runs them: all communication of a rank in one queue. Of the full list's cases with several stages,
# the first for each reason why ops of several ranks belong together.
REASONS: tuple[Callable[[Case], bool], ...] = (
    lambda case: case.tp > 1 and case.encoder_sp != "none" and case.schedule == "one_f_one_b",
    lambda case: case.ep > 1 and case.schedule == "one_f_one_b",
    lambda case: case.ep > 1 and case.cp > 1 and case.placement == "stage0",
    lambda case: case.encoder_tp > 1 and case.beside > 0 and case.boundary != "auto",
    lambda case: case.llm_sp == "dynamic" and case.encoder_tp > 1 and case.placement == "colocated",
    lambda case: case.llm_sp == "uniform" and case.cp > 1 and case.replicas > 1,
    lambda case: case.placement == "colocated" and case.encoder_tp > case.arrangement().stage_size,
)
SINGLE_QUEUE = (
    "tp2 pp2 dp2 ep2 enc_tp2 stage0 one_domain experts enc_hybrid_pow2 llm_dynamic one_f_one_b "
    "reduce_scatter frozen_in_turn",
    "pp2 dp2 ep2 beside1 one_domain experts one_f_one_b recompute two_level frozen_in_turn",
    "cp2 pp2 ep2 stage0 experts enc_long_short llm_dynamic zero_bubble_h1 frozen_image",
    "pp2 enc_tp2 beside2 auto two_level",
    "pp4 dp2 enc_tp2 one_domain enc_dynamic llm_dynamic joint_zero_bubble_h2 recompute reduce_scatter",
    "cp2 pp2 dp2 stage0 one_domain enc_hybrid_pow2 interleaved recompute reduce_scatter",
    "pp2 enc_tp2 experts joint frozen_in_turn",
)
# What only three values together show: the shards of one expert on ranks that differ in tp, and tp groups
# that span stages because none holds one alone.
SPANNING = (
    Case(pp=2, encoder_tp=2),
    Case(pp=4, encoder_tp=2, encoder_sp="dynamic", schedule="one_f_one_b", recompute="full"),
)
# ZB-H2 is ZB-H1 but for how far its stages run ahead.
FAR_AHEAD = Case(pp=2, encoder_tp=2, schedule="zero_bubble_h2", recompute="full")
# `joint_uniform` is 1F1B with the encoder batches of `joint`, in other slots.
UNIFORM = (
    Case(pp=4, schedule="joint_uniform", encoder_sp="long_short"),
    Case(tp=2, pp=2, encoder_tp=2, schedule="joint_uniform", recompute="full", frozen="in_turn"),
    Case(pp=2, dp=2, domain="dp", schedule="joint_uniform", llm_sp="dynamic", boundary="reduce_scatter"),
    Case(pp=2, placement="disaggregated", beside=2, schedule="joint_uniform"),
)
BEYOND_PAIRS = {
    case.name: case for case in [Case(tp=4, cp=2, ep=2, model="experts"), *SPANNING, FAR_AHEAD, *UNIFORM]
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("matrix")
    write_data(path)
    return path


_references: dict[Case, Measurement] = {}


def assert_equals_one_rank(ranks: RankPool, folder: Path, case: Case, single_queue: bool = False) -> None:
    alone = case.reference
    if alone not in _references:
        _references[alone] = run(ranks, configure(alone, folder), alone.world)
    candidate = run(ranks, configure(case, folder), case.world, single_queue)
    found = distance(_references[alone], candidate)
    assert found.loss <= TOLERANCE
    assert found.square.relative <= TOLERANCE, found.square
    assert found.gradient.relative <= TOLERANCE, found.gradient
    assert found.weights.relative <= WEIGHT_TOLERANCE, found.weights


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in LONGER)) for name in CASES | BEYOND_PAIRS],
)
def test_case_equals_one_rank(ranks: RankPool, folder: Path, name: str) -> None:
    assert_equals_one_rank(ranks, folder, (CASES | BEYOND_PAIRS)[name])


@pytest.mark.parametrize("case", SPANNING, ids=lambda case: case.name)
def test_tp_groups_of_these_cases_span_stages(folder: Path, case: Case) -> None:
    (domain,) = (plan.domain for plan in plans_of(case, folder))
    stages = {
        tuple(map(domain.stage, encoder_batch.ranks[: encoder_batch.tp]))
        for encoder_batch in domain.encoder_batches
    }
    assert stages
    assert all(first != last for first, last in stages), stages


@pytest.mark.parametrize("name", SINGLE_QUEUE)
def test_case_on_a_single_queue_equals_one_rank(ranks: RankPool, folder: Path, name: str) -> None:
    assert_equals_one_rank(ranks, folder, named(name), single_queue=True)


@pytest.mark.parametrize("data", AXES["data"])
def test_the_choice_of_experts_does_not_hang_on_rounding(ranks: RankPool, folder: Path, data: str) -> None:
    config = configure(Case(model="experts", data=data), folder)
    margins = ranks.run(1, narrowest_choices, config)[0]
    assert min(margins) > 1e-4
    assert len(margins) == config.train.steps


def plans_of(case: Case, folder: Path) -> list[StepPlan]:
    return plans_of_all_domains(prepare_run(configure(case, folder), case.world).planner, 1, 0)


def idle_encoders(domain: DomainPlan) -> int:
    busy = {rank for encoder_batch in domain.encoder_batches for rank in encoder_batch.ranks}
    return len(set(range(*domain.homes[1])) - busy)


@pytest.mark.parametrize("name", CASES)
def test_plan_has_what_the_case_is_about(folder: Path, name: str) -> None:
    case = CASES[name]
    domains = [plan.domain for plan in plans_of(case, folder)]
    routes = [route for domain in domains for route in domain.routes]
    lengths = [item.tokens for domain in domains for item in domain.items]
    texts = {(d, i) for d, domain in enumerate(domains) for b in domain.microbatches for i in b.samples}
    texts -= {(d, item.sample) for d, domain in enumerate(domains) for item in domain.items}
    assert texts, "no sample is without items"
    if case.data == "mixed":
        # CP ranks of all replicas that share sequences pack together: none may be left without items.
        together = case.llm_sp == "dynamic" and case.domain == "dp" and case.dp > 1
        assert together or None in routes, "no microbatch is without items"
        assert len(set(lengths)) > 2, "items are even"
        tails = (
            batch.layout.padded_tokens(cp_rank, case.tp) > batch.layout.local_tokens(cp_rank)
            for domain in domains
            for batch in domain.microbatches
            for cp_rank in range(domain.pool)
        )
        assert case.tp == 1 or any(tails), "no rank has a tail"
    else:
        assert any(idle_encoders(domain) for domain in domains), "no rank is without items"
    if case.cp > 1 or case.llm_sp == "dynamic":
        assert any(any(batch.tiles) for domain in domains for batch in domain.microbatches)
    if case.encoder_sp != "none":
        assert any(any(encoder_batch.tiles) for domain in domains for encoder_batch in domain.encoder_batches)
    if case.boundary != "auto":
        assert case.boundary in {route.transport for route in routes if route is not None}


# That the cases are the right ones.


def expected_refusal(case: Case) -> str | None:
    """What the platform must refuse, by the rules of the documentation, and a word of the message."""
    stage = case.tp * case.cp * case.dp
    if stage % case.ep:
        return "layout.llm.ep"
    if (case.placement == "disaggregated") != (case.beside > 0):
        return "placement"
    homes = {"colocated": stage * case.pp, "stage0": stage, "disaggregated": case.beside}
    if homes[case.placement] % case.encoder_tp:
        return "layout.encoders.image.tp"
    if case.ep > 1 and case.model == "dense":
        return "layout.llm.ep"
    return None


@pytest.mark.slow  # every combination
def test_refused_is_exactly_what_is_no_combination(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every combination of a layout's axes, valid or not, with and without experts, through prepare_run."""
    one = prepare_run(configure(Case(), folder), 1)  # data and encoder have nothing to do with the layout
    monkeypatch.setattr(run_data.Index, "open", lambda *unused: one.indexes["mixed"])
    monkeypatch.setattr(prepare, "make_encoder", lambda *unused: one.encoders["image"])
    configs = {model: configure(Case(model=model), folder) for model in AXES["model"]}
    accepted, refused = set(), 0
    for values in product(*(AXES[axis] for axis in LAYOUT_AXES), AXES["model"]):
        case = Case(*values[:-1], model=values[-1])
        if case.world > MOST_RANKS:
            continue
        config = configs[case.model]
        config.layout.llm = type(config.layout.llm)(case.tp, case.cp, case.dp, case.pp, case.ep)
        config.layout.encoders["image"].tp = case.encoder_tp
        config.placement.policy, config.placement.ranks = case.placement, case.beside
        reason = expected_refusal(case)
        if reason is None:
            prepare_run(config, case.world)
            accepted.add(replace(case, model="dense"))
        else:
            refused += 1
            with pytest.raises(ValueError, match=re.escape(reason)):
                prepare_run(config, case.world)
    assert accepted == set(layouts())
    assert refused > 1000


def places(cases: Iterable[Case]) -> np.ndarray:
    """Which value of each axis the cases have: [cases, axes], as `Space.places`."""
    return np.array([[AXES[axis].index(getattr(case, axis)) for axis in AXES] for case in cases], np.int16)


def are_combinations(cases: Iterable[Case]) -> bool:
    return set(map(bytes, places(cases))) <= set(map(bytes, space().places))


def test_every_pair_of_values_occurs_in_few_cases() -> None:
    cases, most = places(covering_array()), 0
    for a, b in combinations(range(len(AXES)), 2):
        possible, had = (
            np.bincount(of[:, a] * 100 + of[:, b], minlength=1000) > 0 for of in (space().places, cases)
        )
        assert (possible == had).all(), (list(AXES)[a], list(AXES)[b])
        most = max(most, int(possible.sum()))
    assert are_combinations(covering_array())
    # No array has fewer cases than the two axes with most values have pairs; the greedy one is near that.
    assert most <= len(cases) <= most * 3 // 2


def test_the_full_list_has_every_layout_once_and_every_further_value_often() -> None:
    whole = full_list()
    blank = {axis: AXES[axis][0] for axis in FURTHER_AXES}
    assert [replace(case, **blank) for case in whole] == list(layouts())
    assert are_combinations(whole)
    for number, axis in enumerate(AXES):
        of_layouts = np.split(space().places[:, number], space().starts[1:-1])
        for place, value in enumerate(AXES[axis] if axis in FURTHER_AXES else ()):
            possible = sum((place == of).any() for of in of_layouts)
            least = possible // max(10, len(AXES[axis]) + 2)
            assert sum(getattr(case, axis) == value for case in whole) >= least, (axis, value)


def test_names_are_unique() -> None:
    cases = {*covering_array(), *full_list(), *BEYOND_PAIRS.values()}
    assert len({case.name for case in cases}) == len(cases)
    assert Case().name == "one_rank"


@pytest.mark.parametrize(
    "layout",
    [Case(), Case(dp=2), Case(pp=2, placement="stage0"), Case(pp=2, beside=1, placement="disaggregated")],
    ids=lambda case: case.name,
)
def test_what_is_left_out_changes_nothing(folder: Path, layout: Case) -> None:
    number, starts = list(layouts()).index(layout), space().starts
    had, plans = set(map(space().case, range(*starts[number : number + 2]))), plans_of(layout, folder)
    for axis in ("encoder_sp", "llm_sp", "boundary"):
        others = [replace(layout, **{axis: value}) for value in AXES[axis]]
        left_out = [case for case in others if case not in had]
        assert all(plans_of(case, folder) == plans for case in left_out), axis
    assert len(had) == starts[number + 1] - starts[number]


@pytest.mark.parametrize("case", [Case(), *listed()[6:8]], ids=lambda case: case.name)
def test_settings_are_what_the_command_line_sets(folder: Path, case: Case) -> None:
    line = command_line(folder, case.data)
    for key, value in case.settings().items():
        added = key.startswith(("layout.encoders", "optim.components"))
        line.append(f"{'+' if added else ''}{key}={value}")
    assert compose_config(line) == configure(case, folder)


def test_the_documentation_lists_the_cases() -> None:
    assert listed() == covering_array(), "docs/parity.md is of other cases: run make parity"
    assert [named(case.name) for case in full_list()] == list(full_list())


def test_on_a_single_queue_are_the_first_cases_of_their_reasons() -> None:
    own = [case for case in full_list() if case.pp > 1 and case.data == "mixed"]
    assert tuple(next(filter(reason, own)).name for reason in REASONS) == SINGLE_QUEUE
