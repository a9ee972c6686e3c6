"""Layers of encoders that are computed anew keep inputs divided over tp ranks, or on the host, and change
nothing.
"""

from pathlib import Path
from typing import Any

import pytest
from parity_runs import measure
from ranks import RankPool
from small import overrides, write_mixed

from omni.compose import compose_config
from omni.config import Config
from omni.models.kept_inputs import _Input
from omni.training.parity import Measurement, compare, compare_weights

LAYERS = 5
SIZES = (f"model.encoders.image.layers={LAYERS}", "model.llm.layers=2", "train.steps=2")
LORA = "+model.encoders.image.lora={rank: 2, alpha: 4, targets: [linear_qkv, linear_fc2]}"
TP2 = ("layout.llm.tp=2", "+layout.encoders.image.tp=2")
TAPS = ("+model.encoders.image.taps=[2]", "model.llm.layers=4")
# Ranks, keys, and how many inputs of a pass go to the host where up to 0, 2 and 4 of a block may.
CASES = {
    "one rank": (1, [], (0, 2, 4)),
    "one rank, taps": (1, [*TAPS], (0, 3, 3)),
    "tp2": (2, [*TP2], (0, 2, 4)),
    "tp2, two stages": (2, ["layout.llm.pp=2", "pipeline=joint", TP2[1]], (0, 2, 4)),
    "tp2, taps": (2, [*TP2, *TAPS], (0, 3, 3)),
    "tp2, adapters": (2, [*TP2, LORA], (0, 2, 4)),
    "items shared": (2, ["layout.llm.cp=2", "encoder_sp=all"], (0, 2, 4)),
}


def counted(rank: int, config: Config, world: int) -> tuple[Measurement | None, list[tuple[int, int]], int]:
    """Measure, and return the numbers of each input and of what of it is kept on the device when its forward
    is over; and how many came back from the host.
    """
    keep, take = _Input.keep, _Input.take
    sizes: list[tuple[int, int]] = []
    came = [0]

    def keeps(kept: _Input) -> _Input:
        own = keep(kept)
        assert own.here is not None
        sizes.append((own.shape.numel(), 0 if own.blocks else own.here.numel()))
        return own

    def takes(kept: _Input) -> Any:
        came[0] += bool(kept.blocks)
        return take(kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Input, "keep", keeps)
        patch.setattr(_Input, "take", takes)
        measurement = measure(rank, config, world)
    return measurement, sizes, came[0]


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_same_to_the_bit(ranks: RankPool, tmp_path: Path, case: str) -> None:
    world, more, sent = CASES[case]
    divided = any(key.endswith("image.tp=2") for key in more)
    write_mixed(tmp_path)
    line = overrides(tmp_path, tmp_path / "run", *SIZES, *more)
    plain = ranks.run(world, counted, compose_config(line), world)[0]
    assert plain[0] is not None
    assert plain[1:] == ([], 0)
    for offload, each in zip((0, 2, 4), sent, strict=True):
        own = ["model.encoders.image.recompute=full", f"+model.encoders.image.offload={offload}"]
        own += [f"+model.encoders.image.keep_attention={offload != 2}"]
        kept, sizes, came = ranks.run(world, counted, compose_config([*line, *own]), world)[0]
        assert kept is not None
        assert compare(plain[0], kept)[0].relative == 0
        assert compare_weights(plain[0], kept)[0].relative == 0
        blocks = 1 + (TAPS[0] in more)
        # Projectors are computed anew as well; nobody follows layers if what they take in stays where it is.
        of_pass = blocks + (LAYERS if divided or offload else 0)
        passes, rest = divmod(len(sizes), of_pass)
        assert passes
        assert rest == 0
        here = [own for own in sizes if own[1]]
        assert len(sizes) - len(here) == passes * each
        undivided = 2 * blocks - 1 if divided else of_pass - each  # of first layers, and in front of taps
        assert sum(whole == own for whole, own in here) == passes * undivided
        assert all(own in (whole, whole // 2) for whole, own in here)
        assert came == passes * each
