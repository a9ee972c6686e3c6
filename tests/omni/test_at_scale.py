"""What is counted of the first rank's traffic, beside what a small run really sends and writes."""

import json
from pathlib import Path

import pytest
from ranks import RankPool
from small import overrides, write_mixed
from test_trainer import make_trainer

from dataloader.storage import Storage
from infra.checkpoint import read_manifest
from omni.compose import compose_config
from omni.config import Config
from omni.planning.at_scale import at_scale
from omni.planning.prepare import prepare_run

EXPERTS = "model.llm.moe={experts: 4, topk: 2, ffn: 32, dense_layers: 1}"


def _train(rank: int, config: Config, world: int) -> int:
    """Train two steps; return the bytes of the longest vector."""
    trainer = make_trainer(rank, config, world)
    offer, sent = trainer.control._offer, [0]

    def watched(key, message, *more):
        if not key[0].startswith("json:"):
            sent.append(len(message))
        return offer(key, message, *more)

    trainer.control._offer = watched  # type: ignore[method-assign]
    trainer.run()
    return max(sent)


@pytest.mark.parametrize(
    ("world", "more"),
    [(4, ("layout.llm.tp=2", "costs.learn=true")), (4, ("layout=pp2",)), (2, ("layout.llm.ep=2", EXPERTS))],
)
def test_a_commit_and_a_vector_are_as_large_as_counted(
    ranks: RankPool, tmp_path: Path, world: int, more: tuple[str, ...]
) -> None:
    write_mixed(tmp_path / "data")
    line = overrides(tmp_path / "data", tmp_path / "run", "train.steps=7", *more)
    sent = ranks.run(world, _train, compose_config(line), world)
    found = at_scale(prepare_run(compose_config(line), world), groups=1)
    index = read_manifest(Storage.at(tmp_path / "run" / "checkpoints"), 7)["index"]
    entries = sum(len(of["parameters"]) for of in index)
    assert entries <= found.entries <= 1.1 * entries
    assert 1 <= found.index_bytes / len(json.dumps(index)) <= 1.6, "names and numbers are short here"
    assert max(sent) <= found.vector_bytes <= max(sent) + 200
