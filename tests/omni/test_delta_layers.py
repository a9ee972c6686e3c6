"""Layers with delta nets and gated attention: stated, rehearsed, refused, and equal under any layout."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity_runs import LINE, distance, run
from ranks import RankPool
from small import overrides, write_uneven
from test_shape_work import LLM, D, F, size, token_and_square, whole

from infra.run_folder import RunFolder
from omni.commands.plan import plan_of_step
from omni.compose import compose_config
from omni.config import Config, ConfigError
from omni.keys import check_keys
from omni.llm_config import LLMConfig
from omni.llm_sections import DeltaConfig
from omni.models.llm import check_llm_layout
from omni.planning.prepare import prepare_run
from omni.rehearsal.footprint_model import model_footprint
from omni.rehearsal.rehearse import rehearse
from omni.training.parity import TOLERANCE, WEIGHT_TOLERANCE
from omni.training.trainer import Trainer
from parallel.layout import Layout
from parallel.work import Grad, even_load

CPU = torch.device("cpu")
SIZES = "{key_heads: 4, value_heads: 8, key_dim: 8, value_dim: 12, conv: 3}"
KEYS = [f"model.llm.delta={SIZES}", "model.llm.attention=[delta, full]", "model.llm.output_gate=true"]
SHARED = ["llm_sp=dynamic", "layout.domain=2"]
EXPERTS = "model.llm.moe={experts: 4, topk: 2, ffn: 32, shared_ffn: 32}"
DELTA = replace(LLM, attention=["delta"], delta=DeltaConfig(2, 6, 8, 12, 3), layers=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("delta") / "mixed"
    write_uneven(path)
    return path


def configured(data: Path, *more: str) -> Config:
    return compose_config(overrides(data, data.parent / "run", *LINE, *KEYS, "train.steps=2", *more))


def test_a_delta_net_is_what_its_equations_say() -> None:
    part = whole(DELTA)
    read, out = 2 * (8 + 8) + 6 * 12, 6 * 12  # queries, keys and values; outputs, and their gates
    linears = D * (read + 2 * 6 + out) + out * D
    rule = 2 * 4 * 64 * 8 + 6 * (64 * (8 + 12) + 2 * 64 * 12 + 6 * 8 * 12) + 2 * 3 * read
    assert token_and_square(part) == (2 * (2 * linears + rule + 2 * 3 * D * F), 0)
    forward, backward = part.forward(even_load(1)), part.backward(even_load(1), Grad.BOTH)
    assert backward.flops == 2 * forward.flops + 2 * rule, "it computes the rule anew"
    plain = whole(replace(LLM, layers=2))
    attention = D * 8 * (LLM.heads + 2 * LLM.kv_heads) + LLM.heads * 8 * D
    assert size(part) - size(plain) == 2 * (linears + 3 * read + 2 * 6 + 12 - attention)


def test_an_output_gate_is_as_many_outputs_more() -> None:
    gated, plain = whole(replace(LLM, output_gate=True)), whole(LLM)
    assert size(gated) - size(plain) == D * LLM.heads * 8
    assert token_and_square(gated)[0] - token_and_square(plain)[0] == 2 * D * LLM.heads * 8


@pytest.mark.parametrize(
    ("llm", "words"),
    [
        (replace(DELTA, attention=["full"]), r"delta.key_heads=2: with attention=\['full'\]"),
        (replace(DELTA, delta=DeltaConfig()), r"delta.key_heads=0: with attention=\['delta'\]"),
        (replace(DELTA, attention=["linear"]), r"attention=\['linear'\]: give the kinds"),
        (replace(DELTA, delta=DeltaConfig(2, 3, 8, 12)), r"delta.value_heads=3: must be a multiple of"),
        (replace(DELTA, delta=DeltaConfig(2, 4, 0, 12)), r"delta.key_dim=0: must be at least 1"),
        (replace(DELTA, delta=DeltaConfig(0, 4, 8, 12)), r"delta.key_heads=0: delta nets need heads of keys"),
        (replace(DELTA, delta=DeltaConfig(2, 4, 8, 12, 0)), r"delta.conv=0: must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_key(llm: LLMConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"model.llm.{words}"):
        check_keys("model.llm", llm)


def drawn(rank: int, config: Config) -> dict[str, torch.Tensor]:
    """The initial weights of the first layer's delta net, by name."""
    trainer = Trainer(prepare_run(config, 1), RunFolder.create(Path(config.run.dir)), rank, CPU)
    assert trainer.rank.stage is not None
    layer = trainer.rank.stage.virtual_stages[0].model.decoder.layers[0]
    return {name: of.detach() for name, of in layer.self_attention.named_parameters()}


