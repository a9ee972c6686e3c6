"""Layers of encoders that are computed anew keep their inputs divided over tp ranks, and change nothing."""

from pathlib import Path
from typing import Any

import pytest
from parity_runs import measure
from ranks import RankPool
from small import overrides, write_mixed

from omni.compose import compose_config
from omni.config import Config
from omni.models import divided_inputs
from omni.training.parity import Measurement, compare, compare_weights

LAYERS = 5
LORA = "+model.encoders.image.lora={rank: 2, alpha: 4, targets: [linear_qkv, linear_fc2]}"
CASES = {
    "tp2": (2, ["layout.llm.tp=2"], 1),
    "tp2, two stages": (2, ["layout.llm.pp=2", "pipeline=joint"], 1),
    "tp2, taps": (2, ["layout.llm.tp=2", "+model.encoders.image.taps=[2]", "model.llm.layers=4"], 2),
    "tp2, adapters": (2, ["layout.llm.tp=2", LORA], 1),
}


def counted(rank: int, config: Config, world: int) -> tuple[Measurement | None, list[tuple[int, int]]]:
    """Measure, and return the numbers of each input that was divided, and of this rank's part of it."""
    made = divided_inputs._Piece.__init__
    sizes: list[tuple[int, int]] = []

    def noting(self: Any, whole: Any, group: Any) -> None:
        made(self, whole, group)
        sizes.append((whole.numel(), self.own.numel()))

    divided_inputs._Piece.__init__ = noting  # type: ignore[method-assign]
    try:
        return measure(rank, config, world), sizes
    finally:
        divided_inputs._Piece.__init__ = made  # type: ignore[method-assign]


@pytest.mark.parametrize("case", CASES)
def test_what_ranks_keep_divided_changes_nothing(ranks: RankPool, tmp_path: Path, case: str) -> None:
    world, more, blocks = CASES[case]
    write_mixed(tmp_path)
    found = {}
    for recompute in ("none", "full"):
        line = overrides(tmp_path, tmp_path / recompute, *more, "+layout.encoders.image.tp=2")
        line += [f"model.encoders.image.recompute={recompute}", f"model.encoders.image.layers={LAYERS}"]
        found[recompute] = ranks.run(world, counted, compose_config(line), world)
    (kept, none), (divided, sizes) = found["none"][0], found["full"][0]
    assert none == []
    assert sizes
    assert len(sizes) % (LAYERS - blocks) == 0
    assert all(whole == 2 * own for whole, own in sizes)
    assert kept is not None
    assert divided is not None
    assert compare(kept, divided)[0].relative == 0
    assert compare_weights(kept, divided)[0].relative == 0
