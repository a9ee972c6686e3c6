"""Weights that change in silence on one rank of a run, and runs in which nothing does."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from small import overrides, write_mixed
from test_trainer import make_trainer

from dataloader.storage import Storage
from infra.checkpoint import complete
from infra.run_folder import read_metrics
from omni.compose import compose_config
from omni.config import Config
from omni.rank.state import MOMENTS, owned
from omni.training.trainer import Trainer
from parallel.copies import CorruptionError

EXPERTS = "model.llm.moe={experts: 4, topk: 2, ffn: 48, shared_ffn: 48, dense_layers: 1}"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corruption") / "mixed"
    write_mixed(path)
    return path


def flip_at(trainer: Trainer, step: int, component: str, bit: int) -> None:
    """Have a bit of one weight flip before a step's ops run."""
    run = trainer.rank.engine.run

    def flipping(plan: Any, inputs: Any, watch: Any = None) -> Any:
        if plan.step == step:
            trainer.rank.optimizer.arrive()
            weight = trainer.rank.components[component].parameters[0]
            bits = weight.data.view(torch.int32).view(-1)
            bits[-1] ^= 1 << bit
        return run(plan, inputs, watch)

    trainer.rank.engine.run = flipping  # type: ignore[method-assign]


def _train(rank: int, config: Config, world: int, flips: dict[int, tuple[int, str, int]]) -> str:
    trainer = make_trainer(rank, config, world)
    if rank in flips:
        flip_at(trainer, *flips[rank])
    try:
        trainer.run()
    except CorruptionError as error:
        return str(error)
    return "all well"


@pytest.mark.parametrize(
    ("world", "rank", "flip", "reported", "saved", "who"),
    [
        # The lowest bit of a weight; the comparison of the save after step 4 finds it.
        (4, 2, (4, "llm", 0), 4, 2, "on rank 2 on {host}; not those of the 3 others that agree"),
        # The highest one; that of step 6 does, and names both that have copies.
        (2, 0, (5, "image", 30), 5, 4, "on rank 0 on {host}, rank 1 on {host}; no majority"),
    ],
)
def test_a_flipped_bit_is_named_with_its_rank_before_it_is_saved(
    ranks: RankPool,
    data: Path,
    tmp_path: Path,
    world: int,
    rank: int,
    flip: tuple[int, str, int],
    reported: int,
    saved: int,
    who: str,
) -> None:
    line = overrides(data, tmp_path, "health.compare_every=3", "train.steps=8", "train.checkpoint_every=2")
    messages = ranks.run(world, _train, compose_config(line), world, {rank: flip})
    assert messages == [messages[0]] * world
    step, component, _ = flip
    where = who.format(host=socket.gethostname())
    assert f"{component}: step {step} is the first that computed with other bits {where}" in messages[0]
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["progress/step"] == reported
    assert complete(Storage.at(tmp_path / "checkpoints"))[-1] == saved


def _train_with_flipped_moment(rank: int, config: Config, moment: str) -> str:
    trainer = make_trainer(rank, config, 2)
    run = trainer.rank.engine.run

    def flipping(plan: Any, inputs: Any, watch: Any = None) -> Any:
        if plan.step == 5 and rank == 1:
            component = trainer.rank.components["llm"]
            shard = next(of for of in owned(component, trainer.rank.names["llm"]) if of.adam)
            shard.adam[moment].view(torch.int32).view(-1)[0] ^= 1 << 3
        return run(plan, inputs, watch)

    trainer.rank.engine.run = flipping  # type: ignore[method-assign]
    try:
        trainer.run()
    except CorruptionError as error:
        return str(error)
    return "all well"


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_flipped_bit_of_a_moment_which_has_no_copy_is_named_before_it_is_saved(
    ranks: RankPool, data: Path, tmp_path: Path, moment: str
) -> None:
    line = overrides(data, tmp_path, "health.compare_every=3", "train.steps=8", "train.checkpoint_every=4")
    messages = ranks.run(2, _train_with_flipped_moment, compose_config(line), moment)
    assert messages == [messages[0]] * 2
    where = f"the optimizer's state on rank 1 on {socket.gethostname()}: before the update of step 5"
    assert where in messages[0]
    assert complete(Storage.at(tmp_path / "checkpoints"))[-1] == 4


@pytest.mark.parametrize(
    ("more", "world"),
    [
        (("layout.llm.tp=2", "layout.llm.ep=2", EXPERTS, "model.encoders.image.heads=2"), 4),
        (
            (
                "layout.llm.pp=2",
                "layout.llm.vpp=1",
                "train.precision=bf16",
                "+optim.components.image.frozen=[[2,3]]",
            ),
            4,
        ),
    ],
)
def test_sound_weights_raise_no_alarm(
    ranks: RankPool, data: Path, tmp_path: Path, more: tuple[str, ...], world: int
) -> None:
    line = overrides(data, tmp_path, "health.compare_every=1", "train.steps=4", *more)
    assert ranks.run(world, _train, compose_config(line), world, {}) == ["all well"] * world
