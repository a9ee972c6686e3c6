"""Adapters of an encoder beside the LLM's: any layout against one rank, and the plain export against both."""

from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import RankPool
from small import overrides, with_values, write_mixed
from test_lora import CPU, TOLERANCE, _gradient, draw_all

from dataloader.storage import Storage
from infra.checkpoint import complete, read_manifest
from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.config import Config, ConfigError, EncoderLayoutConfig
from omni.models.adapters import A, B
from omni.models.initialise import initialise
from omni.planning.prepare import prepare_run
from omni.rank import build
from omni.rank.state import owned, spread_weights
from omni.training.export import export
from omni.training.parity import collect
from omni.training.trainer import Trainer

load_file = pytest.importorskip("safetensors.torch").load_file
LORA = "{rank: 4, alpha: 6, targets: [linear_qkv, linear_proj, linear_fc1, linear_fc2]}"
IMAGE = f"+model.encoders.image.lora={LORA}"
LLM = f"model.llm.lora={LORA}"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "mixed"
    write_mixed(path)
    return path


def stepped(
    rank: int, config: Config, world: int, begins_with: Path | None = None
) -> tuple[float, dict[str, torch.Tensor] | None]:
    """Save what a run begins with, its own or that of an export, and compute a step: loss and gradients."""
    build.initialise = draw_all
    try:
        folder = RunFolder.create(Path(config.run.dir))
        trainer = Trainer(prepare_run(config, world), folder, rank, CPU)
        trainer.saving.restore()
    finally:
        build.initialise = initialise
    if begins_with is not None:
        weights = load_file(begins_with)
        for name, optimizer in trainer.rank.components.items():
            for own in owned(optimizer, trainer.rank.names[name]):
                own.main.data.view(-1).copy_(weights[f"{name}/{own.name}"].view(-1))
        spread_weights(trainer.rank.components)
    trainer.saving.save(trainer.reporter)
    trainer.saving.finish(trainer.reporter)
    with trainer.ahead() as ahead:
        done = trainer.run_step(trainer.begin(ahead, 1))
        gradients = collect(trainer, partial(_gradient, done.totals.num_targets))
    trainer.control.barrier("the end")
    trainer.close()
    return done.totals.loss, gradients


@pytest.fixture(scope="module")
def one(ranks: RankPool, data, tmp_path_factory):
    """The run folder of one rank with adapters of both components, its loss and its gradients."""
    run = tmp_path_factory.mktemp("one") / "run"
    return run, *ranks.run(1, stepped, compose_config(overrides(data, run, IMAGE, LLM)), 1)[0]


@pytest.mark.parametrize(
    ("world", "values"),
    [
        (2, {"layout.llm.tp": 2, "layout.encoders.image": EncoderLayoutConfig(2)}),
        (2, {"layout.llm.pp": 2, "pipeline.policy": "joint", "model.llm.recompute": "full"}),
        pytest.param(
            4,
            {
                **{"layout.llm.tp": 2, "layout.llm.pp": 2, "layout.encoders.image": EncoderLayoutConfig(2)},
                "pipeline.policy": "joint_zero_bubble_h1",
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_adapters_of_an_encoder_learn_as_on_one_rank(ranks: RankPool, data, tmp_path, one, world, values):
    config = with_values(compose_config(overrides(data, tmp_path / "run", IMAGE, LLM)), values)
    loss, gradients = ranks.run(world, stepped, config, world)[0]
    _, expected_loss, expected = one
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    assert {name.partition("@")[0] for name in gradients} == expected.keys()
    assert all(name.endswith((A, B)) for name in expected)
    total = float(torch.stack([own.norm() for own in expected.values()]).norm())
    for name, own in gradients.items():
        of = expected[name.partition("@")[0]]
        assert float((own - of).norm()) <= TOLERANCE * max(float(of.norm()), 1e-6 * total), name


def test_layers_that_are_computed_anew_learn_the_same(ranks: RankPool, data, tmp_path, one):
    full = "model.encoders.image.recompute=full"
    config = compose_config(overrides(data, tmp_path / "run", IMAGE, LLM, full))
    loss, gradients = ranks.run(1, stepped, config, 1)[0]
    assert loss == one[1]
    assert gradients.keys() == one[2].keys()
    assert all(torch.allclose(own, one[2][name], rtol=1e-5, atol=1e-9) for name, own in gradients.items())


def test_the_plain_export_is_the_model_without_adapters_that_computes_the_same(
    ranks: RankPool, data, tmp_path, one
):
    run, loss, _ = one
    storage = Storage.at(run / "checkpoints")
    export(storage, read_manifest(storage, complete(storage)[-1]), tmp_path / "merged.safetensors")
    names = load_file(tmp_path / "merged.safetensors")
    assert not [name for name in names if name.endswith((A, B))]
    plain = compose_config(overrides(data, tmp_path / "run"))
    drawn, _ = ranks.run(1, stepped, plain, 1)[0]
    merged = with_values(plain, {"run.dir": str(tmp_path / "merged")})
    again, _ = ranks.run(1, stepped, merged, 1, tmp_path / "merged.safetensors")[0]
    assert again == pytest.approx(loss, rel=TOLERANCE)
    assert abs(drawn - loss) > 1e-3 * loss


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            ["+model.encoders.image.lora={rank: 33, targets: [linear_proj]}"],
            "model.encoders.image.lora.rank=33: linear_proj has 32 inputs",
        ),
        (
            ["+model.encoders.image.lora={rank: 4, targets: [projector_in]}"],
            "model.encoders.image.lora.targets=['projector_in']: there is no linear projector_in",
        ),
        (
            [IMAGE, "+optim.components.image.frozen=true"],
            "model.encoders.image.lora.rank=4, but optim.components.image.frozen freezes adapters",
        ),
    ],
)
def test_adapters_that_an_encoder_cannot_have_are_refused_by_its_name(data, tmp_path, lines, words):
    with pytest.raises(ConfigError) as error:
        prepare_run(compose_config(overrides(data, tmp_path / "run", *lines)), 1)
    assert words in str(error.value)
