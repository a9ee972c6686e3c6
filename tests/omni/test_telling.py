"""What ranks tell each other of a step, and when they wait for it."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import RankPool
from small import overrides, write_mixed
from test_bad_items import SKIP, fail_on_sample_1
from test_trainer import make_trainer

from infra.run_folder import read_metrics
from omni.compose import compose_config
from omni.config import Config
from omni.training.idle import OfAllRanks, hear_idle, tell_idle
from parallel.control_of_run import connected
from pipeline.laps import CAUSES


def _idle(rank: int) -> list[OfAllRanks]:
    control = connected(rank, dist.get_world_size(), 60)
    idle = {cause: number * (rank + 1) for number, cause in enumerate(CAUSES)}
    steps = [(idle, 1000), (dict.fromkeys(CAUSES, 1), 100)]
    control.offer("idle", 1, tell_idle(rank, steps, (7, 9, 4)[rank] * 2**30 + rank))
    return hear_idle(control.settle("idle", 1))


def test_what_ranks_held_and_idled_is_known_without_a_number_for_each(ranks: RankPool) -> None:
    found, *others = ranks.run(3, _idle)
    assert others == [found] * 2
    found, after = found
    assert after.idle == dict.fromkeys(CAUSES, 3 / 300)
    assert found.idle == {cause: number * 6 / 3000 for number, cause in enumerate(CAUSES)}
    assert (found.most_bytes, found.fullest, found.least_bytes) == (9 * 2**30, 1, 4 * 2**30)
    assert found.sum_bytes == 20 * 2**30


def _train(rank: int, config: Config, slow_s: float) -> list[tuple[int, bool]]:
    """Train on items of which one is bad in every step, and which take `slow_s` to load on rank 0. Returns
    for each step in which this rank computed a loss whether it knew what was lost before it asked.
    """
    trainer = make_trainer(rank, config, 2)
    encoder = trainer.spec.encoders["image"]
    fail_on_sample_1(encoder, "bad")
    preprocess, lost_here, knew = encoder.preprocess, trainer.lost_here, []

    def slowly(array: Any) -> Any:
        if rank == 0 and array.shape != encoder.blank().shape:
            time.sleep(slow_s)
        return preprocess(array)

    def asked(plan: Any) -> Any:
        knew.append((plan.step, plan.step in trainer.telling.whole))
        return lost_here(plan)

    encoder.preprocess = slowly  # type: ignore[method-assign]
    trainer.lost_here = asked  # type: ignore[method-assign]
    if not slow_s:
        begin = trainer.begin

        def patiently(ahead: Any, step: int) -> Any:
            """Begin a step when the one after it is loaded."""
            until = time.monotonic() + 20
            while step < ahead.last and time.monotonic() < until:
                if (
                    step + 1 in ahead.plans
                    and ahead.plans[step + 1].done()
                    and ahead.failures(step + 1) is not None
                ):
                    break
                time.sleep(0.01)
            return begin(ahead, step)

        trainer.begin = patiently  # type: ignore[method-assign]
    trainer.run()
    return knew


@pytest.mark.parametrize("slow_s", [0.0, 0.1])
def test_lost_items_are_known_a_step_ahead_if_they_are_loaded_by_then_and_count_alike(
    ranks: RankPool, tmp_path: Path, slow_s: float
) -> None:
    """The first rank encodes, and the second one computes losses."""
    write_mixed(tmp_path / "data")
    line = overrides(
        tmp_path / "data", tmp_path / "run", "layout=pp2", "system=megatron", "train.steps=4", *SKIP
    )
    encodes, loses = ranks.run(2, _train, compose_config(line), slow_s)
    assert encodes == []
    assert [step for step, _ in loses] == [1, 2, 3, 4]
    assert [knew for _, knew in loses[1:]] == [not slow_s] * 3
    assert [m["data/skipped/bad_item"] for m in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [
        1,
        2,
        3,
        4,
    ]
