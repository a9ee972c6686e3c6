"""Costs that a run learns, on real ranks, with planted op times in place of the clock's."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranks import RankPool
from small import overrides, write_mixed
from test_trainer import make_trainer
from work_costs import work_cost

from infra.run_folder import read_metrics
from omni.compose import compose_config
from omni.config import Config
from omni.planning.prepare import prepare_run
from omni.training.learning import CostTables
from omni.training.trainer import Trainer
from parallel.cluster import Link, Links
from parallel.consensus import DivergenceError
from parallel.costs import CostTable
from parallel.laws import Law, Laws
from parallel.learning import Sample
from pipeline.costs import measured
from pipeline.ops import Kind

STEPS = 12
FACTORS = {"llm/0": ((1.3, 0.8, 0.5), (0.9, 1.5, 0.4)), "image": ((1.9, 0.6, 0.7), (2.4, 1.2, 0.6))}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("learning") / "mixed"
    write_mixed(path)
    return path


def scaled(law: Law, factors: tuple[float, ...]) -> Law:
    return Law(*(int(of * factor) for of, factor in zip(law.coefficients, factors, strict=True)))


def true_laws(table: CostTable) -> dict[str, Laws]:
    """What ops really take: far from what is stated, forward and backward by other factors."""
    return {
        name: Laws(
            scaled(table.parts[name].stated.forward, forward),
            scaled(table.parts[name].stated.input, back),
            scaled(table.parts[name].stated.weight, back),
        )
        for name, (forward, back) in FACTORS.items()
    }


def plant(trainer: Trainer) -> None:
    """Have ops take what the true laws say, off by noise that is the rank's own, one in 25 by five times."""
    laws, engine, rank = true_laws(trainer.spec.table), trainer.rank.engine, trainer.rank.rank
    run = engine.run

    def planted(plan: Any, inputs: Any, watch: Any = None) -> Any:
        result = run(plan, inputs, watch)
        rng = random.Random(1000 * plan.step + rank)

        def taken(timing: Any) -> int:
            table, pairs = trainer.spec.table, [(timing.op, 0)]
            for s in measured(plan.domain, table, engine.domain_rank, pairs, talks=False):
                noise = rng.gauss(1, 0.03) * rng.choice([5] + [1] * 24)
                return int(laws[s.part].ns(s.tokens, s.squares, s.direction) * noise)
            return 0

        result.timings = [timing._replace(busy_ns=taken(timing)) for timing in result.timings]
        return result

    engine.run = planted  # type: ignore[method-assign]


def _learn(rank: int, config: Config) -> tuple[dict[int, tuple], dict[int, tuple]]:
    """Train; return by step the digests of its plan, and the table that it was planned with."""
    trainer = make_trainer(rank, config, 2)
    plant(trainer)
    digests, tables, agree_on = {}, {}, trainer.agree_on

    def noting(plan: Any) -> Any:
        digests[plan.step] = plan.digests
        tables[plan.step] = (plan.cost_table, plan.learnt)
        return agree_on(plan)

    trainer.agree_on = noting  # type: ignore[method-assign]
    trainer.run()
    return digests, tables


def errors_of(metrics: list[dict], part: str, steps: range) -> list[float]:
    """Prediction errors of a part in some steps, those apart in which a disturbed op is a part of the sum."""
    return sorted(abs(metrics[step - 1][f"plan/pred_error/{part}"]) for step in steps)


