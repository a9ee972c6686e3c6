"""`omni plan`: what it says of all domains is what each of them plans, times and holds; what does not fit."""

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from small import overrides, write_mixed

from omni.__main__ import main
from omni.commands import _shared
from omni.commands._shared import signs_of_life
from omni.compose import compose_config
from omni.config import ConfigError
from omni.planning.fullest import beyond, check_memory, check_rank, fullest_rank
from omni.planning.loads import loads
from omni.planning.memory import by_kind, model_peak
from omni.planning.memory_advice import by_component, remedy
from omni.planning.prepare import prepare_run
from omni.planning.rank_work import rank_work
from omni.planning.run_spec import RunSpec
from omni.rehearsal.estimate import Estimate, estimate, sent_by_ranks
from omni.rehearsal.footprint_model import model_footprint
from parallel.work import even_load
from pipeline.costs import simulate
from pipeline.plan import StepPlan

WORLD = 16
SPLIT = [
    "layout.llm.tp=2",
    "layout.llm.pp=2",
    "balance.group=2",
    "cluster=h100",
    "cluster.ranks_per_node=4",
]


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("estimate")
    write_mixed(folder / "mixed")
    return overrides(
        folder / "mixed", folder / "run", *SPLIT, "train.precision=bf16", f"launch.ranks={WORLD}", samples=14
    )


@pytest.fixture(scope="module")
def spec(line: list[str]) -> RunSpec:
    return prepare_run(compose_config(line), WORLD)


@pytest.fixture(scope="module")
def plans(spec: RunSpec) -> list[StepPlan]:
    return [spec.planner.next_step(2, spec.planner.cursor_of(2), number) for number in range(4)]


@pytest.fixture(scope="module")
def found(spec: RunSpec) -> Estimate:
    return estimate(spec, spec.planner.all_domains(2, spec.planner.cursor_of(2)))


def test_all_domains_are_planned_as_each_by_itself(spec: RunSpec, plans: list[StepPlan]) -> None:
    assert spec.planner.cursor_of(2) == spec.planner.next_step(1, 0, 3).taken.next_cursor > 0
    assert list(spec.planner.all_domains(2, spec.planner.cursor_of(2))) == plans


def test_domains_without_samples_are_planned_once(line: list[str]) -> None:
    few = prepare_run(compose_config([*line, "data.step_samples=2"]), WORLD)
    every, distinct = (list(of(2, 4)) for of in (few.planner.all_domains, few.planner.distinct_domains))
    assert [len(plan.domain.samples) for plan in every] == [1, 0, 1, 0]
    assert distinct == every[:3]
    of_distinct, of_every = estimate(few, distinct), estimate(few, every)
    assert of_distinct.step_s == of_every.step_s
    assert replace(of_distinct, timeline=of_every.timeline) == of_every


def test_loads_are_those_of_all_domains(spec: RunSpec, plans: list[StepPlan], found: Estimate) -> None:
    for name in ("llm", "image"):
        of_all = [ns for plan in plans for ns in loads(spec, plan)[name]]
        most, mean = found.loads[name]
        assert most == max(of_all)
        assert mean == pytest.approx(sum(of_all) / len(of_all))
        assert most > mean


def test_the_slowest_domain_sets_the_pace(spec: RunSpec, plans: list[StepPlan], found: Estimate) -> None:
    queue = spec.planner.domain.single_queue
    times = [simulate(plan.domain, spec.table, queue).makespan_ns for plan in plans]
    assert len(set(times)) > 1
    assert found.plan == plans[times.index(max(times))]
    assert found.timeline.makespan_ns == max(times)
    # Each of six parts is rounded down.
    assert 0 <= max(times) - sum(vars(found.spent).values()) < 6
    assert found.tokens_per_s() == pytest.approx(sum(plans[0].taken.lengths) / (max(times) / 1e9))


def test_mfu_counts_the_world_three_times_forward(
    spec: RunSpec, plans: list[StepPlan], found: Estimate
) -> None:
    flops = 0
    for plan in plans:
        for meta, sample in zip(spec.planner.metas_of(plan.domain), plan.domain.samples, strict=True):
            load = even_load(sample.length, sample.length**2, targets=meta.text_tokens + 1)
            flops += sum(spec.work[f"llm/{part}"].forward(load).flops for part in range(2)) * 2
            items = (even_load(item.tokens, item.tokens**2) for item in meta.items)
            flops += sum(spec.work["image"].forward(item).flops for item in items)
    peak = 989e12 * WORLD * found.timeline.makespan_ns / 1e9
    assert found.mfu(spec) == pytest.approx(3 * flops / peak, rel=1e-6)


