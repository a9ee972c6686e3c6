"""The device divides, clips and skips by itself: the host learns of a step while it updates."""

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from small import overrides, write_mixed
from test_trainer import make_trainer

from omni.compose import compose_config
from omni.config import Config
from omni.rank.optimizer import JointOptimizer
from omni.rank.totals import StepSums
from omni.training.trainer import Trainer
from pipeline.engine import _RunningStep
from pipeline.ops import Op

LAYOUTS = {
    "dp2": (2, []),
    "pp2 of experts": (2, ["layout.llm.pp=2", "model.llm.moe={experts: 4, topk: 2, ffn: 48}"]),
    "zero 2": (2, ["layout.domain=2", "layout.llm.zero=2"]),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("skipped") / "mixed"
    write_mixed(path)
    return path


def held(trainer: Trainer) -> list[torch.Tensor]:
    """Copies of all that an update may change: weights, what optimizers keep of them, the bias of experts."""
    trainer.rank.optimizer.arrive()
    components = trainer.rank.components.values()
    found = [parameter.data for component in components for parameter in component.parameters]
    for component in components:
        for parameter, (optimizer, main) in component.main_weights().items():
            assert parameter.shape
            found += [main.data, *optimizer.optimizer.state[main].values()]
    if trainer.rank.stage is not None:
        found += trainer.rank.stage.biases().values()
    return [each.clone() for each in found]


def _skips(rank: int, config: Config, world: int) -> tuple[list[bool], list[int]]:
    """Whether steps 1 to 3 changed anything, of which the second has a norm that is not finite; and the steps
    that were skipped so far.
    """
    trainer = make_trainer(rank, config, world)
    changed, skipped = [], []
    squares = JointOptimizer.squares
    with trainer.ahead() as ahead:
        for step in (1, 2, 3):
            before = held(trainer)
            with pytest.MonkeyPatch.context() as patch:
                if step == 2 and rank == world - 1:
                    patch.setattr(JointOptimizer, "squares", lambda own: squares(own) * torch.inf)
                trainer.update(trainer.run_step(trainer.begin(ahead, step)))
            after = held(trainer)
            changed.append(len(before) != len(after) or not all(map(torch.equal, before, after)))
            skipped.append(trainer.progression.skipped_steps)
    trainer.end()
    return changed, skipped


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_whose_norm_is_not_finite_changes_nothing(
    ranks: RankPool, data: Path, tmp_path: Path, layout: str
) -> None:
    world, keys = LAYOUTS[layout]
    line = overrides(data, tmp_path / "run", "train.steps=3", "health.compare_every=0", *keys)
    for changed, skipped in ranks.run(world, _skips, compose_config(line), world):
        assert changed == [True, False, True]
        assert skipped == [0, 1, 1]


def _spoiled(rank: int, config: Config, world: int) -> list[tuple[bool, int]]:
    """Whether each of four steps changed anything, and the steps that were skipped so far. In all but the
    first, the last rank alone has an infinity in a gradient: of the embedding, a norm, an encoder's linear.
    """
    trainer = make_trainer(rank, config, world)
    of = {name: list(component.parameters) for name, component in trainer.rank.components.items()}
    spoiled, found, reduce = deque[torch.nn.Parameter](), [], _RunningStep.reduce

    def reducing(own: _RunningStep, op: Op) -> None:
        if spoiled and rank == world - 1:
            spoiled.pop().main_grad.view(-1)[0] = torch.inf
        reduce(own, op)

    with pytest.MonkeyPatch.context() as patch, trainer.ahead() as ahead:
        patch.setattr(_RunningStep, "reduce", reducing)
        for step, parameter in enumerate((None, of["llm"][0], of["llm"][4], of["image"][2]), start=1):
            before = held(trainer)
            spoiled.extend([parameter] if parameter is not None else [])
            trainer.update(trainer.run_step(trainer.begin(ahead, step)))
            changed = not all(map(torch.equal, before, held(trainer)))
            found.append((changed, trainer.progression.skipped_steps))
    trainer.end()
    return found


@pytest.mark.parametrize("layout", ["layout.llm.tp=2", "layout.llm.cp=2"])
def test_an_infinity_in_the_gradients_of_one_rank_is_skipped_by_all(
    ranks: RankPool, data: Path, tmp_path: Path, layout: str
) -> None:
    line = overrides(data, tmp_path / "run", "train.steps=4", "health.compare_every=0", layout)
    expected = [(True, 0), (False, 1), (False, 2), (False, 3)]
    assert ranks.run(2, _spoiled, compose_config(line), 2) == [expected] * 2


def _order(rank: int, config: Config, world: int) -> list[str]:
    seen = []

    def noted(name: str, function: Any) -> Any:
        return lambda *args: (seen.append(name), function(*args))[1]

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((JointOptimizer, "update"), (StepSums, "read")):
            patch.setattr(owner, name, noted(name, getattr(owner, name)))
        make_trainer(rank, config, world).run()
    return seen


@pytest.mark.parametrize("every, orders", [(0, "ur ur ur"), (2, "ur ru ur")])
def test_the_host_reads_totals_once_and_after_the_update_is_begun_but_where_copies_are_compared(
    ranks: RankPool, data: Path, tmp_path: Path, every: int, orders: str
) -> None:
    line = overrides(data, tmp_path / "run", "train.steps=3", f"health.compare_every={every}")
    for seen in ranks.run(2, _order, compose_config(line), 2):
        assert "".join(name[0] for name in seen) == orders.replace(" ", "")