def test_a_run_learns_what_ops_take_and_goes_on_with_it(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    """An encoder heavier than the LLM, on two ranks that measure different noise."""
    line = overrides(data, tmp_path, "costs.learn=true", f"train.steps={STEPS}", samples=32)
    line += ["train.checkpoint_every=9", "model.encoders.image.layers=6", "model.encoders.image.ffn=256"]
    line += ["pipeline.encoder_bytes=1000000000000"]  # else a rank has one encoder batch a step to learn from
    (digests, tables), (_, others) = ranks.run(2, _learn, compose_config(line))
    assert tables == others
    numbers = [tables[step][0] for step in range(1, STEPS + 1)]
    assert numbers[:6] == [0] * 6, "the first step is left out, the second one's table comes five steps later"
    assert numbers[6] == 1
    assert numbers == sorted(numbers)

    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert [m["plan/cost_table"] for m in metrics] == numbers
    for part in FACTORS:
        before, after = (errors_of(metrics, part, steps) for steps in (range(1, 6), range(7, STEPS + 1)))
        assert min(before) > 0.15
        assert after[len(after) // 2] < 0.08
    laws, true = dict(tables[STEPS][1]), true_laws(make_table(line))
    for name, of in true.items():
        for tokens in (40, 160):
            for direction in (None, "both"):
                load = tokens, tokens**2 // 2
                assert laws[name].ns(*load, direction) == pytest.approx(of.ns(*load, direction), rel=0.08)

    # Continued after step 9, the steps are planned as they were.
    checkpoints = sorted((tmp_path / "checkpoints").glob("step_*"))
    assert len(checkpoints) == 2
    shutil.rmtree(checkpoints[1])
    (again, _), _ = ranks.run(2, _learn, compose_config(line))
    assert again == {step: digests[step] for step in range(10, STEPS + 1)}


def make_table(line: list[str]) -> CostTable:
    return prepare_run(compose_config(line), 2).table


def _diverge(rank: int, config: Config) -> str:
    trainer = make_trainer(rank, config, 2)
    stated = trainer.tables.stated
    laws = stated.parts["image"].stated
    if rank == 1:
        laws = replace(laws, weight=replace(laws.weight, token_fs=laws.weight.token_fs + 1))
    trainer.tables.since = {0: stated.with_laws(3, {"image": laws})}
    with trainer.ahead() as ahead:
        try:
            trainer.agree_on(trainer.begin(ahead, 1).plan)
        except DivergenceError as error:
            return str(error)
    return "agreed"


def test_a_table_that_differs_between_ranks_is_named(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    message = ranks.run(2, _diverge, compose_config(overrides(data, tmp_path)))[0]
    assert "It is the plan of the world: 1 of 2 ranks" in message
    assert "rank 0 against rank 1: plan.world.learnt[0][1].weight.token_fs: " in message


# Which table times which step, on one rank.

ONE = CostTable(0, {"image": work_cost(10**8, 10**5, 10**5)}, Links(Link(1, 1), Link(1, 1)), row_bytes=4)


def alone(stated: CostTable = ONE) -> CostTables:
    return CostTables(stated)


def steps_of(tables: CostTables, steps: range, factor: int) -> None:
    """Go through steps in which ops take so many times what is stated. What is told of one is heard when the
    next is done.
    """
    cost = tables.stated.parts["image"]
    for step in steps:
        sizes = [(100 * n, 10**4 * n) for n in range(1, 5)]
        told = tables.tell(Sample("image", None, *size, factor * cost.compute_ns(*size)) for size in sizes)
        tables.hear(step, {name: tuple(sums) for name, (_, sums) in told.items()})


@pytest.mark.parametrize("some", [True, False])
def test_backwards_that_alone_are_computed_anew_teach_nothing(data: Path, tmp_path: Path, some: bool) -> None:
    """Where all passes are, as with recompute=full, their backwards teach what these take."""
    of_some = ("model.llm.recompute_long=true", "packing.divisor=4")
    keys = of_some if some else ("model.llm.recompute=full",)
    spec = prepare_run(compose_config(overrides(data, tmp_path, *keys)), 1)
    domain = spec.planner.next_step(1, 0, 0).domain
    passes = [op for op in domain.ops[0] if op.kind in (Kind.FORWARD, Kind.BACKWARD)]
    samples = list(measured(domain, spec.table, 0, ((op, 10**6) for op in passes), talks=False))
    anew = {m: batch.anew for m, batch in enumerate(domain.microbatches)}
    assert set(anew.values()) == ({False, True} if some else {True})
    assert len([of for of in samples if of.direction is None]) == len(anew)
    backward = [of for of in samples if of.direction is not None]
    assert len(backward) == (list(anew.values()).count(False) if some else len(anew))


def test_a_table_takes_effect_at_the_first_step_whose_plan_is_not_begun() -> None:
    tables = alone()
    steps_of(tables, range(1, 9), 3)
    # The first step is left out, and one step has too few samples: step 3 is the first that teaches.
    assert [tables.at(step).number for step in range(1, 12)] == [0] * 7 + [1] * 4
    assert tables.at(8).parts["image"].forward_ns(100, 10**4) == pytest.approx(
        3 * ONE.parts["image"].forward_ns(100, 10**4), rel=0.01
    )


def test_a_checkpoint_holds_the_tables_of_all_later_steps() -> None:
    tables = alone()
    for step in range(1, 40):
        steps_of(tables, range(step, step + 1), 3 if step < 6 else 9)
        again = alone()
        assert again.restore(json.loads(json.dumps(tables.state(step))))
        assert [again.at(n) for n in range(step + 1, 50)] == [tables.at(n) for n in range(step + 1, 50)]
        assert len(tables.since) <= 6
    assert tables.at(50).number > 1
    slower = alone(replace(ONE, parts={"image": work_cost(10**8, 10**5, 10**5 + 1)}))
    assert not slower.restore(tables.state(39))
    assert slower.at(60) is slower.stated
