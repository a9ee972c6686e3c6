"""The module of an encoder that is not ours: when it trains and is evaluated, and what it may keep."""

from pathlib import Path

import pytest
import torch
from ranks import RankPool
from small import overrides, write_mixed

from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.config import Config, ConfigError
from omni.models.initialise import initialise
from omni.models.regions import Numbering, mark_parallel
from omni.planning.prepare import prepare_run
from omni.rank.build import build_rank, check_state
from omni.training.trainer import Trainer


def _modes(rank: int, config: Config) -> list[tuple[bool, bool, bool]]:
    """Train for a step and evaluate; return of each pass of the encoder whether gradients were asked for,
    whether its module trained, and whether a part did that its author evaluates always.
    """
    spec = prepare_run(config, 1)
    build, found = spec.encoders["image"].build, []

    def own(*arguments: object) -> torch.nn.Module:
        module = build(*arguments)  # type: ignore[arg-type]
        still = next(module.children()).eval()
        module.register_forward_pre_hook(
            lambda *_: found.append((torch.is_grad_enabled(), module.training, still.training))
        )
        return module

    spec.encoders["image"].build = own  # type: ignore[method-assign, assignment]
    Trainer(spec, RunFolder.create(Path(spec.config.run.dir)), rank, torch.device("cpu")).run()
    return found


def test_encoders_are_evaluated_where_held_out_losses_are_computed(ranks: RankPool, tmp_path: Path) -> None:
    write_mixed(tmp_path / "data")
    keys = (f"+data.heldout.mixed.path={tmp_path / 'data'}", "train.eval_every=1", "train.steps=2")
    (found,) = ranks.run(1, _modes, compose_config(overrides(tmp_path / "data", tmp_path / "run", *keys)))
    assert set(found) == {(True, True, False), (False, False, False)}
    assert found[-1] == (False, False, False)
    assert found.count((True, True, False)) > 1, "it trains again after it was evaluated"


def _built_with_averages(rank: int, line: list[str]) -> str:
    spec = prepare_run(compose_config(line), 1)
    build = spec.encoders["image"].build

    def own(*arguments: object) -> torch.nn.Module:
        module = build(*arguments)  # type: ignore[arg-type]
        module.register_buffer("seen", torch.zeros(4))
        return module

    spec.encoders["image"].build = own  # type: ignore[method-assign, assignment]
    try:
        build_rank(spec, rank, torch.device("cpu"), lambda op: None)
    except ConfigError as error:
        return str(error)
    return "built"


def test_a_run_with_such_a_module_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    write_mixed(tmp_path / "data")
    (message,) = ranks.run(1, _built_with_averages, overrides(tmp_path / "data", tmp_path / "run"))
    assert message.startswith("model.encoders.image: its module ")
    assert " keeps seen beside its weights" in message


def test_a_module_that_keeps_state_beside_its_weights_is_refused() -> None:
    linear = torch.nn.Linear(4, 4)
    tied = torch.nn.ModuleList([linear, torch.nn.Linear(4, 4)])
    tied[1].weight = linear.weight
    tied.register_buffer("table", torch.arange(4), persistent=False)
    check_state("mine", tied)
    averages = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(4))
    with pytest.raises(
        ConfigError, match=r"model\.encoders\.mine: .* 1\.running_mean, 1\.running_var, .* Reg"
    ):
        check_state("mine", averages)


class _Body(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln = torch.nn.LayerNorm(8)
        self.groups = torch.nn.GroupNorm(2, 8)
        self.plain = torch.nn.LayerNorm(8, elementwise_affine=False)
        self.pre_norm = torch.nn.Linear(8, 8)
        self.temperature = torch.nn.Parameter(torch.tensor(3.0))


def test_norms_of_torch_multiply_by_one_whatever_their_name() -> None:
    body = _Body()
    mark_parallel(body)
    initialise(body, seed=1, component="image", num_layers=1, numbering=Numbering())
    for norm in (body.ln, body.groups):
        assert norm.weight.tolist() == [1.0] * 8
        assert norm.bias.tolist() == [0.0] * 8
    assert body.pre_norm.weight.std() > 0.1
    assert body.pre_norm.bias.tolist() == [0.0] * 8
    assert body.temperature == 0.0
