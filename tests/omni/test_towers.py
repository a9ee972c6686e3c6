"""Published towers as encoders: rows and gradients of transformers, on ranks as alone, or refused."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import RankPool
from runs import Running
from tower_folders import TOWERS, compared, make_tower, transformers
from tower_runs import CPU, line, measure, write_data

from dataloader.format import SampleError
from infra.run_folder import RunFolder
from omni.commands.plan import plan_of_step
from omni.compose import compose_config
from omni.config import ConfigError
from omni.models.registry import make_encoder, naming, published
from omni.planning.prepare import prepare_run
from omni.rehearsal.footprint_model import model_footprint
from omni.rehearsal.rehearse import rehearse
from omni.training.opening import opening
from omni.training.parity import (
    TOLERANCE,
    WEIGHT_TOLERANCE,
    collect,
    compare,
    compare_weights,
)
from omni.training.trainer import Trainer


@pytest.mark.parametrize("name", TOWERS)
def test_a_pack_is_what_transformers_makes_of_each_item(name: str, tmp_path: Path) -> None:
    found = compared(name, tmp_path)
    assert found.rows <= 1e-6, found
    assert found.alone <= 1e-6, found
    assert found.gradients <= 1e-5, found
    assert not found.counts, found
    assert not found.weights, found


@pytest.mark.parametrize(
    "name, keys, more",
    [
        ("Qwen3-VL", "merge: 1", ["layout=pp2"]),
        ("Qwen2.5-VL", "merge: 1", ["layout.domain=2", "encoder_sp=all"]),
        pytest.param("SigLIP2", "merge: 1", ["layout=pp2"], marks=pytest.mark.slow),
        ("InternViT", "merge: 2", ["layout=pp2"]),
        pytest.param("Whisper", "merge: 2", ["layout=pp2"], marks=pytest.mark.slow),
    ],
)
def test_two_ranks_equal_one(ranks: RankPool, name: str, keys: str, more: list[str], tmp_path: Path) -> None:
    """Also those of a domain of which one has nothing to encode."""
    write_data(name, tmp_path / "data")
    make_tower(name, tmp_path / "tower")
    given = tmp_path / "data", name, tmp_path / "tower"
    one = ranks.run(1, measure, line(*given, tmp_path / "one", keys), 1)[0]
    two = ranks.run(2, measure, line(*given, tmp_path / "two", keys, *more), 2)[0]
    assert compare(one, two)[0].relative <= TOLERANCE, compare(one, two)[:4]
    assert compare_weights(one, two)[0].relative <= WEIGHT_TOLERANCE, compare_weights(one, two)[:4]


def begun(rank: int, keys: list[str], world: int) -> dict[str, torch.Tensor] | None:
    """The weights that ranks begin with."""
    spec = prepare_run(compose_config(keys), world)
    trainer = Trainer(spec, RunFolder.create(Path(spec.config.run.dir)), rank, CPU)
    trainer.saving.restore()
    found = collect(trainer, lambda own: own.main.detach())
    trainer.control.barrier("the end")
    trainer.close()
    return found


def test_ranks_begin_with_the_weights_of_the_folder(ranks: RankPool, tmp_path: Path) -> None:
    """Also with those that learn nothing, which are held whole."""
    write_data("Whisper", tmp_path / "data")
    model = make_tower("Whisper", tmp_path / "tower")
    given = tmp_path / "data", "Whisper", tmp_path / "tower", tmp_path / "run", "merge: 1"
    found = ranks.run(2, begun, line(*given), 2)[0]
    for name, own in model.state_dict().items():
        assert torch.equal(found[f"audio/tower.{name}"].flatten(), own.flatten()), name


def rewritten(folder: Path, name: str = "config.json", **values: object) -> None:
    """Change what a file of a folder says."""
    said = json.loads((folder / name).read_text()) | values
    (folder / name).write_text(json.dumps(said))


def without(folder: Path, name: str) -> None:
    (folder / name).unlink()


def of_text(folder: Path) -> None:
    transformers.LlamaConfig(num_hidden_layers=1).save_pretrained(folder)


PROCESSOR = "preprocessor_config.json"
REFUSED = [
    ("Whisper", {}, partial(without, name="config.json"), "no config.json in it. Give the folder"),
    ("Whisper", {}, partial(rewritten, model_type="no_such"), "cannot read its config.json"),
    ("Whisper", {}, of_text, "'llama'.* means no tower: .* Choose another folder"),
    ("Whisper", {}, partial(rewritten, dropout=0.5), "dropout=0.5, and .* set it to 0 there"),
    ("Whisper", {"tower": "WhisperDecoder"}, None, "no such tower .*WhisperEncoder.*: leave the key out"),
    ("Whisper", {"merge": 3}, None, "merge=3: WhisperEncoder makes 1 rows of 50 tokens"),
    ("Whisper", {"projector": False}, None, "makes no rows for an LLM; leave the key out"),
    (
        "Whisper",
        {},
        partial(without, name=PROCESSOR),
        "no processor of recordings .*Fetch its preprocessor_c",
    ),
    ("Whisper", {}, partial(rewritten, name=PROCESSOR, feature_size=80), "WhisperEncoder .* does not run"),
    ("Whisper", {}, partial(without, name="model.safetensors"), "lacks model.safetensors. Fetch"),
    ("SigLIP2", {"name": "batch_tower"}, None, "takes no batch .* alone: try name=grid_tower"),
    ("InternViT", {"name": "grid_tower"}, None, "takes none of grid_thw, spatial_shapes: try name=batch_t"),
    ("Qwen2.5-VL", {"merge": 2}, None, "merges 2x2 itself; leave it at 1"),
    (
        "Qwen2.5-VL",
        {},
        partial(rewritten, name=PROCESSOR, patch_size=8),
        "does not run on what its",
    ),
    ("Qwen2.5-VL", {}, partial(rewritten, out_hidden_size=96), "rows of 96 .*model.llm.hidden=64: take"),
    ("Qwen2.5-VL", {}, partial(rewritten, hidden_size=32), "has shape .* config.json means .*: take"),
    ("Qwen3-VL", {"projector": True}, None, "DeepStack.*: leave .*projector out"),
]


def prepare(keys: dict[str, object]) -> None:
    """What is asked of an encoder before ranks start."""
    encoder = make_encoder("own", keys)
    with naming("own"):
        encoder.work(64, 4)
    published("own", encoder)


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_no_tower_is_refused_by_name_before_ranks_start(number: int, tmp_path: Path) -> None:
    name, keys, change, said = REFUSED[number]
    make_tower(name, tmp_path)
    if change is not None:
        change(tmp_path)
    with pytest.raises(ConfigError, match=said) as told:
        prepare({"name": TOWERS[name][1], "folder": str(tmp_path), **keys})
    assert "model.encoders.own." in str(told.value)
    assert "encoder.folder" not in str(told.value)


@pytest.mark.parametrize("name", ["Qwen2.5-VL", "Qwen2-VL"])
def test_measured_memory_is_what_a_rehearsal_finds(name: str, tmp_path: Path) -> None:
    write_data(name, tmp_path / "data")
    make_tower(name, tmp_path / "tower")
    given = tmp_path / "data", name, tmp_path / "tower", tmp_path / "run", "weights: true"
    spec = prepare_run(compose_config(line(*given, "train.precision=bf16", "layout=pp2")), 2)
    plan = plan_of_step(spec, 1)
    for rank in range(2):
        found, modelled = rehearse(spec, plan, rank).footprint, model_footprint(spec, plan, rank)
        assert modelled.traffic == found.traffic
        assert modelled.parameters == found.parameters
        assert modelled.bytes == pytest.approx(found.bytes, rel=0.003)


def test_a_start_says_what_learns_nothing_and_how_sure_memory_is(tmp_path: Path) -> None:
    write_data("SigLIP", tmp_path / "data")
    make_tower("SigLIP", tmp_path / "tower")
    given = tmp_path / "data", "SigLIP", tmp_path / "tower", tmp_path / "run", "weights: true"
    spec = prepare_run(compose_config(line(*given)), 1)
    told = "\n".join(opening(spec, RunFolder.create(tmp_path / "run"), None, "nowhere"))
    assert "note: image: memory of SiglipVisionModel is measured on its class" in told
    assert "note: image: 3 biases that are added to all keys alike, such as" in told


def test_layers_are_not_divided_and_long_recordings_are_told(tmp_path: Path) -> None:
    make_tower("Whisper", tmp_path)
    encoder = make_encoder("own", {"name": "batch_tower", "folder": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"layout.encoders.own.tp=2: .* leave it at 1"):
        encoder.check_tp("layout.encoders.own.tp", 2)
    with pytest.raises(SampleError, match=r"1.5 s is longer than the 1 s"):
        encoder.count((24000, 16000))


@pytest.mark.slow  # it starts runs
@pytest.mark.parametrize("name", ["Qwen2.5-VL", "InternViT"])
def test_a_run_trains_a_tower_and_goes_on(name: str, tmp_path: Path) -> None:
    """As one that was not interrupted, from its own checkpoint: the folder's weights are read once."""
    write_data(name, tmp_path / "data")
    make_tower(name, tmp_path / "tower")
    given, more = (tmp_path / "data", name, tmp_path / "tower"), ["launch.ranks=2", "layout=pp2"]
    losses = {}
    for run, steps in (("whole", (4,)), ("parts", (2, 4))):
        for last in steps:
            keys = line(*given, tmp_path / run, "merge: 1", *more, f"train.steps={last}", "optim.min_lr=1e-3")
            done = Running(["-m", "omni", "train", *keys], tmp_path).finish()
            assert done.code == 0, done.err
        lines = map(json.loads, (tmp_path / run / "metrics.jsonl").read_text().splitlines())
        losses[run] = [own["loss/train"] for own in lines if "loss/train" in own]
    assert len(losses["whole"]) == 4
    assert losses["parts"] == losses["whole"]
    assert losses["whole"][-1] < losses["whole"][0]
