"""Steps that are settled when the next one is under way, as on a GPU: the same run, and no wait in between.

A CPU has computed a step when the host is done with it, so ranks here are told that their device queues.
"""

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from small import overrides, write_mixed
from test_trainer import make_trainer

from infra.run_folder import read_metrics
from omni.compose import compose_config
from omni.config import Config
from omni.rank.optimizer import JointOptimizer
from omni.rank.totals import StepSums
from omni.training.evaluate import Evaluator
from omni.training.progression import NoUpdateError
from omni.training.trainer import Trainer
from parallel.copies import sum_of_bits
from pipeline.engine import Engine

FROZEN = "+optim.components.image={frozen: [[4, 6]]}"
TIMES = (
    "startup/",
    "perf/",
    "plan/",
    "data/wait",
    "data/decode",
    "data/read",
    "data/cache",
    "mem/",
    "health/slowest",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("settling") / "mixed"
    write_mixed(path)
    return path


def queueing(rank: int, config: Config, world: int, queues: bool = True) -> Trainer:
    trainer = make_trainer(rank, config, world)
    trainer.queues = queues
    return trainer


def bits(trainer: Trainer) -> int:
    """A sum of the bits of all weights and moments of a rank."""
    components = trainer.rank.components.values()
    weights = [parameter for of in components for parameter in of.parameters]
    return int(sum_of_bits([*weights, *trainer.rank.moments()]))


def records(folder: Path) -> list[dict[str, float]]:
    """The records of a run without what the clock tells."""
    return [
        {key: value for key, value in record.items() if not key.startswith(TIMES)}
        for record in read_metrics(folder / "metrics.jsonl")
    ]


def _train(
    rank: int, config: Config, world: int, queues: bool, spoiled: int = 0, stop_at: int = 0
) -> tuple[int, int, bool]:
    """Train, with a norm that is not finite at step `spoiled`, and the last rank asked to stop in step
    `stop_at`. Returns the last step, bits of the state, and whether all steps are done.
    """
    trainer, squares, launch = queueing(rank, config, world, queues), JointOptimizer.squares, Trainer.run_step
    last, at = rank == world - 1, [0]

    def run_step(own: Trainer, prepared: Any, watch: Any = None) -> Any:
        at[0] = prepared.plan.step
        if last and at[0] == stop_at:
            own.stop.signal_name = "SIGTERM"
        return launch(own, prepared, watch)

    def norm(own: JointOptimizer) -> torch.Tensor:
        return squares(own) * (torch.inf if last and at[0] == spoiled else 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "run_step", run_step)
        patch.setattr(JointOptimizer, "squares", norm)
        done = trainer.run()
    return trainer.step, bits(trainer), done


@pytest.mark.parametrize(
    "layout",
    ["layout.llm.pp=2", pytest.param("layout.llm.tp=2", marks=pytest.mark.slow), "layout.llm.pp=1"],
)
def test_a_run_is_the_same_whenever_its_steps_are_settled(
    ranks: RankPool, data: Path, tmp_path: Path, layout: str
) -> None:
    more = ["train.steps=9", "train.checkpoint_every=5", "health.compare_every=4", FROZEN, layout]
    found = []
    for queues in (False, True):
        config = compose_config(overrides(data, tmp_path / str(queues), *more))
        found.append(ranks.run(2, _train, config, 2, queues, 2))
    at_once, late = found
    assert late == at_once
    assert all((step, done) == (9, True) for step, _, done in late)
    told = records(tmp_path / "True")
    assert told == records(tmp_path / "False")
    assert [record["progress/step"] for record in told] == list(range(1, 10))
    assert [record["optim/skipped_steps"] for record in told] == [0, *[1] * 8]
    frozen = [record["progress/step"] for record in told if "optim/grad_norm/image" not in record]
    assert frozen == [4, 5]
    idle = [record["perf/idle_frac"] for record in read_metrics(tmp_path / "True" / "metrics.jsonl")]
    assert len(set(idle)) == 9, "each step has its own"


def test_all_ranks_stop_a_step_later_and_go_on_from_there(
    ranks: RankPool, data: Path, tmp_path: Path
) -> None:
    whole, run = (
        compose_config(overrides(data, tmp_path / name, "train.steps=8", "train.checkpoint_every=6"))
        for name in ("whole", "stopped")
    )
    uninterrupted = ranks.run(2, _train, whole, 2, True)
    stopped = ranks.run(2, _train, run, 2, True, 0, 3)
    assert [(step, done) for step, _, done in stopped] == [(4, False)] * 2
    assert [record["progress/step"] for record in records(tmp_path / "stopped")] == [1, 2, 3, 4]
    assert ranks.run(2, _train, run, 2, True) == uninterrupted
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")


@pytest.mark.parametrize("asked, at", [(1, 2), (5, 6), (6, 6), (7, 8), (8, 8)])
def test_a_stop_around_a_save_and_the_end_is_at_a_step_that_is_saved(
    ranks: RankPool, data: Path, tmp_path: Path, asked: int, at: int
) -> None:
    line = overrides(data, tmp_path / "run", "train.steps=8", "train.checkpoint_every=6")
    found = ranks.run(2, _train, compose_config(line), 2, True, 0, asked)
    assert [(step, done) for step, _, done in found] == [(at, False)] * 2
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir()]
    assert any(name.endswith(str(at)) for name in saved), saved


