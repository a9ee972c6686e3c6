"""Qwen's towers in our own layers: rows and gradients of transformers, whoever shares layers or items."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from ranks import RankPool
from small import write_mixed
from test_towers import prepare, rewritten
from test_whole_models import stepped
from tower_folders import OURS, compared_ours, make_tower
from tower_runs import SHARED, TP, line, measure

from omni.__main__ import main
from omni.commands.plan import plan_of_step
from omni.compose import compose_config
from omni.config import ConfigError
from omni.models.encoders.qwen_stem import corners
from omni.models.encoders.qwen_vit import in_windows
from omni.models.regions import Region
from omni.models.registry import make_encoder
from omni.planning.prepare import prepare_run
from omni.rehearsal.footprint_model import model_footprint
from omni.rehearsal.rehearse import rehearse
from omni.training.parity import (
    TOLERANCE,
    WEIGHT_TOLERANCE,
    Measurement,
    compare,
    compare_weights,
)

load_file = pytest.importorskip("safetensors.torch").load_file

NEWER, WINDOWS = "Qwen3-VL ours", "Qwen2.5-VL ours"


def keys_of(name: str, folder: Path, more: str, *keys: str) -> list[str]:
    """The command line of a run with a tower and data that are written to `folder`."""
    if not (folder / "data").exists():
        write_mixed(folder / "data")
        make_tower(name, folder / "tower")
    return line(folder / "data", name, folder / "tower", folder / f"run{len(keys)}", more, *keys)


@pytest.mark.parametrize("name", OURS)
def test_a_pack_is_what_transformers_makes_of_each_item(ranks: RankPool, name: str, tmp_path: Path) -> None:
    keys = keys_of(name, tmp_path, "weights: true")
    found = ranks.run(1, compared_ours, name, tmp_path / "tower", keys)[0]
    assert found.rows <= 1e-6, found
    assert found.alone <= 1e-6, found
    assert found.gradients <= 1e-5, found
    assert not found.counts, found
    assert not found.weights, found


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Measurement]]:
    """By tower: where it is written with its data, and what one rank makes of it."""
    found = {}
    for name in (NEWER, WINDOWS):
        folder = tmp_path_factory.mktemp("alone")
        found[name] = folder, ranks.run(1, measure, keys_of(name, folder, "recompute: none"), 1)[0]
    return found


@pytest.mark.parametrize(
    ("name", "recompute", "world", "more"),
    [
        (NEWER, "full", 2, ("layout=pp2",)),
        (NEWER, "none", 2, SHARED),
        (NEWER, "selective", 2, TP),
        (WINDOWS, "full", 2, TP),
        pytest.param(WINDOWS, "none", 2, SHARED, marks=pytest.mark.slow),
        pytest.param(
            NEWER,
            "full",
            4,
            ["layout.llm.dp=2", *TP, *SHARED],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_equal_one(
    ranks: RankPool,
    alone: dict[str, tuple[Path, Measurement]],
    name: str,
    recompute: str,
    world: int,
    more: Sequence[str],
) -> None:
    """Gradients of a step and weights after three, whoever shares layers or items, and what is made anew."""
    folder, one = alone[name]
    keys = keys_of(name, folder, f"recompute: {recompute}", f"run.dir={folder}/{world}{recompute}", *more)
    plan = plan_of_step(prepare_run(compose_config(keys), world), 1)
    shares = any(batch.layout.num_cp_ranks > 1 for batch in plan.domain.encoder_batches)
    assert shares == ("encoder_sp=all" in more and name == NEWER), "windows keep items whole"
    several = ranks.run(world, measure, keys, world)[0]
    assert compare(one, several)[0].relative <= TOLERANCE, compare(one, several)[:4]
    assert compare_weights(one, several)[0].relative <= WEIGHT_TOLERANCE, compare_weights(one, several)[:4]


@pytest.mark.parametrize(
    ("name", "keys", "world", "more"),
    [
        (NEWER, "recompute: none", 2, SHARED),
        (
            NEWER,
            "lora: {rank: 4, targets: [linear_qkv, linear_fc2]}",
            2,
            TP,
        ),
        (WINDOWS, "recompute: full", 2, TP),
        (WINDOWS, "recompute: none", 1, ()),
    ],
)
def test_the_statement_is_what_a_rehearsal_measures(
    name: str, keys: str, world: int, more: Sequence[str], tmp_path: Path
) -> None:
    given = keys_of(name, tmp_path, keys, *more, "train.precision=bf16", "data.step_samples=16")
    spec = prepare_run(compose_config(given), world)
    plan = plan_of_step(spec, 1)
    found, modelled = rehearse(spec, plan, 0).footprint, model_footprint(spec, plan, 0)
    assert modelled.traffic == found.traffic
    assert modelled.parameters == found.parameters
    assert modelled.bytes == pytest.approx(found.bytes, rel=0.02)


@pytest.mark.parametrize(("rows", "columns", "side"), [(1, 1, 2), (4, 4, 2), (3, 5, 2), (7, 2, 4), (2, 9, 4)])
def test_windows_cover_a_grid_once(rows: int, columns: int, side: int) -> None:
    order, sizes = in_windows(rows, columns, side)
    assert sorted(order) == [*range(rows * columns)]
    ends = np.cumsum(sizes)
    assert ends[-1] == rows * columns
    for window in np.split(order, ends[:-1]):
        row, column = np.divmod(window, columns)
        assert len({*zip(row // side, column // side, strict=True)}) == 1
        assert [*window] == sorted(window)


def test_corners_of_a_picture_are_those_of_the_table() -> None:
    """And a place of no grid, which pads, is in it."""
    places, shares = corners(torch.tensor([[0, 0, 5, 3], [4, 2, 5, 3], [2, 1, 5, 3], [0, 0, 0, 0]]), 6)
    assert [row[share > 0].tolist() for row, share in zip(places, shares, strict=True)] == [
        [0],
        [35],
        [14, 15, 20, 21],
        [0],
    ]
    assert torch.equal(shares.sum(1), torch.ones(4))


@pytest.mark.parametrize(
    ("name", "keys", "change", "said"),
    [
        (NEWER, {}, {"hidden_act": "relu"}, "hidden_act=relu is none of"),
        (NEWER, {}, {"num_position_embeddings": 35}, "num_position_embeddings=35 is no square"),
        (
            NEWER,
            {},
            {"deepstack_visual_indexes": [2, 1]},
            r"indexes=\[2, 1\]: layers before the last, in order",
        ),
        (NEWER, {}, {"patch_size": 8}, "its processor makes 96 numbers of a patch, and it takes 384"),
        (NEWER, {}, {"out_hidden_size": 96}, "rows of 96 numbers, and model.llm.hidden=64: take"),
        (NEWER, {}, {"intermediate_size": 32}, "has shape .* config.json means .*: take"),
        (
            NEWER,
            {"lora": {"rank": 999, "targets": ["linear_proj"]}},
            {},
            "own.lora.rank=999: .* choose at most that",
        ),
        (WINDOWS, {"recompute": "selective"}, {}, "recompute=selective: .* choose full or none"),
    ],
)
def test_what_our_layers_do_not_compute_is_refused_by_name(
    name: str, keys: dict[str, object], change: dict[str, object], said: str, tmp_path: Path
) -> None:
    make_tower(name, tmp_path)
    rewritten(tmp_path, **change)
    with pytest.raises(ConfigError, match=said) as told:
        prepare({"name": "qwen_vit", "folder": str(tmp_path), **keys})
    assert "model.encoders.own." in str(told.value)


def test_another_tower_and_more_ranks_than_heads_are_refused(tmp_path: Path) -> None:
    make_tower("SigLIP2", tmp_path / "other")
    with pytest.raises(ConfigError, match=r"our layers compute Qwen3VLVisionModel.*try name=grid_tower"):
        make_encoder("own", {"name": "qwen_vit", "folder": str(tmp_path / "other")})
    make_tower(NEWER, tmp_path)
    encoder = make_encoder("own", {"name": "qwen_vit", "folder": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"layout.encoders.own.tp=8 does not divide encoder.heads=4"):
        encoder.check_tp("layout.encoders.own.tp", 8)


@pytest.mark.parametrize("name", [WINDOWS, "Qwen2-VL"])
def test_a_tower_alone_is_exported_as_trained(ranks: RankPool, name: str, tmp_path: Path) -> None:
    """To the bit, for transformers to read: in our own layers, and as it is."""
    config = compose_config(keys_of(name, tmp_path, "weights: true", "optim.min_lr=1e-3"))
    found, run = ranks.run(1, stepped, config)[0], Path(config.run.dir)
    (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    export = ["checkpoint", "export", str(run), "--as", "hf", "--encoder"]
    assert main([*export, "image", "--out", str(tmp_path / "out")]) == 0
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("tower", "out"))
    assert before.keys() == after.keys()
    assert not [own for own in before if torch.equal(before[own], after[own])]
    rules = make_encoder("image", config.model.encoders["image"]).published().rules
    for own, flat in found.items():
        if own.startswith("image/"):
            rule = rules[own.partition("@")[0].removeprefix("image/")]
            for number, theirs in enumerate(rule.theirs):
                part = Region(rule.shape, 0, rule.runs[number]).cut(flat.view(rule.shape))
                assert torch.equal(part, after[theirs]), own
    assert main([*export, "sound", "--out", str(tmp_path / "other")]) == 2


def test_a_projector_of_ours_is_in_no_folder_of_transformers(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = compose_config(keys_of("SigLIP", tmp_path, "weights: true"))
    ranks.run(1, stepped, config)
    run = Path(config.run.dir)
    (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    export = ["checkpoint", "export", str(run), "--as", "hf", "--encoder", "image"]
    assert main([*export, "--out", str(tmp_path / "out")]) == 2
    assert "projector_in.bias of image is our own" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
