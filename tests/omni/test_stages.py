"""A run continued with other keys, and stages that begin with the weights of another run."""

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from ranks import RankPool
from small import overrides, write_mixed
from test_trainer import make_trainer

from dataloader.storage import Storage
from infra.checkpoint import claim, commit, complete, locate, read_manifest
from infra.run_folder import read_metrics
from omni.commands import resume
from omni.compose import compose_config
from omni.compose_saved import compose_saved
from omni.config import Config, ConfigError, StartConfig
from omni.planning.prepare import prepare_run
from omni.rank.state import pieces_of
from omni.stage import as_stage, with_cursor
from omni.training.export import readers, whole
from omni.training.start import check_start


def composed(*given):
    """A run's configuration with overrides, whoever launches it."""
    return compose_saved(*given)[0]


@pytest.fixture(scope="module")
def saved():
    return compose_config(["train.steps=60", "run.name=mine", "layout.llm.tp=2", "optim.lr=1e-3"])


def test_keys_change_and_all_else_stays(saved):
    config = composed(saved, ["train.steps=70", "+data.sources.more.path=elsewhere", "~data.heldout.docs"])
    assert (config.train.steps, config.run.name, config.optim.lr) == (70, "mine", 1e-3)
    assert config.data.sources["more"].path == "elsewhere"
    assert set(saved.data.heldout) - set(config.data.heldout) == {"docs"}
    assert composed(saved, []) == saved


def test_a_launcher_is_chosen_anew(saved):
    assert compose_saved(saved, ["layout=pp2"])[1].kind == "local"
    config, launcher = compose_saved(saved, ["hydra/launcher=slurm", "hydra.launcher.account=${run.name}"])
    assert (launcher.kind, launcher.account, config) == ("slurm", "mine", saved)


def test_an_option_replaces_its_section(saved):
    config = composed(saved, ["layout=pp2", "train.steps=70"])
    assert (config.layout.llm.tp, config.layout.llm.pp) == (1, 2)
    assert composed(saved, ["system=megatron"]).placement.policy == "stage0"
    assert composed(saved, ["layout=pp2", "layout.llm.tp=4"]).layout.llm.tp == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("experiment=llama3_70b", "experiment=llama3_70b: the run has one composed into it"),
        ("optim.rl=1", "optim.rl"),
        ("layout=nope", "nope"),
        ("train.steps=many", "train.steps"),
    ],
)
def test_mistakes_are_named(saved, text, words):
    with pytest.raises(ConfigError) as error:
        composed(saved, [text])
    assert words in str(error.value)


def test_a_stage_goes_on_in_the_stream_only_where_it_draws_the_same_samples(saved):
    stage = as_stage(saved, "/runs/a/checkpoints/step_00000060", optimizer=False, step=60)
    assert with_cursor(stage, saved, 480).start.cursor == 480
    assert with_cursor(composed(stage, ["optim.lr=1e-4"]), saved, 480).start.cursor == 480
    assert with_cursor(composed(stage, ["train.seed=1"]), saved, 480).start.cursor == 0
    assert with_cursor(composed(stage, ["~data.sources.docs"]), saved, 480).start.cursor == 0
    assert with_cursor(composed(stage, ["start.cursor=7"]), saved, 480).start.cursor == 7


def test_a_stage_does_not_keep_its_checkpoints_among_those_of_its_run(saved, tmp_path):
    kept = tmp_path / "kept"
    parent = replace(saved, train=replace(saved.train, checkpoint_dir=str(kept)))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(parent)))
    storage = Storage.at(kept)
    commit(storage, claim(storage, None, adopt=True), 7, [], {"cursor": 56})

    def configured(*words: str) -> Config:
        parser = argparse.ArgumentParser()
        resume.add_arguments(parser)
        fork = [str(tmp_path / "run"), "--fork", str(tmp_path / "stage")]
        return resume._configured(parser.parse_intermixed_args([*fork, *words]))[0]

    with pytest.raises(ConfigError, match="holds the checkpoints of"):
        configured()
    stage = configured("train.checkpoint_dir=null")
    assert stage.start == StartConfig(f"{kept}/step_00000007", cursor=56)
    assert (stage.train.checkpoint_dir, stage.run.dir) == (None, str(tmp_path / "stage"))
    with pytest.raises(ConfigError, match="no such checkpoint; there are: step_00000007"):
        configured("--step", "8")


