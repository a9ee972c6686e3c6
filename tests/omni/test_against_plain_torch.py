"""One rank against plain torch written from the equations: parity cannot see what all ranks do wrong alike.

Data, model, learning rates, clipping, decay, freezing and AdamW are held, step by step, against
`plain_training` in fp64. The two share the bytes of the samples and the first weights, nothing else.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from plain_stream import PlainStream
from plain_training import Document, PlainTraining, Step, document
from plain_training import learning_rate as plain_rate
from ranks import RankPool
from small import image, overrides, strip, with_values

from dataloader.format import PLACEHOLDER, Sample
from dataloader.stream import SourceSpec
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.config import Config
from omni.llm_sections import MoEConfig
from omni.optim_config import ComponentOptimConfig, OptimConfig
from omni.planning.optim_schedule import learning_rate
from omni.planning.prepare import prepare_run
from omni.rank.state import Owned, owned
from omni.training.parity import collect, collect_buffers
from omni.training.trainer import Trainer

STEPS, SAMPLES = 5, 5
# Reached: 3e-8, 5e-7 and 3e-6. Weights in fp32 are rounded twice a step, beside what becomes of their change.
LOSS, NORM, GRADIENT = 3e-7, 3e-6, 2e-5
CHANGE, ROUNDING = 1e-4, 3e-7
ROWS_PER_GROUP = 2
WEIGHTS = {"pictures": 2, "texts": 1}
BASE = [
    "model.llm.layers=3",
    "model.llm.heads=4",
    "model.llm.kv_heads=2",
    "model.llm.rotary_base=100",
    f"data.step_samples={SAMPLES}",
    "data.window_groups=2",
    f"train.steps={STEPS}",
    "train.seed=3",
    "optim.lr=4e-3",
    "optim.eps=1e-3",
    "optim.beta2=0.8",
    "optim.clip=1000",
    "optim.weight_decay=0.1",
]
WARM = {"optim.warmup_steps": 2, "optim.min_lr": 1e-3}
MOE = MoEConfig(experts=4, topk=2, ffn=48, shared_ffn=32, dense_layers=1, bias_update_rate=0.02)
CASES: dict[str, dict[str, Any]] = {
    "tied, clipped": {**WARM, "optim.clip": 0.05},
    "untied, one component slower": {
        **WARM,
        "model.llm.tied": False,
        "optim.schedule": "wsd",
        "optim.decay_steps": 2,
        "optim.components": {"image": ComponentOptimConfig(lr_scale=0.3)},
    },
    "biases and LayerNorm, taps, no decay": {
        "model.llm.qkv_bias": True,
        "model.llm.norm": "LayerNorm",
        "model.encoders.image.norm": "LayerNorm",
        "model.encoders.image.taps": [1],
        "optim.weight_decay": 0.0,
        "optim.clip": 0.0,
    },
    "a token between lines of rows": {"model.encoders.image.row_break": 7},
    "heads of their own size, normed; gates in the encoder alone": {
        "model.llm.head_dim": 24,
        "model.llm.qk_norm": True,
        "model.llm.gated": False,
        "model.encoders.image.gated": True,
    },
    "experts, heads of their own size, normed": {
        "model.llm.moe": MOE,
        "model.llm.head_dim": 24,
        "model.llm.qk_norm": True,
    },
    "experts in groups, scaled": {
        "model.llm.moe": replace(MOE, experts=8, topk=4, groups=4, group_topk=2, scale=2.5),
    },
    "experts by a softmax of all, a gate of the shared one": {
        "model.llm.moe": replace(
            MOE, score="softmax", bias_update_rate=0.0, normalise=False, scale=1.5, shared_gate=True
        ),
    },
    "experts by a softmax of the chosen": {
        "model.llm.moe": replace(MOE, score="softmax", bias_update_rate=0.0),
    },
    "experts, the LLM frozen for a while": {
        "model.llm.moe": MOE,
        "optim.components": {"llm": ComponentOptimConfig(frozen=[[3, 4]])},
    },
    "the encoder frozen for a while, clipped": {
        "optim.clip": 0.05,
        "optim.components": {
            "image": ComponentOptimConfig(frozen=[[2, 4]]),
            "llm": ComponentOptimConfig(lr_scale=2.0),
        },
    },
}


def samples() -> dict[str, list[Sample]]:
    """Images of several sizes and colours, several in a sample, spans of targets, and texts alone."""
    rng = np.random.default_rng(0)
    pictures = [strip(rng, f"strip{i}", digits) for i, digits in enumerate((1, 3, 2))]
    two = (image(rng, 8, 15, channels=3), image(rng, 13, 8))
    text = f"left {PLACEHOLDER} and right {PLACEHOLDER}."
    pictures.append(Sample("two", text, two, targets=((0, 4), (12, len(text)))))
    pictures.append(Sample("span", PLACEHOLDER + "ask: answer", (image(rng, 4, 8),), targets=((1, 4),)))
    texts = [Sample("short", "no picture"), Sample("long", "text without pictures, " * 2)]
    return {"pictures": pictures, "texts": [*texts, Sample("accents", "é à ü")]}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("plain")
    for source, written in samples().items():
        with DatasetWriter(folder / source, ByteTokenizer(), rows_per_group=ROWS_PER_GROUP) as writer:
            for sample in written:
                writer.add(sample)
    sources = [f"+data.sources.{name}={{path: {folder / name}, weight: {w}}}" for name, w in WEIGHTS.items()]
    line = overrides(folder, folder / "run", *sources, *BASE)
    return compose_config([key for key in line if "sources.mixed" not in key])


def trained(rank: int, config: Config) -> tuple[dict[str, torch.Tensor], list[Step]]:
    """The first weights, and what the steps of one rank did."""
    trainer = Trainer(
        prepare_run(config, 1), RunFolder.create(Path(config.run.dir)), rank, torch.device("cpu")
    )
    first = weights_of(trainer)
    steps = []
    with trainer.ahead() as ahead:
        for number in range(1, config.train.steps + 1):
            done = trainer.run_step(trainer.begin(ahead, number))
            totals = done.totals
            gradients = shaped(trainer, lambda own: own.grad)
            trainer.update(done)
            frozen = trainer.rank.optimizer.frozen
            steps.append(
                Step(
                    losses=dict(zip(trainer.spec.sources, totals.losses, strict=True)),
                    targets=dict(zip(trainer.spec.sources, totals.targets, strict=True)),
                    norms=trainer.rank.optimizer.norms(number, totals),
                    gradients={
                        name: gradient / totals.num_targets
                        for name, gradient in gradients.items()
                        if name.partition("/")[0] not in frozen
                    },
                    weights=weights_of(trainer),
                )
            )
    return first, steps


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All weights and biases of experts, in their shapes."""
    return shaped(trainer, lambda own: own.main.detach()) | collect_buffers(trainer)


