"""Modules whose parameters have two dtypes: a checkpoint holds each under its own name."""

from datetime import timedelta
from pathlib import Path

import torch
from ranks import RankPool
from saved import load_components, save_components
from torch import nn

from omni.models.layer_sizes import TransformerEncoderConfig, encoder_layers
from omni.models.layers import transformer_config
from omni.models.regions import Numbering, mark_parallel
from omni.optim_config import OptimConfig
from omni.rank.optimizer import ComponentOptimizer
from omni.rank.state import owned
from parallel.groups import make_groups
from parallel.layout import Layout, Staged, arrange
from parallel.placements import COLOCATED

EVERYTHING = Staged("llm", tied=True, experts=True)

VALUES = {"first.weight": 1.0, "fine.weight": 5.0, "last.weight": 2.0}


class Mixed(nn.Module):
    """Weights in bf16 around weights in fp32, all of one size, where a mix-up would load."""

    def __init__(self) -> None:
        super().__init__()
        sizes = encoder_layers(TransformerEncoderConfig(layers=1, hidden=8, heads=2, ffn=8))
        self.config = transformer_config(sizes, torch.bfloat16)
        self.first = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
        self.fine = nn.Linear(8, 8, bias=False)
        self.last = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)


def trained(rank: int, folder: str, world: int) -> dict[str, tuple[float, float]]:
    """Save known weights, load them into others, and step: main weights and step sizes by name."""
    groups = make_groups(arrange(Layout(dp=world), {"x": 1}, COLOCATED, 0), EVERYTHING, timedelta(seconds=60))

    def made(fill: dict[str, float]) -> ComponentOptimizer:
        module = Mixed()
        mark_parallel(module)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.fill_(fill.get(name, 0.0))
        own = OptimConfig(lr=0.5, weight_decay=0.0)
        return ComponentOptimizer("x", {0: module}, groups.components["x"], own)

    names = {"x": {0: Numbering()}}
    save_components(Path(folder), {"x": made(VALUES)}, names, None)
    loaded = made({})
    load_components(Path(folder), {"x": loaded}, names, None)
    weights = {name: float(p.detach().float().mean()) for name, p in loaded.modules[0].named_parameters()}
    for shard in owned(loaded, names["x"]):
        assert shard.main.dtype == torch.float32
        assert torch.equal(shard.main, torch.full_like(shard.main, VALUES[shard.name]))
    for name, parameter in loaded.modules[0].named_parameters():
        vars(parameter)["main_grad"].fill_(1.0 if name == "fine.weight" else 0.0)
    loaded.reduce(0)()
    loaded.gradients()
    loaded.update(0.5, torch.ones(()), torch.ones(()))
    loaded.arrive()
    after = {name: float(p.detach().float().mean()) for name, p in loaded.modules[0].named_parameters()}
    load_components(Path(folder), {"x": loaded}, names, None, moments=False)
    assert not any(shard.adam for shard in owned(loaded, names["x"])), "nothing is left of a step"
    loaded.update(0.5, torch.ones(()), torch.ones(()))
    assert {float(shard.adam["step"]) for shard in owned(loaded, names["x"])} == {1.0}
    loaded.arrive()
    return {name: (weights[name], after[name]) for name in after}


def test_parameters_of_two_dtypes_keep_their_names(ranks: RankPool, tmp_path: Path) -> None:
    for world in (1, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        for found in ranks.run(world, trained, str(folder), world):
            assert {name: before for name, (before, _) in found.items()} == VALUES
            after = {name: round(after, 3) for name, (_, after) in found.items()}
            assert after == VALUES | {"fine.weight": 4.5}
