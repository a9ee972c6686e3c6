"""Metrics that are of the whole world, though each rank planned its own domain alone."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from planners import plans_of_all_domains
from ranks import RankPool
from small import overrides, write_mixed

from dataloader.reader import Reader
from dataloader.tokens import tokenize
from infra.run_folder import RunFolder, read_metrics
from omni.compose import compose_config
from omni.config import Config
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.planning.work import num_parameters
from omni.rank.state import owned
from omni.training.trainer import Trainer
from parallel.work import even_load
from pipeline.plan import StepPlan

STEPS = 2


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "mixed"
    write_mixed(path)
    return path


def _train(rank: int, config: Config, world: int) -> None:
    spec = prepare_run(config, world)
    Trainer(spec, RunFolder.create(Path(spec.config.run.dir)), rank, torch.device("cpu")).run()


def flops_by_hand(spec: RunSpec, plans: list[StepPlan], path: Path) -> dict[str, float]:
    """FLOPs of a step by component: those of each sample and of each item, three times."""
    llm = image = 0
    reader = Reader(path)
    for plan in plans:
        for meta in spec.planner.metas_of(plan.domain):
            sample = reader.read(meta.id, text=True, items=False)
            targets = int(tokenize(sample, meta, spec.tokenizer)[2].sum())
            tokens = next(s.length for s in plan.domain.samples if s.id == meta.id)
            parts = [spec.work[f"llm/{part}"] for part in range(spec.layout.num_virtual_stages)]
            load = even_load(tokens, tokens * tokens, targets=targets)
            llm += sum(part.forward(load).flops for part in parts) * spec.layout.tp
            encoder = spec.work["image"]
            image += sum(encoder.forward(even_load(i.tokens, i.tokens**2)).flops for i in meta.items)
    return {"llm": 3 * llm, "image": 3 * image}


def loads_by_hand(spec: RunSpec, plans: list[StepPlan]) -> dict[str, list[int]]:
    """Planned nanoseconds of forward passes: of each domain's first virtual stage and each rank's items."""
    found: dict[str, list[int]] = {"llm": [], "image": []}
    for plan in plans:
        domain = plan.domain
        packs = [[domain.samples[i].length for i in batch.samples] for batch in domain.microbatches]
        cost = spec.table.parts["llm/0"]
        found["llm"].append(sum(cost.forward_ns(sum(of), sum(n * n for n in of), 0) for of in packs))
        cost = spec.table.parts["image"]
        for rank in range(spec.arrangement.domain_size):
            items = [
                [domain.items[i].tokens for i in c.items]
                for c in domain.encoder_batches
                if c.ranks == (rank,)
            ]
            found["image"].append(sum(cost.forward_ns(sum(of), sum(n * n for n in of), 0) for of in items))
    return found


def _owned(rank: int, config: Config, world: int) -> dict[str, int]:
    """Weights that a rank saves, by component: together ranks save each once."""
    spec = prepare_run(config, world)
    own = Trainer(spec, RunFolder.create(Path(spec.config.run.dir)), rank, torch.device("cpu")).rank
    return {
        name: sum(shard.main.numel() for shard in owned(optimizer, own.names[name]) if shard.copy == (0, 0))
        for name, optimizer in own.components.items()
    }


def test_parameters_are_counted_as_they_are_saved(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    moe = "model.llm.moe={experts: 4, topk: 2, ffn: 32, shared_ffn: 16, dense_layers: 1}"
    line = overrides(data, tmp_path, "layout.llm.tp=2", moe)
    saved = ranks.run(2, _owned, compose_config(line), 2)
    spec = prepare_run(compose_config(line), 2)
    counted = num_parameters(spec.config.model.llm, spec.encoders, spec.tokenizer.vocab_size)
    assert counted == {name: sum(of[name] for of in saved) for name in ("llm", "image")}


@pytest.mark.parametrize(
    ("world", "more"),
    [(2, ["balance.group=1"]), (2, ["balance=none"]), (4, ["layout.llm.pp=2", "balance.group=1"])],
    ids=["dp2", "dp2 none", "pp2 dp2"],
)
def test_figures_of_a_step_are_those_of_all_domains(
    ranks: RankPool, data: Path, tmp_path: Path, world: int, more: list[str]
) -> None:
    line = overrides(data, tmp_path, *more, f"train.steps={STEPS}", samples=7)
    ranks.run(world, _train, compose_config(line), world)
    spec = prepare_run(compose_config(line), world)
    assert spec.arrangement.num_domains == 2
    cursor, seen, costs = 0, 0, dict[tuple[int, int], int]()
    for step, metrics in enumerate(read_metrics(tmp_path / "metrics.jsonl"), 1):
        plans = plans_of_all_domains(spec.planner, step, cursor)
        taken = plans[0].taken
        cursor, seen = taken.next_cursor, seen + sum(taken.lengths)
        assert metrics["progress/tokens"] == seen

        flops = flops_by_hand(spec, plans, data)
        peak = spec.cluster.flops * world * metrics["perf/step_s"]
        for name, value in flops.items():
            assert metrics[f"perf/mfu/{name}"] * peak == pytest.approx(value, rel=1e-9), name
        assert metrics["perf/mfu"] * peak == pytest.approx(sum(flops.values()), rel=1e-9)

        for name, loads in loads_by_hand(spec, plans).items():
            assert len(loads) == (2 if name == "llm" else world)
            even = sum(loads) / len(loads)
            assert metrics[f"balance/max_over_mean/{name}"] == pytest.approx(max(loads) / even, rel=1e-9)
            assert max(loads) > even, "the domains are alike: a rank's own figures would do"
            each = np.reshape(loads, (len(plans), -1)).sum(1)
            found = metrics[f"balance/domain_max_over_mean/{name}"]
            assert found == pytest.approx(each.max() / each.mean(), rel=1e-9)

        for plan in plans:
            metas = spec.planner.metas_of(plan.domain)
            for meta, ns in zip(metas, spec.planner.domain.costing.costs(metas).total_ns, strict=True):
                costs[step, meta.id] = ns
        packs = sum(len(plan.domain.microbatches) for plan in plans)
        assert metrics["data/pack_fill"] == pytest.approx(sum(taken.lengths) / (160 * packs), rel=1e-9)
    assert step == STEPS
    lines = (tmp_path / "slowest.jsonl").read_text().splitlines()
    for step, of in enumerate(map(json.loads, lines), 1):
        assert of["step"] == step
        assert of["planned_ms"] * 1e6 == pytest.approx(costs[step, of["sample"]])
        assert costs[step, of["sample"]] == max(ns for (number, _), ns in costs.items() if number == step)
    assert len(lines) == STEPS
    slowest = json.loads((tmp_path / "summary.json").read_text())["balance/slowest_samples"]
    assert slowest[0]["planned_ms"] * 1e6 == pytest.approx(max(costs.values()))


def test_what_loading_took_is_told_by_step(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    line = overrides(data, tmp_path, f"train.steps={STEPS}")
    ranks.run(1, _train, compose_config(line), 1)
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    spec = prepare_run(compose_config(line), 1)
    cursor, payload, reader = 0, 0, Reader(data)
    for step in range(1, STEPS + 1):
        (plan,) = plans_of_all_domains(spec.planner, step, cursor)
        cursor = plan.taken.next_cursor
        for meta in spec.planner.metas_of(plan.domain):
            payload += meta.bytes
            reader.read(meta.id, text=True, items=bool(meta.items))
    assert [m["data/cache_mb"] for m in metrics] == [0, 0]
    told = sum(m["data/read_bytes"] for m in metrics)
    assert told == payload == reader.files.bytes_read  # and nothing of what lies between them
    assert 0 < sum(m["data/decode_s"] for m in metrics) < 60
