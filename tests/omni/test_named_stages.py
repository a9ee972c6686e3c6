"""Stages of one run: what learns in each and how fast, kept when it goes on, and refused by name."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from ranks import RankPool
from small import overrides, write_mixed
from test_trainer import make_trainer

from infra.run_folder import read_metrics
from omni.compose import compose_config, load_config
from omni.compose_saved import compose_saved
from omni.config import Config, ConfigError
from omni.models.llm import NAME as LLM
from omni.planning.held_state import OF_PARAMETER
from omni.planning.memory import model_peak
from omni.planning.optim_schedule import first_steps, frozen_at, learning_rate, rate_at, stages_of
from omni.planning.prepare import prepare_run
from omni.planning.rank_work import rank_work
from omni.training.fingerprint import fingerprint
from parallel.work import virtual_stage_name

ALIGN = "align: {steps: 2, optim: {lr: 2e-3, warmup_steps: 0, components: {llm: {frozen: true}}}}"
TUNE = "tune: {steps: 3, optim: {schedule: wsd, components: {image: {lr: 1e-4, schedule: cosine}}}}"
STAGES = f"+stages={{{ALIGN}, {TUNE}}}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data")
    write_mixed(path / "mixed")
    return path


def composed(*more: str):
    return compose_config(["optim.lr=1e-3", "optim.warmup_steps=0", STAGES, *more])


def stages(*more: str):
    config = composed(*more)
    return stages_of(config.optim, config.stages, config.train.steps)


def test_rates_and_freezing_are_those_of_the_stage_and_its_own_steps():
    assert composed().train.steps == 5
    found = stages()
    assert [frozen_at(found, step) for step in range(1, 6)] == [("llm",), ("llm",), (), (), ()]
    align, tune = composed().stages["align"].optim, composed().stages["tune"].optim
    assert [rate_at(found, "image", step) for step in (1, 2)] == [learning_rate(align, n, 2) for n in (1, 2)]
    assert rate_at(found, "llm", 1) == 0
    assert [rate_at(found, "llm", step) for step in (3, 4)] == [learning_rate(tune, n, 3) for n in (1, 2)]
    own = replace(tune, lr=1e-4, schedule="cosine")
    assert rate_at(found, "image", 4) == learning_rate(own, 2, 3) != learning_rate(tune, 2, 3)
    assert first_steps(found, ("llm", "image")) == {"llm": 3, "image": 1}
    late = stages("+stages.tune.optim.components.llm.frozen=[[1,3]]")
    assert [frozen_at(late, step) for step in range(1, 6)] == [("llm",)] * 4 + [()]
    assert first_steps(late, ("llm",)) == {"llm": 5}


def test_resolved_stages_are_read_again_as_they_are(tmp_path: Path):
    config = composed("run.dir=mine")
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    assert load_config(tmp_path / "config.yaml") == config
    fork = compose_saved(config, ["optim.clip=2", "optim.lr=5e-4", "stages.tune.optim.min_lr=1e-5"])[0]
    assert [of.optim.clip for of in fork.stages.values()] == [2, 2], "a stage did not say it"
    assert [of.optim.lr for of in fork.stages.values()] == [2e-3, 5e-4], "the first has a rate of its own"
    assert [of.optim.min_lr for of in fork.stages.values()] == [0, 1e-5]
    longer = compose_saved(config, ["stages.tune.steps=7"])[0]
    assert (longer.train.steps, longer.stages["tune"].steps) == (9, 7)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train.steps=7", "train.steps=7: the stages have 5 steps together"),
        ("+stages.tune.optim.clip=2", "stages.tune.optim.clip=2.0: a stage changes lr"),
        ("+stages.tune.optim.rl=2", "stages.tune.optim.rl"),
        ("+stages.last.optim.lr=1", "stages.last.steps: "),
        ("stages.tune.steps=0", "stages.tune.steps=0: must be at least 1"),
        ("stages.align.optim.components.llm.frozen=always", "frozen=always: give true, false, or spans"),
        ("stages.tune.optim.components.image.schedule=up", "image.schedule=up: choose one of"),
    ],
)
def test_mistakes_in_stages_are_named(text: str, words: str):
    with pytest.raises(ConfigError) as error:
        composed(text)
    assert words in str(error.value)


# On ranks.


def _train(rank: int, config: Config, world: int = 1) -> None:
    make_trainer(rank, config, world).run()


def _line(folder: Path, run: Path, *more: str) -> list[str]:
    rates = ["optim.lr=1e-3", "optim.warmup_steps=0", "train.checkpoint_every=1", "train.keep_checkpoints=9"]
    line = overrides(folder / "mixed", run, *rates, *more)
    return [*(key for key in line if not key.startswith("train.steps=")), STAGES]


def _learnt(run: Path) -> list[dict[str, float]]:
    return [
        {key: value for key, value in of.items() if key.startswith(("loss/", "optim/", "progress/stage"))}
        for of in read_metrics(run / "metrics.jsonl")
    ]


def test_a_run_goes_on_inside_a_stage_to_the_bit_and_metrics_say_the_stage(
    ranks: RankPool, folder: Path, tmp_path: Path
):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    ranks.run(1, _train, compose_config(_line(folder, whole)))
    records = _learnt(whole)
    assert [of["progress/stage"] for of in records] == [1, 1, 2, 2, 2]
    assert ["optim/lr/llm" in of for of in records] == [False, False, True, True, True]
    shutil.copytree(whole, broken)
    for step in (5, 4):  # the run is as it was after step 3, the first of its second stage
        shutil.rmtree(broken / "checkpoints" / f"step_{step:08d}")
    (broken / "summary.json").unlink()
    ranks.run(1, _train, compose_config(_line(folder, broken)))
    assert _learnt(broken) == records


def _losses(ranks: RankPool, folder: Path, run: Path, world: int, *more: str) -> list[float]:
    ranks.run(world, _train, compose_config(_line(folder, run, "optim.eps=1e-4", *more)), world)
    return [of["loss/train"] for of in _learnt(run)]


@pytest.fixture(scope="module")
def alone(ranks: RankPool, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one rank."""
    return _losses(ranks, folder, tmp_path_factory.mktemp("alone"), 1)