def test_the_fullest_rank_is_that_of_the_world(spec: RunSpec, plans: list[StepPlan], found: Estimate) -> None:
    held = {
        rank: model_footprint(spec, plan, rank)
        for plan in plans
        for rank in spec.arrangement.global_ranks(plan.number)
    }
    assert sorted(held) == list(range(WORLD))
    peak = found.fullest
    assert peak.bytes == max(of.bytes for of in held.values())
    assert (peak.held, peak.at) == (held[peak.rank].peak, held[peak.rank].at)
    assert spec.arrangement.domain(peak.rank) == peak.plan.number


def test_bytes_by_tier_are_those_of_the_models(spec: RunSpec, plans: list[StepPlan]) -> None:
    sent = sent_by_ranks(spec, plans[1])
    assert tuple(sent) == spec.arrangement.global_ranks(1)
    for rank, of in sent.items():
        traffic = model_footprint(spec, plans[1], rank).traffic.values()
        assert of.inside == sum(each.inside for each in traffic) > 0
        assert of.across == sum(each.across for each in traffic) > 0


def on(spec: RunSpec, memory_bytes: int | None) -> RunSpec:
    return replace(spec, cluster=replace(spec.cluster, memory_bytes=memory_bytes))


def test_a_rank_may_hold_what_its_device_has_and_no_byte_more(spec: RunSpec, found: Estimate) -> None:
    check_memory(on(spec, None), found.fullest)
    check_memory(on(spec, found.fullest.bytes), found.fullest)
    with pytest.raises(ConfigError) as refused:
        check_memory(on(spec, found.fullest.bytes - 1), found.fullest)
    message = str(refused.value)
    named = [
        f"rank {found.fullest.rank} ",
        f"cluster.memory_bytes={found.fullest.bytes - 1}",
    ]
    assert [word for word in named if word not in message] == []
    assert ("Raise layout." in message) != ("For " in message), message
    assert [kind for kind in found.fullest.held if f"{kind} " not in message] == []


def filled(spec: RunSpec, parts: dict[tuple[str, str], int], excess: int) -> str:
    return remedy(spec, parts, sum(parts.values()) - excess)


def test_the_remedy_is_that_of_the_component_that_fills_memory(spec: RunSpec) -> None:
    state = {("weights", "llm"): 10, ("optimizer", "image"): 5}
    encoder, llm = ("activations", "image"), ("activations", "llm")
    both = {**state, encoder: 90, llm: 30}
    said = filled(spec, both, 80)
    assert "model.encoders.image.recompute=full (now none)" in said
    assert "data.step_samples=14" in said
    assert "llm" not in said
    assert "model.llm.recompute=full (now none)" in filled(spec, {**state, encoder: 10, llm: 30}, 1)
    said = filled(spec, both, 100)
    assert said.index("model.encoders.image.recompute") < said.index("model.llm.recompute"), "one is too few"
    assert "layout.llm.tp=2" in filled(spec, {**state, llm: 3}, 1)
    assert "layout.encoders.image.tp=1" in filled(spec, {("gradients", "image"): 9, llm: 3}, 1)
    spec.config.model.encoders["image"]["recompute"] = "full"
    try:
        assert "recompute" not in filled(spec, both, 80)
    finally:
        del spec.config.model.encoders["image"]["recompute"]


def test_activations_are_told_by_component(spec: RunSpec, plans: list[StepPlan]) -> None:
    seen = set()
    for plan in plans:
        for rank in spec.arrangement.global_ranks(plan.number):
            work = rank_work(spec, plan, rank)
            parts, _ = model_peak(spec, work)
            of = by_component(parts, "activations")
            assert sum(of.values()) == by_kind(parts)["activations"]
            seen |= of.keys()
            passes = [work.llm[part].forward(load) for (_, part), load in work.passes.items()]
            images = [work.encoders["image"].forward(load) for load in work.encodings.values()]
            for name, forward in (("llm", passes), ("image", images)):
                most = sum(of.kept for of in forward) + max((of.workspace for of in forward), default=0)
                assert of.get(name, 0) <= most
    assert seen == {"llm", "image"}


def test_a_plan_fits_where_its_fullest_rank_does(spec: RunSpec, plans: list[StepPlan]) -> None:
    most = fullest_rank(spec, plans[:1]).bytes
    assert beyond(on(spec, None), spec.table, plans[0]) == 0
    assert beyond(on(spec, most), spec.table, plans[0]) == 0
    assert beyond(on(spec, most - 1), spec.table, plans[0]) > 0
    assert beyond(on(spec, 2 * most), spec.table, plans[0]) < 0


