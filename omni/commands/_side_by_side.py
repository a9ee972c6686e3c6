"""`omni compare --measure`: systems on the ranks of this machine, in turn, and the table of it."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from omni.commands._ranks import run_to_end, written

if TYPE_CHECKING:
    from omni.config import Config
    from omni.planning.run_spec import RunSpec


@dataclass(frozen=True)
class MeasuredSystem:
    """A system: the `seconds` of its step in every turn, or why it is `refused`."""

    system: str
    seconds: Sequence[float] = ()
    refused: str = ""


def overrides(turns: int) -> list[str]:
    """What a run that is measured for so many turns has beside its own configuration.

    Raises:
        ConfigError: for fewer than one.
    """
    from omni.config import ConfigError
    from omni.training.side_by_side import WARMUP

    if turns < 1:
        raise ConfigError(f"--measure {turns}: let each system have at least one step, such as --measure 120")
    return ["tracking=jsonl", f"train.steps={WARMUP + turns}", "train.eval_every=0", "train.timeline_every=0"]


def measure(configs: "Mapping[str, Config]") -> list[MeasuredSystem]:
    """Train all systems on the ranks of this machine, in turn.

    Raises:
        ConfigError: if every system is refused, or a rank failed.
    """
    from omni.config import ConfigError
    from omni.planning.choice import with_keys
    from omni.rehearsal.compare import comparable
    from omni.training.side_by_side import FILE

    specs: dict[str, RunSpec] = {}
    refused: dict[str, MeasuredSystem] = {}
    with tempfile.TemporaryDirectory() as made:
        for name, config in configs.items():
            own = with_keys(config, comparable(config))
            own = replace(own, run=replace(own.run, dir=f"{made}/{len(specs)}"))
            try:
                specs[name] = written(own)
            except ValueError as error:
                refused[name] = MeasuredSystem(name, refused=str(error))
        if not specs:
            raise ConfigError("; ".join(f"{name} is refused: {of.refused}" for name, of in refused.items()))
        run_to_end(next(iter(specs.values())), "omni.training.side_by_side")
        every = json.loads((Path(made) / FILE).read_text())
    return [*map(MeasuredSystem, specs, every), *refused.values()]


def lines(found: Sequence[MeasuredSystem]) -> Iterator[str]:
    """A table, the quickest system first; ratios to it are of the same turn."""
    from omni.training.side_by_side import interval, over

    ran = sorted((of for of in found if of.seconds), key=lambda of: interval(of.seconds)[0])
    yield f"measured, {len(ran[0].seconds)} turns; x first: median of a turn's ratio, its interval of 95 %"
    yield f"{'system':24} {'step ms':>10} {'x first':>7}  95 %"
    for of in ran:
        ratio, low, high = over(of.seconds, ran[0].seconds)
        yield f"{of.system:24} {interval(of.seconds)[0] * 1e3:10,.1f} {ratio:7.3f}  {low:.3f} to {high:.3f}"
    for of in found:
        if of.refused:
            yield f"{of.system:24} refused: {of.refused}"
