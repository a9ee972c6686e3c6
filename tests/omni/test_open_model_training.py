"""Published weights trained for thirty steps of AdamW, beside plain torch on transformers' model."""

from pathlib import Path

import pytest
import torch
from open_model_folders import make
from ranks import RankPool
from small import with_values
from test_open_models import configured, data, expected

from infra.run_folder import RunFolder
from omni.config import Config
from omni.planning.prepare import prepare_run
from omni.training.trainer import Trainer

__all__ = ["data"]  # a fixture

LAYOUTS = {"one": (1, {}), "tp2 pp2": (4, {"layout.llm.tp": 2, "layout.llm.pp": 2})}


def losses_of(rank: int, config: Config, world: int) -> list[float]:
    """The losses of all steps of a run."""
    folder = RunFolder.create(Path(config.run.dir))
    trainer = Trainer(prepare_run(config, world), folder, rank, torch.device("cpu"))
    trainer.saving.restore()
    losses = []
    with trainer.ahead() as ahead:
        for step in range(1, config.train.steps + 1):
            done = trainer.run_step(trainer.begin(ahead, step))
            trainer.update(done)
            losses.append(done.totals.loss)
    trainer.control.barrier("the end")
    trainer.close()
    return losses


def plain_losses(model: torch.nn.Module, steps: int) -> list[float]:
    """The same in plain torch: AdamW, clipping, decay of matrices alone.

    Not at twice this rate: there the last steps multiply a rounding by a thousand, in any two programs.
    """
    matrices = [of for of in model.parameters() if of.dim() > 1]
    vectors = [of for of in model.parameters() if of.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-4, betas=(0.9, 0.95), eps=1e-4)
    losses = []
    for _ in range(steps):
        losses.append(expected(model)[0])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "tp2 pp2"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_5_text"])
def test_thirty_steps_of_adamw_lose_what_plain_torch_loses(
    ranks: RankPool, data, tmp_path, family, layout
) -> None:
    (world, values), folder, steps = LAYOUTS[layout], tmp_path / "published", 30
    model = make(family, folder)
    more = ("optim.lr=5e-4", "optim.min_lr=5e-4", "optim.eps=1e-4", "train.steps=30")
    config = with_values(configured(data, folder, tmp_path / "run", *more), values)
    found = ranks.run(world, losses_of, config, world)[0]
    plain = plain_losses(model, steps)
    assert plain[-1] < plain[0] - 1
    assert max(abs(own - of) for own, of in zip(found, plain, strict=True)) < 1e-5