# On a rank.

LR = "optim.schedule=wsd", "optim.decay_steps=1", "optim.warmup_steps=0"


def _train(rank: int, config: Config, world: int = 1) -> None:
    make_trainer(rank, config, world).run()


@pytest.fixture(scope="module")
def parent(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """The command line of a run of 8 steps, and its checkpoint of step 3. The rate only falls at the end."""
    folder = tmp_path_factory.mktemp("stages")
    write_mixed(folder / "mixed")
    keys = [*LR, "train.steps=8", "train.checkpoint_every=3", "train.keep_checkpoints=9"]
    line = overrides(folder / "mixed", folder / "run", *keys)
    ranks.run(1, _train, compose_config(line))
    return line, folder / "run" / "checkpoints" / "step_00000003"


def _of_stage(
    ranks: RankPool, parent: tuple[list[str], Path], folder: Path, *keys: str, world: int = 1
) -> list[dict[str, float]]:
    """What the first three of four steps learnt: the last one's rate has decayed."""
    line, checkpoint = parent
    cursor = read_manifest(*locate(str(checkpoint)))["cursor"]
    own = [key for key in line if not key.startswith(("run.dir", "train.steps", "train.checkpoint_every"))]
    start = [f"start.checkpoint={checkpoint}", f"start.cursor={cursor}", "train.steps=4", f"run.dir={folder}"]
    ranks.run(world, _train, compose_config([*own, *start, *keys]), world)
    return [_learnt(metrics) for metrics in read_metrics(folder / "metrics.jsonl")[:3]]


def _learnt(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if key.startswith(("loss/", "optim/"))}


def test_a_stage_with_the_optimizer_is_the_run_to_the_bit(ranks, parent, tmp_path):
    records = read_metrics(parent[1].parents[1] / "metrics.jsonl")[3:6]
    assert _of_stage(ranks, parent, tmp_path, "start.optimizer=true") == [_learnt(m) for m in records]


def test_a_stage_with_weights_alone_begins_where_they_are_and_learns_otherwise(ranks, parent, tmp_path):
    records = [_learnt(m) for m in read_metrics(parent[1].parents[1] / "metrics.jsonl")[3:6]]
    first, *later = _of_stage(ranks, parent, tmp_path, "optim.lr=1e-4")
    assert first["loss/train"] == records[0]["loss/train"]
    assert first["optim/grad_norm"] == records[0]["optim/grad_norm"]
    assert first["optim/lr/llm"] == 1e-4
    assert later[0]["loss/train"] != records[1]["loss/train"]
    assert complete(Storage.at(tmp_path / "checkpoints")) == [4]  # that of its last step


LORA = "{rank: 4, targets: [linear_qkv, linear_proj, linear_fc1, linear_fc2]}"
ADAPTERS = {
    "llm": (f"model.llm.lora={LORA}",),
    "both tp2": (
        *(f"model.llm.lora={LORA}", f"+model.encoders.image.lora={LORA}"),
        *("layout.llm.tp=2", "+layout.encoders.image.tp=2"),
    ),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_a_full_checkpoint_is_the_base_of_adapters(ranks, parent, tmp_path, case):
    """B begins as zero, so the first loss is that of the run, and from then on adapters alone learn."""
    _, checkpoint = parent
    exact = case == "llm"
    first, *later = _of_stage(ranks, parent, tmp_path, *ADAPTERS[case], world=1 if exact else 2)
    expected = read_metrics(checkpoint.parents[1] / "metrics.jsonl")[3]["loss/train"]
    assert first["loss/train"] == (expected if exact else pytest.approx(expected, rel=1e-6))
    assert later[0]["loss/train"] != first["loss/train"]
    before, after = (_weights(path) for path in (checkpoint, tmp_path / "checkpoints" / "step_00000004"))
    base = {name for name in after if not name.endswith(("lora_a", "lora_b"))}
    assert base == before.keys()
    assert len(after) > len(base)
    changed = {name for name in base if not torch.equal(before[name], after[name])}
    assert {name.partition("/")[0] for name in changed} == ({"image"} if exact else set())
    assert all(after[name].any() for name in after.keys() - base)


def _weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    storage, step = locate(str(checkpoint))
    manifest = read_manifest(storage, step)
    with readers(storage, manifest) as reader:
        return {
            name: torch.from_numpy(whole(name, of, reader))
            for name, of in pieces_of(manifest["index"]).items()
        }


def test_adapters_come_with_no_state_and_go_by_being_merged(ranks, parent, tmp_path):
    line, checkpoint = parent
    keys = [*line, f"start.checkpoint={checkpoint}", *ADAPTERS["llm"]]
    assert check_start(prepare_run(compose_config(keys), 1)) == ("llm", "image")
    with pytest.raises(ConfigError, match=r"start\.optimizer=true, but .* no state of the adapters of llm"):
        check_start(prepare_run(compose_config([*keys, "start.optimizer=true"]), 1))
    _of_stage(ranks, parent, tmp_path, *ADAPTERS["llm"])
    adapted = f"start.checkpoint={tmp_path}/checkpoints/step_00000004"
    with pytest.raises(ConfigError, match=r"lora\.rank=None .* export --as hf merges adapters"):
        check_start(prepare_run(compose_config([*line, adapted]), 1))
    wider = ADAPTERS["llm"][0].replace("rank: 4", "rank: 8")
    with pytest.raises(ConfigError, match=r"model\.llm\.lora\.rank=8 \(checkpoint: 4\)"):
        check_start(prepare_run(compose_config([*line, adapted, wider]), 1))


def _damaged(checkpoint: Path, folder: Path) -> Path:
    """A copy of a checkpoint in a folder, with a bit flipped."""
    shutil.copytree(checkpoint, folder / checkpoint.name)
    shutil.copy(checkpoint.parent / "run_id", folder)
    file = folder / checkpoint.name / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    return folder / checkpoint.name


def _refused(rank: int, config: Config) -> str:
    with pytest.raises(ConfigError) as error:
        make_trainer(rank, config, 1).saving.restore()
    return str(error.value)


def test_weights_of_another_model_and_damaged_ones_are_refused_and_new_components_drawn(
    ranks, parent, tmp_path
):
    line, checkpoint = parent
    spec = prepare_run(compose_config([*line, f"start.checkpoint={checkpoint}"]), 1)
    assert check_start(spec) == ("llm", "image")
    wide = prepare_run(
        compose_config([*line, f"start.checkpoint={checkpoint}", "model.llm.norm_eps=1e-6"]), 1
    )
    with pytest.raises(ConfigError, match=r"holds another model: model\.llm\.norm_eps=1e-06"):
        check_start(wide)
    other = [*line, f"start.checkpoint={_damaged(checkpoint, tmp_path)}", f"run.dir={tmp_path / 'run'}"]
    assert "start.checkpoint=" in (refusal := ranks.run(1, _refused, compose_config(other))[0])
    assert "is damaged: rank 0: step_00000003/rank_00000.safetensors" in refusal
    assert complete(Storage.at(tmp_path)) == [3], "another run's checkpoint is left as it is"
    gone = replace(spec.config, start=replace(spec.config.start, checkpoint=str(checkpoint.parent / "x")))
    with pytest.raises(ConfigError, match=r"start\.checkpoint=.* cannot be read"):
        check_start(replace(spec, config=gone))
