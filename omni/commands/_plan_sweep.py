"""`omni plan -m`: every combination of the values that overrides list, planned in one process, a row each."""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni.planning.cut import Cut
    from omni.planning.run_spec import RunSpec
    from omni.rehearsal.estimate import Estimate

_TITLES = (
    f"{'step ms':>10} {'x best':>6} {'idle':>6} {'MFU':>6} {'tokens/s':>12} {'GiB':>7} {'samples':>8} "
    f"{'a rank':>7} {'cut':>6}  {'schedule':20} sets (simulated; cut: share of tokens lost)"
)


def run_sweep(arguments: argparse.Namespace) -> int:
    """Plan all, print a row each as it is there. What is refused has its reason in the row; the exit code is
    0 unless all are.

    Raises:
        ConfigError: for what is shown of one step alone, and where no override lists several values.
    """
    from omni.commands._plan_estimate import estimated
    from omni.config import ConfigError
    from omni.planning.cut import cut_of
    from omni.planning.fullest import check_memory
    from pipeline.verifier import PlanRefusedError

    for option in ("draw", "domain", "ops"):
        if getattr(arguments, option) not in (None, False):
            raise ConfigError(f"--{option} is of one step: leave it out, or leave out -m")
    rows: list[dict[str, object]] = []
    notes = list[str]()

    def tell(note: str) -> None:
        if note not in notes:
            notes.append(note)
            print(f"note: {note}", file=sys.stderr)

    if not arguments.json:
        print(_TITLES)
    for sets, overrides in combinations(arguments.overrides):
        try:
            with tempfile.TemporaryDirectory() as folder:
                spec, found, _ = estimated(arguments, overrides, Path(folder), tell)
                check_memory(spec, found.fullest)
                cut = cut_of(spec.planner, found.plan.taken)
            rows.append({"sets": sets, **_figures(spec, found, cut)})
            text = _text(spec, found, cut, sets)
        except (ValueError, PlanRefusedError) as error:
            rows.append({"sets": sets, "refused": str(error)})
            text = f"{'refused':>10} {' '.join(sets)}: {error}"
        if not arguments.json:
            print(text, flush=True)
    if arguments.json:
        print(json.dumps(rows, indent=2))
    if all("refused" in row for row in rows):
        print("error: each of these steps is refused", file=sys.stderr)
        return 2
    return 0


def combinations(overrides: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield what each job of a sweep sets, and all of its overrides, as `omni train -m` expands them.

    Raises:
        ConfigError: if no override lists values, or one cannot be read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from omni.config import ConfigError

    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(str(error)) from error
    listed = [override for override in parsed if override.is_sweep_override()]
    if not listed:
        raise ConfigError("-m: no override lists values; give one several, such as layout=pp2,tp2")
    fixed = [line for line, of in zip(overrides, parsed, strict=True) if not of.is_sweep_override()]
    values = [[f"{of.get_key_element()}={value}" for value in of.sweep_string_iterator()] for of in listed]
    for chosen in product(*values):
        yield list(chosen), [*fixed, *chosen]


def _figures(spec: "RunSpec", found: "Estimate", cut: "Cut") -> dict[str, object]:
    whole, taken = found.timeline.makespan_ns, found.plan.taken
    return {
        "samples": len(taken),
        "samples_per_rank": len(taken) / spec.arrangement.world,
        "cut": vars(cut),
        "simulated_step_ns": whole,
        "simulated_step_over_best": found.over_best,
        "simulated_idle": found.spent.idle_ns / whole if whole else 0.0,
        "simulated_mfu": found.mfu(spec),
        "simulated_tokens_per_s": found.tokens_per_s(),
        "held_bytes": found.fullest.bytes,
        "schedule": found.plan.domain.schedule,
    }


def _text(spec: "RunSpec", found: "Estimate", cut: "Cut", sets: Sequence[str]) -> str:
    """A row under `_TITLES`."""
    from omni.planning.memory_advice import GIB

    whole, taken = found.timeline.makespan_ns, found.plan.taken
    idle = found.spent.idle_ns / whole if whole else 0.0
    a_rank = len(taken) / spec.arrangement.world
    return (
        f"{whole / 1e6:10.1f} {found.over_best:6.2f} {idle:6.1%} {found.mfu(spec):6.1%} "
        f"{found.tokens_per_s():12,.0f} {found.fullest.bytes / GIB:7.1f} {len(taken):8,} {a_rank:7.4g} "
        f"{cut.tokens:6.1%}  {found.plan.domain.schedule:20} {' '.join(sets)}"
    )