def _order(rank: int, config: Config, world: int) -> str:
    """R where a step's ops run, u where weights are updated, t where the host reads totals."""
    seen = []

    def noted(name: str, function: Any) -> Any:
        return lambda *args: (seen.append(name), function(*args))[1]

    signs = ((Engine, "run", "R"), (JointOptimizer, "update", "u"), (StepSums, "read", "t"))
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, sign in signs:
            patch.setattr(owner, name, noted(sign, getattr(owner, name)))
        queueing(rank, config, world).run()
    return "".join(seen)


@pytest.mark.parametrize(
    "keys, order",
    [
        (("health.compare_every=0",), "Ru Rtu Rtu Rtut"),
        (("health.compare_every=0", "train.checkpoint_every=2"), "Ru Rtut Ru Rtut"),
        (("health.compare_every=3",), "Ru Rtu Rttu Rut"),
    ],
)
def test_totals_are_read_behind_the_next_passes_unless_something_is_due(
    ranks: RankPool, data: Path, tmp_path: Path, keys: tuple[str, ...], order: str
) -> None:
    line = overrides(data, tmp_path / "run", "train.steps=4", *keys)
    assert ranks.run(2, _order, compose_config(line), 2) == [order.replace(" ", "")] * 2


def _slowly(rank: int, config: Config, world: int) -> float:
    """Train with a pause before each step's passes; how many seconds that took in all."""
    run, start = Engine.run, time.perf_counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "run", lambda *given: (time.sleep(0.3), run(*given))[1])
        queueing(rank, config, world).run()
    return time.perf_counter() - start


def test_no_time_counts_for_two_steps(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    (whole,) = ranks.run(1, _slowly, compose_config(overrides(data, tmp_path, "train.steps=6")), 1)
    took = [record["perf/step_s"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert 6 * 0.3 < sum(took) < whole, took


def _inputs_after(rank: int, config: Config, world: int) -> bool:
    """Whether inputs of a step that has run and is not settled are still there."""
    trainer = make_trainer(rank, config, world)
    with trainer.ahead() as ahead:
        prepared = trainer.begin(ahead, 1)
        inputs = weakref.ref(prepared.inputs.microbatches[0])
        done = trainer.run_step(prepared)
        del prepared
        gc.collect()
        return done.lost == 0 and inputs() is not None


def test_a_step_that_is_not_settled_holds_no_inputs(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    line = overrides(data, tmp_path)
    assert ranks.run(1, _inputs_after, compose_config(line), 1) == [False]


def _breaks(rank: int, config: Config, world: int, queues: bool, of: str) -> str:
    """Train until something fails on all ranks: the passes of step 4, or held-out losses after step 3."""
    trainer, run, calls = queueing(rank, config, world, queues), Engine.run, []

    def passes(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("the device is gone")
        return run(*given)

    def losses(*_: Any) -> dict[str, float]:
        raise RuntimeError("no held-out sample is there")

    with pytest.MonkeyPatch.context() as patch:
        if of == "passes":
            patch.setattr(Engine, "run", passes)
        else:
            patch.setattr(Evaluator, "losses", losses)
        with pytest.raises(RuntimeError) as caught:
            trainer.run()
    return str(caught.value)


@pytest.mark.parametrize("of, queues", [("passes", True), ("passes", False), ("losses", True)])
def test_the_step_before_one_that_fails_has_its_record(
    ranks: RankPool, data: Path, tmp_path: Path, of: str, queues: bool
) -> None:
    keys = (
        ["train.eval_every=3", f"+data.heldout.mixed={{path: {data}, samples: 2}}"] if of == "losses" else []
    )
    whole, broken = (overrides(data, tmp_path / name, "train.steps=5") for name in ("whole", "broken"))
    ranks.run(1, _train, compose_config(whole), 1, queues)
    (said,) = ranks.run(1, _breaks, compose_config([*broken, *keys]), 1, queues, of)
    assert said in ("the device is gone", "no held-out sample is there")
    losses = [[record["loss/train"] for record in records(tmp_path / name)] for name in ("whole", "broken")]
    assert losses[1] == losses[0][:3]


def _fails(rank: int, config: Config, world: int) -> tuple[int, str]:
    trainer = queueing(rank, config, world)
    for component in trainer.rank.components.values():
        for parameter in component.parameters:
            parameter.data.fill_(torch.nan)
    with pytest.raises(NoUpdateError) as caught:
        trainer.run()
    return trainer.step, str(caught.value)


def test_a_run_that_no_longer_updates_ends_on_all_ranks_with_its_records(
    ranks: RankPool, data: Path, tmp_path: Path
) -> None:
    line = overrides(data, tmp_path, "train.steps=9", "optim.max_skipped=4")
    found = ranks.run(2, _fails, compose_config(line), 2)
    assert found[0] == found[1]
    assert found[0][0] == 4
    assert [record["optim/skipped_steps"] for record in records(tmp_path)] == [1, 2, 3, 4]
