"""Models with gated delta nets, Qwen3.5's and Qwen3-Next's, under any layout against transformers."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from open_model_folders import DELTA, PLAIN, changed, transformers
from open_model_folders import SPARSE as SPARSE_KEYS
from ranks import RankPool
from safetensors.torch import save_file
from small import with_values
from test_open_model_keys import LENGTHS, copied, logits
from test_open_models import (
    TEXTS,
    TOLERANCE,
    as_theirs,
    configured,
    data,
    expected_in_double,
    files,
    models,
    trained,
)

import parallel.sharded_delta as sharding
from dataloader.storage import Storage
from infra.checkpoint import complete, read_manifest
from omni.config import ConfigError
from omni.models import attention, delta_module
from omni.models.delta_module import GatedNorm
from omni.open_models.folder import open_folder
from omni.training.export_folder import export_folder
from ops import delta
from ops.delta import DeltaPacking, make_delta_packing
from parallel.sharded_delta import sharded_delta

__all__ = ["data", "models"]  # fixtures

DENSE, SPARSE, NEXT = "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"
FUSED = f"{SPARSE} fused"
SHARED = {"layout.domain": 2, "llm_sp.policy": "all"}
TP2, PP2, CP2, EP2 = ({f"layout.llm.{axis}": 2} for axis in ("tp", "pp", "cp", "ep"))
SHORT = [(DENSE, 1, {}), (DENSE, 4, TP2 | CP2), (FUSED, 2, SHARED | EP2), (NEXT, 2, TP2)]
LONG = [(DENSE, 2, TP2), (DENSE, 2, PP2), (DENSE, 2, SHARED), (SPARSE, 2, {**SHARED, "layout.llm.zero": 3})]
LONG += [
    (SPARSE, 1, {}),
    (SPARSE, 2, SHARED | EP2),
    (SPARSE, 2, EP2),
    (FUSED, 4, TP2 | PP2),
    (FUSED, 1, {}),
    (SPARSE, 4, TP2 | PP2),
    (NEXT, 1, {}),
]


@pytest.mark.parametrize(
    ("family", "world", "layout"), [*SHORT, *(pytest.param(*of, marks=pytest.mark.slow) for of in LONG)]
)
def test_a_step_is_that_of_transformers_and_the_files_come_back(
    ranks: RankPool, data, models, tmp_path, family, world, layout
):
    folder, model = models(family)
    config = with_values(configured(data, folder, tmp_path / "run"), layout)
    loss, gradients, _ = ranks.run(world, trained, config, world)[0]
    plain_loss, plain = expected_in_double(model)
    assert loss == pytest.approx(plain_loss, rel=TOLERANCE)
    found = as_theirs(folder, gradients, sum(len(text) + 1 for text in TEXTS))
    norm = float(torch.stack([own.norm() for own in plain.values()]).norm())
    assert found.keys() == plain.keys()
    for name, own in found.items():
        away = float((own - plain[name]).norm()) / max(float(plain[name].norm()), 1e-6 * norm)
        assert away < TOLERANCE, f"{name}: {away:.1e}"
    storage = Storage.at(tmp_path / "run" / "checkpoints")
    manifest = read_manifest(storage, complete(storage)[-1])
    export_folder(storage, manifest, open_folder(str(folder)), tmp_path / "out")
    assert files(tmp_path / "out") == files(folder)


# Each of these is at work in a model, and what it would be if it were forgotten.
FORGOTTEN = {
    DENSE: {"rotary.share": 1.0, "norm_zero_centered": False, "qk_norm": False, "norm_eps": 1e-5},
    SPARSE: {"moe.shared_gate": False, "moe.topk": 3},
    NEXT: {"moe.score": "sigmoid"},
}


def one_sequence(lengths: Sequence[int], taps: int) -> DeltaPacking:
    return make_delta_packing((sum(lengths),), taps)


def normed(own: GatedNorm, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, own.weight.shape, own.weight, own.eps)


def plain_steps(x, conv, a_log, dt_bias, *more):
    return sharded_delta(x, conv, a_log, 0 * dt_bias, *more)


def plain_decays(x, conv, a_log, *more):
    return sharded_delta(x, conv, 0 * a_log, *more)


WITHOUT: dict[str, Callable[[], Any]] = {
    "resets": lambda: patch.object(sharding, "make_delta_packing", one_sequence),
    "convolution": lambda: patch.object(delta, "_tapped", lambda x, conv: x[conv.shape[-1] - 1 :]),
    "norm of heads": lambda: patch.object(GatedNorm, "forward", lambda own, x, gate: x * F.silu(gate)),
    "gate of the norm": lambda: patch.object(GatedNorm, "forward", normed),
    "dt_bias": lambda: patch.object(delta_module, "sharded_delta", plain_steps),
    "A_log": lambda: patch.object(delta_module, "sharded_delta", plain_decays),
    "output gate": lambda: patch.object(attention, "let_through", lambda x, gate: x),
}


def logits_without(rank: int, url: str, feature: str, ids: torch.Tensor) -> torch.Tensor:
    with WITHOUT[feature]():
        return logits(rank, url, {}, ids)


@pytest.mark.parametrize(
    "family", [DENSE, *(pytest.param(of, marks=pytest.mark.slow) for of in (SPARSE, NEXT))]
)
def test_logits_of_a_pack_are_those_of_its_sequences_and_each_feature_counts(ranks: RankPool, models, family):
    folder, model = models(family)
    ids = torch.randint(0, 272, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = torch.cat([model(part[None]).logits[0] for part in ids.split(LENGTHS)])

    def away(function: Callable[..., Any], what: Any) -> float:
        found = ranks.run(1, function, str(folder), what, ids)[0]
        return float((found - plain).abs().max() / plain.abs().max())

    assert away(logits, {}) < TOLERANCE
    for key, value in FORGOTTEN[family].items():
        assert away(logits, {key: value}) > 10 * TOLERANCE, key
    for feature in WITHOUT if family == DENSE else ():
        assert away(logits_without, feature) > 10 * TOLERANCE, feature


def with_tower(family: str, folder: Path) -> torch.nn.Module:
    """A model as it is published: the text model, a tower beside it, and a layer for a further token."""
    text = {**PLAIN, **DELTA, **(SPARSE_KEYS if "moe" in family else {})}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    rotation = {**DELTA["rope_parameters"], "mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    config = transformers.AutoConfig.for_model(
        family,
        text_config=text | {"rope_parameters": rotation},
        vision_config=vision | {"num_position_embeddings": 16},
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    # As it is published, and in memory: all experts of a layer are one tensor.
    model.save_pretrained(folder, max_shard_size="100KB", save_original_format=False)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["mtp.fc.weight"] = "mtp.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"mtp.fc.weight": torch.ones(2, 2)}, folder / "mtp.safetensors")
    return model.eval()


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_a_folder_with_a_tower_gives_its_text_model(ranks: RankPool, data, tmp_path, family):
    folder = tmp_path / "published"
    model = with_tower(family, folder)
    source = open_folder(str(folder))
    source.check()
    assert source.is_copied("mtp.fc.weight")
    assert source.is_copied("model.visual.pos_embed.weight")
    ids = torch.randint(0, 272, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = torch.cat([model(part[None]).logits[0] for part in ids.split(LENGTHS)])
    found = ranks.run(1, logits, str(folder), {}, ids)[0]
    assert float((found - plain).abs().max() / plain.abs().max()) < TOLERANCE
    ranks.run(1, trained, configured(data, folder, tmp_path / "run"), 1)
    storage = Storage.at(tmp_path / "run" / "checkpoints")
    export_folder(storage, read_manifest(storage, complete(storage)[-1]), source, tmp_path / "out")
    assert files(tmp_path / "out") == files(folder)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not trained"),
        ({"attention_bias": True}, "attention_bias=True is not trained"),
        ({"attn_output_gate": False}, "attn_output_gate=False is not trained"),
        ({"layer_types": ["full_attention"] * 4}, r"layer_types=\['full_attention'"),
        ({"layer_types": ["linear_attention"] * 3}, "4 layers are of linear_attention, full_attention"),
        ({"layer_types": ["linear_attention", "sliding_attention"] * 2}, "layer_types="),
        ({"linear_key_head_dim": ...}, "says no linear_key_head_dim"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0}}, "'dynamic' is not trained"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] is not trained"),
        ({"logit_scale": 0.5}, "logit_scale=0.5 means nothing to this family"),
    ],
)
def test_what_config_json_may_not_say(models, tmp_path, values, words):
    folder = copied(models(DENSE)[0], tmp_path)
    changed(folder, **values)
    with pytest.raises(ConfigError, match=words):
        open_folder(str(folder))
