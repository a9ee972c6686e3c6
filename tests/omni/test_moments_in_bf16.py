"""Moments that are kept in bf16: what is learnt with them, under any layout, resumed, and from checkpoints
that have them in fp32.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import RankPool
from small import overrides, write_mixed

from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.config import Config
from omni.planning.prepare import prepare_run
from omni.rank.bucket_shares import MOMENTS
from omni.rank.state import Owned
from omni.training.parity import SMALL, collect
from omni.training.trainer import Trainer

BF16 = "optim.moments_dtype=bf16"
MOE = "model.llm.moe={experts: 4, topk: 2, ffn: 48, shared_ffn: 32, dense_layers: 1}"
LORA = "model.llm.lora={rank: 4, targets: [linear_qkv, linear_fc2]}"
# Ranks, their layout, and what the model has beside.
LAYOUTS = {
    "tp2 and encoder tp2": (2, ["layout.llm.tp=2", "+layout.encoders.image.tp=2"], []),
    "pp2 dp2, zero 3": (
        4,
        ["layout.llm.pp=2", "layout.domain=2", "layout.llm.zero=3"],
        [],
    ),
    "experts, ep2": (2, ["layout.llm.ep=2"], [MOE]),
    "adapters, dp3": (3, [], [LORA]),
}
State = dict[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moments") / "mixed"
    write_mixed(path)
    return path


def train(rank: int, config: Config, world: int) -> State | None:
    """Run to the end, from the folder's last checkpoint if it has one, and return on rank 0 what the ranks
    have of weights and moments.
    """
    spec = prepare_run(config, world)
    trainer = Trainer(spec, RunFolder.create(Path(spec.config.run.dir)), rank, torch.device("cpu"))
    trainer.saving.restore()
    trainer.run()

    def held(shard: Owned, key: str) -> torch.Tensor | None:
        return shard.main if key == "main" else shard.adam.get(key)

    found = {key: collect(trainer, partial(held, key=key)) for key in ("main", *MOMENTS)}
    return {key: of for key, of in found.items() if of is not None} or None


def run(ranks: RankPool, data: Path, folder: Path, *more: str, world: int = 1) -> State:
    keys = ["train.checkpoint_every=0", "train.eval_every=0", "health.compare_every=2", *more]
    found: State = ranks.run(world, train, compose_config(overrides(data, folder, *keys)), world)[0]
    return found


def learnt(folder: Path) -> list[float]:
    """The losses of all steps of a run."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss/train"] for line in lines if "loss/train" in line]


def off(one: torch.Tensor, other: torch.Tensor) -> float:
    """How far two tensors are apart, as parity compares weights."""
    return float((one - other).norm() / max(other.norm().item(), SMALL * one.numel() ** 0.5))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_those_of_one_rank_under_any_layout(
    ranks: RankPool, data: Path, tmp_path: Path, layout: str
) -> None:
    world, keys, more = LAYOUTS[layout]
    one = run(ranks, data, tmp_path / "one", BF16, "train.steps=4", *more)
    other = run(ranks, data, tmp_path / "other", BF16, "train.steps=4", *more, *keys, world=world)
    for name, weight in one["main"].items():
        found = {key: value for key, value in other["main"].items() if key.partition("@")[0] == name}
        assert found
        assert max(off(value, weight) for value in found.values()) < 1e-4, name
    # A moment lies between the same two numbers of bf16, and what is rounded alike is the same number.
    for moment in MOMENTS:
        for name, expected in one[moment].items():
            value = other[moment].get(name, other[moment].get(f"{name}@0"))
            assert value is not None
            assert torch.equal(value, value.bfloat16().float())
            apart = value != expected
            assert (value - expected).abs().max() <= 2**-6 * expected.abs().max()
            assert apart.float().mean() < 0.02 or apart.sum() < 3, f"{moment} of {name}"


def test_losses_are_those_of_moments_in_fp32_for_a_while(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    more = ("train.steps=40", "optim.beta2=0.99")
    run(ranks, data, tmp_path / "fp32", *more)
    run(ranks, data, tmp_path / "bf16", *more, BF16)
    exact, found = (torch.tensor(learnt(tmp_path / name)) for name in ("fp32", "bf16"))
    assert exact[-1] < 0.8 * exact[0]
    assert len(found) == 40
    torch.testing.assert_close(found[:2], exact[:2], rtol=1e-4, atol=0)
    torch.testing.assert_close(found, exact, rtol=0.01, atol=0)
    assert not torch.equal(found, exact)


def test_a_resumed_run_is_the_run_that_was_not(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    more = (BF16, "train.precision=bf16", "train.checkpoint_every=3")
    whole = run(ranks, data, tmp_path / "whole", *more, "train.steps=6", world=2)
    shutil.copytree(tmp_path / "whole" / "checkpoints", tmp_path / "parts" / "checkpoints")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step_00000006")
    parts = run(ranks, data, tmp_path / "parts", *more, "train.steps=6", world=2)
    assert learnt(tmp_path / "whole")[3:] == learnt(tmp_path / "parts")
    for key, tensors in whole.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, parts[key][name]), f"{key} of {name}"


@pytest.mark.parametrize(("saved", "wanted"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_a_checkpoint_with_other_moments_goes_on(
    ranks: RankPool, data: Path, tmp_path: Path, saved: str, wanted: str
) -> None:
    more = ("train.checkpoint_every=3", "train.steps=3", "train.precision=bf16")
    before = run(ranks, data, tmp_path / "run", *more, f"optim.moments_dtype={saved}", world=2)
    # There is nothing left to train.
    after = run(
        ranks, data, tmp_path / "run", *more, f"optim.moments_dtype={wanted}", "layout.llm.tp=2", world=2
    )
    for key, tensors in before.items():
        for name, tensor in tensors.items():
            expected = tensor.bfloat16().float() if key in MOMENTS and wanted == "bf16" else tensor
            found = after[key].get(name, after[key].get(f"{name}@0"))
            assert found is not None
            assert torch.equal(found, expected), f"{key} of {name}"