def shaped(trainer: Trainer, value: Callable[[Owned], torch.Tensor]) -> dict[str, torch.Tensor]:
    shapes = {
        f"{component}/{own.name}": own.region.shape
        for component, optimizer in trainer.rank.components.items()
        for own in owned(optimizer, trainer.rank.names[component])
    }
    return {name: flat.clone().view(shapes[name]) for name, flat in collect(trainer, value).items()}


def sizes(config: Config) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Sizes of the LLM and of the image encoder, under the names of their configuration."""
    llm, vit = config.model.llm, config.model.encoders["image"]
    return (
        SimpleNamespace(**vars(llm), causal=True),
        SimpleNamespace(
            **{
                **{"taps": [], "rotary_base": 100.0, "kv_heads": vit["heads"], "causal": False},
                **{"head_dim": None, "qk_norm": False, "gated": False, "row_break": None},
                **vit,
            }
        ),
    )


def documents(config: Config, vit: SimpleNamespace) -> list[list[Document]]:
    """The documents of each step: the definition of the stream says which."""
    written = samples()
    specs = {name: SourceSpec(len(own), ROWS_PER_GROUP, WEIGHTS[name]) for name, own in written.items()}
    stream = PlainStream(specs, config.train.seed, config.data.window_groups)
    drawn = [stream.at(position)[:2] for position in range(STEPS * SAMPLES)]
    known = [document(source, written[source][number], vit) for source, number in drawn]
    return [known[at : at + SAMPLES] for at in range(0, len(known), SAMPLES)]


def assert_close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], allowed: dict[str, float]
) -> None:
    assert found.keys() == expected.keys()
    for name, own in expected.items():
        distance = float((found[name].double() - own).norm())
        assert distance <= allowed[name], f"{name}: {distance:.2e} of {float(own.norm()):.2e}"


@pytest.mark.parametrize("case", CASES)
def test_training_is_what_its_equations_say(ranks: RankPool, config: Config, case: str) -> None:
    config = with_values(config, CASES[case])
    first, steps = ranks.run(1, trained, config)[0]
    llm, vit = sizes(config)
    plain = PlainTraining(
        weights={name: weight.double() for name, weight in first.items()},
        llm=llm,
        vit=vit,
        optim=SimpleNamespace(**asdict(config.optim)),
        steps=STEPS,
    )
    start = {name: weight.clone() for name, weight in plain.weights.items()}
    for number, (found, drawn) in enumerate(zip(steps, documents(config, vit), strict=True), start=1):
        expected = plain.step(number, drawn)
        assert found.targets == expected.targets
        assert found.losses == pytest.approx(expected.losses, rel=LOSS)
        assert found.norms == pytest.approx(expected.norms, rel=NORM)
        floor = 1e-6 * math.hypot(*expected.norms.values())
        slack = {n: GRADIENT * max(float(g.norm()), floor) for n, g in expected.gradients.items()}
        assert_close(found.gradients, expected.gradients, slack)
        weights = expected.weights
        slack = {
            n: CHANGE * float((w - start[n]).norm()) + ROUNDING * float(w.norm()) for n, w in weights.items()
        }
        assert_close(found.weights, weights, slack)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("decay", [None, 1, 5])
def test_learning_rates_are_as_defined(schedule: str, warmup: int, decay: int | None) -> None:
    optim = OptimConfig(lr=0.3, min_lr=0.02, schedule=schedule, warmup_steps=warmup, decay_steps=decay)
    rates = [learning_rate(optim, step, 12) for step in range(1, 13)]
    assert rates == pytest.approx([plain_rate(optim, step, 12) for step in range(1, 13)], rel=1e-12)
    assert max(rates) <= 0.3
    assert rates[-1] == pytest.approx(0.02)
    assert rates[max(0, warmup - 1)] == pytest.approx(0.3) or warmup == 0
