"""`omni parity --against`: a configuration beside transformers' model of its folder, and that it can fail."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from open_model_folders import changed, make
from quantised_folders import make_fp8, make_mxfp4
from ranks import RankError, RankPool
from small import with_values

from dataloader.format import Sample
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from infra.run_folder import RunFolder
from omni.__main__ import main
from omni.commands import parity
from omni.compose import compose_config
from omni.config import Config, ConfigError
from omni.planning.prepare import prepare_run
from omni.training import against
from omni.training.against import TOLERANCE, Scored, compare, measure, theirs

TEXTS = ("a short one", "x", "some more words, in a longer text than the others are " * 2, "and the last")
LAYOUTS = {
    "one": (1, {}),
    "tp2 dp2": (4, {"layout.llm.tp": 2}),
    "tp2 pp2": (4, {"layout.llm.tp": 2, "layout.llm.pp": 2}),
    "cp2": (2, {"layout.llm.cp": 2}),
    "shared": (2, {"layout.domain": 2, "llm_sp.policy": "all"}),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Texts of which the first words are no targets."""
    path = tmp_path_factory.mktemp("texts") / "texts"
    with DatasetWriter(path, ByteTokenizer()) as writer:
        for text in TEXTS:
            writer.add(Sample(text[:5], text, targets=((min(4, len(text) - 1), len(text)),)))
    return path


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("against") / "qwen3"
    return folder, make("qwen3", folder)


def keys(data: Path, folder: Path) -> list[str]:
    given = [f"start.weights='{folder}'", f"+data.sources.texts.path={data}", "data.microbatch_tokens=160"]
    more = [f"data.step_samples={len(TEXTS)}", "train.steps=1", "train.precision=fp32", "tracking=jsonl"]
    return ["~experiment", "system=multiplexed", *given, *more, "train.timeout_s=60"]


def measured(rank: int, config: Config, world: int) -> tuple[float, list[Scored]] | None:
    folder = RunFolder.create(Path(config.run.dir))
    return measure(prepare_run(config, world), folder, rank, torch.device("cpu"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_logits_are_those_of_transformers(ranks: RankPool, data, published, tmp_path, layout):
    folder, model = published
    world, values = LAYOUTS[layout]
    config = with_values(compose_config([*keys(data, folder), f"run.dir='{tmp_path / 'run'}'"]), values)
    loss, scored = ranks.run(world, measured, config, world)[0]
    differences = compare(loss, scored, model)
    assert len(scored) == len(TEXTS) == len(differences) - 1
    assert sorted(len(of.ids) for of in scored) == sorted(len(text) + 1 for text in TEXTS)
    assert sum(int(of.targets.sum()) for of in scored) < sum(len(of.ids) for of in scored)
    assert max(of.relative for of in differences) < TOLERANCE
    # What is wrong at one place alone shows.
    torn = [replace(of, losses=of.losses.copy()) for of in scored]
    longest = max(range(len(torn)), key=lambda n: len(torn[n].ids))
    torn[longest].losses[against.OTHERS, 17] += 0.01
    assert compare(loss, torn, model)[1].name == f"logits of sample {longest}"
    assert compare(loss, torn, model)[1].relative > 10 * TOLERANCE
    torn[longest].losses[against.OTHERS, 17] = np.nan
    assert np.isnan(compare(loss, torn, model)[1].relative)
    masked = [replace(of, targets=np.ones_like(of.targets)) for of in scored]
    assert compare(loss, masked, model)[0].relative > 10 * TOLERANCE


def test_what_transformers_says_of_a_folder_that_it_cannot_load_is_told(tmp_path):
    make_mxfp4(tmp_path / "published")
    changed(tmp_path / "published", model_type="nothing")
    with pytest.raises(ConfigError, match=r"cannot load .*published: .*nothing"):
        theirs(tmp_path / "published")


def test_numbers_of_mxfp4_are_made_full_without_another_package(tmp_path):
    model = make_mxfp4(tmp_path / "published")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(theirs(tmp_path / "published")(ids).logits, model(ids).logits)


def test_a_folder_in_fp8_is_refused_before_ranks_start_where_its_package_is_missing(
    data, tmp_path, capsys, monkeypatch
):
    folder, find = tmp_path / "published", importlib.util.find_spec
    make_fp8(folder)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name == "accelerate" else find(name, *of)
    )
    monkeypatch.setattr(parity, "run_to_end", lambda *unused: pytest.fail("ranks started"))
    assert main(["parity", "--against", str(folder), *keys(data, folder)]) == 2
    assert "in fp8" in (told := capsys.readouterr().err)
    assert "pip install accelerate" in told


@pytest.mark.slow  # each starts a run
def test_the_command_holds_and_a_forgotten_key_fails(data, tmp_path, capsys):
    folder = tmp_path / "published"
    make("qwen3", folder)
    line = ["parity", "--against", str(folder), *keys(data, folder), "launch.ranks=2", "layout.llm.tp=2"]
    assert main(line) == 0
    assert "parity holds" in capsys.readouterr().out
    load = against.theirs

    def other(published: Path) -> torch.nn.Module:
        changed(folder, rms_norm_eps=1e-3)  # transformers' model is then of another config.json than ours was
        return load(published)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(against, "theirs", other)
        assert main(line) == 1
    assert "parity fails" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["+model.encoders.image={name: vit}"], "is a model of text: leave these out"),
        (["model.llm.layers=7"], "model.llm.layers"),
        (["start.checkpoint=runs/x"], "leave one out"),
    ],
)
def test_mistakes_are_named_before_ranks_start(data, published, capsys, more, message):
    folder, _ = published
    assert main(["parity", "--against", str(folder), *keys(data, folder), *more]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_named(data, tmp_path, capsys):
    assert main(["parity", "--against", str(tmp_path / "no"), *keys(data, tmp_path / "no")[:2]]) == 2
    assert str(tmp_path / "no") in capsys.readouterr().err


def test_a_step_is_compared_once(published, capsys):
    assert main(["parity", "--steps", "3", "--against", str(published[0])]) == 2
    assert "--steps 3" in capsys.readouterr().err


def test_a_step_without_targets_is_named(ranks: RankPool, published, tmp_path):
    with DatasetWriter(tmp_path / "texts", ByteTokenizer()) as writer:
        writer.add(Sample("a", "nothing of it", targets=()))
    given = [*keys(tmp_path / "texts", published[0]), "data.step_samples=1", f"run.dir='{tmp_path / 'run'}'"]
    with pytest.raises(RankError, match="no target token"):
        ranks.run(1, measured, compose_config(given), 1)
