"""Systems measured on real ranks: in turn, on the same samples, from the time all are ready to the update."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import RankError, RankPool
from small import overrides, write_mixed

from infra.run_folder import RunFolder
from omni.commands._side_by_side import MeasuredSystem, lines
from omni.compose import compose_config
from omni.config import Config
from omni.planning.prepare import prepare_run
from omni.training.ahead import Prepared
from omni.training.side_by_side import WARMUP, alternate, interval, over
from omni.training.trainer import Trainer

TURNS, SLOW_S = 4, 0.02


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> list[Config]:
    """Of three systems."""
    folder = tmp_path_factory.mktemp("side_by_side")
    write_mixed(folder / "data")
    keys = ("data.sample_tokens=160", "layout.llm.pp=2", f"train.steps={WARMUP + TURNS}")
    names = ("megatron", "multiplexed", "mimo_colocated")
    return [
        compose_config(overrides(folder / "data", folder / name, *keys, f"system={name}")) for name in names
    ]


def measured(rank: int, configs: list[Config]) -> tuple[list[list[float]], list[tuple[int, int]]]:
    """What a rank measures, and the trainer and step that each turn asks for."""
    trainers = [
        Trainer(prepare_run(of, 2), RunFolder.create(Path(of.run.dir)), rank, torch.device("cpu"))
        for of in configs
    ]
    asked = []

    def before(trainer: Trainer, prepared: Prepared) -> None:
        at, step = trainers.index(trainer), prepared.plan.step
        asked.append((at, step))
        if (at, step, rank) == (2, 1, 0):  # what one rank takes, all wait for
            trainer.rank.engine.on_op = lambda op: time.sleep(SLOW_S)

    found = alternate(trainers, TURNS, before)
    for trainer in trainers:
        trainer.control.barrier("the end")
        trainer.close()
    return found, asked


def test_each_system_has_a_step_in_every_turn_and_all_ranks_see_who_is_slow(
    ranks: RankPool, configs: list[Config]
) -> None:
    every = ranks.run(2, measured, configs)
    for found, asked in every:
        assert [len(of) for of in found] == [TURNS] * len(configs)
        assert sorted(asked) == [(at, step) for at in range(3) for step in range(1, WARMUP + TURNS + 1)]
        assert {at for at, _ in asked[::3]} == {0, 1, 2}, "who is first changes"
        low = over(found[2], found[1])[1]
        assert low > 1
    assert every[0][1] == every[1][1]


def test_systems_that_train_on_other_samples_are_not_measured(ranks: RankPool, configs: list[Config]) -> None:
    other = replace(configs[1], data=replace(configs[1].data, step_samples=4))
    with pytest.raises(RankError, match="systems train on different samples"):
        ranks.run(2, measured, [configs[0], other])


def test_an_interval_holds_the_median_of_such_values_nineteen_times_of_twenty() -> None:
    draw = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(400):
        _, low, high = interval(torch.randn(60, generator=draw).exp().tolist())
        held += low <= 1 <= high
    assert 0.92 < held / 400 < 0.99
    assert interval([3.0]) == (3, 3, 3)


def test_the_table_has_the_quickest_first_and_whoever_is_refused() -> None:
    slow, quick = MeasuredSystem("slow", [2.0, 4.0, 6.0]), MeasuredSystem("quick", [1.0, 2.0, 4.0])
    title, _, *rows = lines([slow, MeasuredSystem("none", refused="no ranks"), quick])
    assert "measured, 3 turns" in title
    assert [row.split()[:3] for row in rows] == [
        ["quick", "2,000.0", "1.000"],
        ["slow", "4,000.0", "2.000"],
        ["none", "refused:", "no"],
    ]