def test_initial_weights_forget_within_a_thousand_tokens(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    config = configured(data, "model.llm.norm_zero_centered=true", f"run.dir={tmp_path}")
    weights = ranks.run(1, drawn, config)[0]
    rates, steps = weights["A_log"].exp(), torch.nn.functional.softplus(weights["dt_bias"])
    assert ((rates >= 1) & (rates <= 16)).all()
    assert ((steps >= 0.000999) & (steps <= 0.1001)).all()
    assert len(rates.unique()) == len(steps.unique()) == 8, "of each head of values"
    assert (weights["norm.weight"] == 1).all(), "it multiplies by its weight, not by 1 + weight"
    assert 0.1 < float(weights["conv_weight"].std()) < 1


def test_ranks_that_do_not_divide_heads_of_keys_are_refused() -> None:
    llm = replace(DELTA, delta=DeltaConfig(3, 6, 8, 12))
    with pytest.raises(ConfigError, match=r"tp=2 does not divide model.llm.delta.key_heads=3"):
        check_llm_layout(llm, Layout(tp=2), 260)


@pytest.mark.parametrize(
    ("world", "rank", "more"),
    [
        (2, 0, [*SHARED, "model.llm.recompute=full"]),
        pytest.param(2, 1, ["layout.llm.cp=2"], marks=pytest.mark.slow),
        pytest.param(
            *(4, 3, ["layout.llm.tp=2", "layout.llm.cp=2", "model.llm.recompute=selective", EXPERTS]),
            marks=pytest.mark.slow,
        ),
        pytest.param(4, 2, ["layout.llm.tp=2", "layout.llm.pp=2"], marks=pytest.mark.slow),
    ],
)
def test_bytes_sent_and_weights_are_those_of_a_rehearsal(data: Path, world, rank, more) -> None:
    spec = prepare_run(configured(data, *more, "model.llm.layers=4", "cluster.queues=one"), world)
    plan = plan_of_step(spec, 1, spec.arrangement.domain(rank))
    found, modelled = rehearse(spec, plan, rank).footprint, model_footprint(spec, plan, rank)
    assert modelled.traffic == found.traffic
    assert modelled.parameters == found.parameters
    assert modelled.bytes == pytest.approx(found.bytes, rel=0.15)


SLOW = {
    "tp2 cp2": (4, ["layout.llm.tp=2", "layout.llm.cp=2"]),
    "all shared, selective": (2, ["llm_sp=all", "layout.domain=2", "model.llm.recompute=selective"]),
    "joint": (2, ["layout.llm.pp=2", "pipeline=joint"]),
    "weights later": (2, ["layout.llm.pp=2", "pipeline=zero_bubble_h1"]),
    "ep2": (2, ["layout.llm.ep=2", EXPERTS]),
}


@pytest.mark.parametrize(
    ("world", "more"),
    [
        pytest.param(2, [*SHARED, "model.llm.recompute=full"], id="shared, full"),
        *(pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()),
    ],
)
def test_losses_gradients_and_weights_are_those_of_one_rank(
    ranks: RankPool, data: Path, tmp_path: Path, world: int, more: list[str]
) -> None:
    model = [key for key in more if key.startswith("model.llm.moe")]
    one, many = (
        run(ranks, configured(data, *keys, f"run.dir={tmp_path / name}"), size)
        for name, keys, size in (("one", model, 1), ("many", more, world))
    )
    found = distance(one, many)
    assert found.loss < TOLERANCE
    assert found.square.relative < TOLERANCE
    assert found.gradient.relative < TOLERANCE, found.gradient
    assert found.weights.relative < WEIGHT_TOLERANCE, found.weights