@pytest.mark.parametrize("axis", ["tp", "cp", "dp"])
def test_what_thaws_in_a_later_stage_learns_the_same_under_any_layout(
    ranks: RankPool, folder: Path, tmp_path: Path, alone: list[float], axis: str
):
    losses = _losses(ranks, folder, tmp_path, 2, f"layout.llm.{axis}=2")
    assert len(losses) == 5
    assert losses == pytest.approx(alone, rel=1e-5)


def test_stages_that_are_past_may_not_change_and_the_last_may_be_longer(folder: Path, tmp_path: Path):
    line = _line(folder, tmp_path)
    before = fingerprint(prepare_run(compose_config(line), 1))
    longer = fingerprint(prepare_run(compose_config([*line, "stages.tune.steps=9"]), 1))
    assert longer == before
    other = fingerprint(prepare_run(compose_config([*line, "stages.align.steps=3"]), 1))
    assert {key for key in before if before[key] != other[key]} == {"stages.tune.first"}


def test_memory_of_moments_begins_where_a_component_first_learns_and_stays(folder: Path, tmp_path: Path):
    back = "back: {steps: 2, optim: {components: {image: {frozen: true}}}}"
    line = [*_line(folder, tmp_path)[:-1], f"+stages={{{ALIGN}, {TUNE}, {back}}}"]
    spec = prepare_run(compose_config(line), 1)
    held = {}
    for step in (1, 3, 6):
        plan = spec.planner.next_step(step, 0, 0)
        parts, _ = model_peak(spec, rank_work(spec, plan, 0))
        held[step] = {name: parts["optimizer", name] for name in ("llm", "image")}
    tables = OF_PARAMETER * len(spec.work[virtual_stage_name(LLM, 0)].weights())
    assert held[1]["llm"] == tables < held[1]["image"]
    assert held[3]["llm"] > 100 * tables
    assert held[6] == held[3], "moments of what is frozen again are still there"