def test_the_planner_of_a_rank_refuses_what_that_rank_cannot_hold(
    spec: RunSpec, plans: list[StepPlan]
) -> None:
    def verify(rank: int, memory_bytes: int | None) -> None:
        admit = partial(check_rank, on(spec, memory_bytes), rank)
        replace(spec.planner, admit=admit).verify(plans[1])

    held = {rank: model_footprint(spec, plans[1], rank).bytes for rank in spec.arrangement.global_ranks(1)}
    assert len(set(held.values())) > 1
    for rank, size in held.items():
        verify(rank, None)
        verify(rank, size)
        with pytest.raises(ConfigError, match=f"rank {rank} .* of step 2, more than"):
            verify(rank, size - 1)


# The command.


def test_the_command_says_all_of_it(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--domain", "1", "--ops", *line]) == 0
    out = capsys.readouterr().out
    for words in (
        "16 ranks, tp2·dp4·pp2, bf16",
        "planned forward ms, all 4 domains",
        "simulated on h100",
        "collectives inside layers",
        "boundary",
        "idle",
        "tokens/s",
        "MFU",
        "GiB held by the fullest rank",
        "of 74.5 (cluster.memory_bytes)",
        "GiB a rank of domain 1 sends",
        "to other nodes",
        "rules R1 to R7",
    ):
        assert words in out
    # Domain 1 is replica 1, of two stages of eight ranks: global numbers, never domain ranks.
    assert "\nranks 2-3: " in out or "\nrank 2: " in out
    assert "\nranks 10-11: " in out or "\nrank 10: " in out
    assert "\nrank 0: " not in out


@pytest.mark.parametrize("name", ["step.svg", "step.json"])
def test_the_command_draws_the_domain_that_it_shows(line: list[str], tmp_path: Path, name: str) -> None:
    assert main(["plan", "--domain", "1", "--draw", str(tmp_path / name), *line]) == 0
    text = (tmp_path / name).read_text()
    assert "step 1, domain 1 (simulated)" in text
    assert text.startswith("<svg" if name.endswith("svg") else "{")


def test_a_picture_in_no_known_format_is_refused(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--draw", "step.png", *line]) == 2
    assert "--draw step.png: write a picture (.svg)" in capsys.readouterr().err


def test_a_step_that_does_not_fit_is_refused_without_a_dataset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["data.microbatch_tokens=1024", "data.step_tokens=8192", "cluster=h100", "launch.ranks=4"]
    keys.append("system=multiplexed")
    assert main(["plan", "--trace", "longtail", "--json", *keys]) == 0
    held = json.loads(capsys.readouterr().out)["held_bytes"]["all"]
    assert main(["plan", "--trace", "longtail", *keys, f"cluster.memory_bytes={held - 1}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    for words in ("error: rank ", "GiB", f"cluster.memory_bytes={held - 1}", "data.microbatch_tokens=1024"):
        assert words in err
    assert not (tmp_path / "refused.svg").exists()
    draw = ["--draw", str(tmp_path / "refused.svg"), f"cluster.memory_bytes={held - 1}"]
    assert main(["plan", "--trace", "longtail", *keys, *draw]) == 2
    assert (tmp_path / "refused.svg").read_text().startswith("<svg")
    capsys.readouterr()
    assert main(["plan", "--trace", "tailless", *keys]) == 2
    assert "tailless" in capsys.readouterr().err


def test_signs_of_life_come_while_a_block_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_shared, "EVERY_S", 0.01)
    with signs_of_life(lambda: "planned 3 of 4"):
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith("planned 3 of 4, ") for line in lines)
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_the_fullest_of_a_team_need_not_be_its_first(line: list[str]) -> None:
    keys = [*line, "layout.llm.pp=1", "+layout.encoders.image.tp=2"]
    spec, later = prepare_run(compose_config(keys), WORLD), 0
    for plan in spec.planner.all_domains(2, spec.planner.cursor_of(2)):
        assert plan.domain.team == 2
        ranks = spec.arrangement.global_ranks(plan.number)
        held = {rank: model_footprint(spec, plan, rank).bytes for rank in ranks}
        peak = fullest_rank(spec, [plan])
        assert (peak.rank, peak.bytes) == max(held.items(), key=lambda item: item[1])
        later += ranks.index(peak.rank) % 2
    assert later, "in no domain it was another than the first"
