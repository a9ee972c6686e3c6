"""Faults done to training runs at random moments: each is survived or named, and nothing is lost.

    python benchmarks/fault_drill.py                                    # all kinds, kills three times each
    python benchmarks/fault_drill.py --kills 20 --kinds worker,agent    # of these alone
    python benchmarks/fault_drill.py --quick                            # one of each sort, in 3 minutes
    python benchmarks/fault_drill.py --list

Each trial is a run of two ranks on the quickstart's data (make data) of 10 to 40 seconds. The kinds are the
functions of fault_processes.py, fault_checkpoints.py, fault_inside.py, fault_bookkeeping.py, fault_data.py
and fault_strangers.py: what each does, and what must come of it, stands there. A run that survives ends with
the losses and samples of one that nobody disturbed, to the bit; afterwards no process is left, and no good
checkpoint is lost. For kills, the seconds from the kill to the next recorded step are told: at most 8 for a
worker and 12 for an agent, on an idle machine of two cores; else they count as missed, unless --untimed is
given.

Prints a line a trial, with --table a table in Markdown, and at last a line of JSON. Leaves with 1 where
something was missed; the output and the folder of a trial that missed are kept.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fault_bookkeeping
import fault_checkpoints
import fault_data
import fault_inside
import fault_processes
import fault_strangers
from fault_reference import MissError, Reference
from fault_runs import Trial

Kind = Callable[[Trial], None]
KILLS: tuple[Kind, ...] = fault_processes.KILLS
KINDS: tuple[Kind, ...] = (
    *KILLS,
    *fault_processes.OTHERS,
    *fault_inside.KINDS,
    *fault_checkpoints.KINDS,
    *fault_bookkeeping.KINDS,
    *fault_data.KINDS,
    *fault_strangers.KINDS,
)
QUICK = ("worker", "flipped_moment", "flipped", "closed_pipe")
MOST_S = {"worker": 8.0, "agent": 12.0, "first_agent": 12.0}


@dataclass
class Tally:
    """What the trials of a kind came to."""

    good: int = 0
    missed: list[str] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)

    def figures(self, name: str) -> dict[str, Any]:
        """The figures for JSON."""
        found: dict[str, Any] = {"trials": self.good + len(self.missed), "good": self.good}
        found |= {"missed": self.missed} if self.missed else {}
        if self.recovered_s:
            found["recovered_s"] = [round(of, 1) for of in self.spread()]
        return found | ({"too_late": True} if self.is_late(name) else {})

    def spread(self) -> tuple[float, float, float]:
        """The least, the median and the most seconds to recover."""
        return min(self.recovered_s), statistics.median(self.recovered_s), max(self.recovered_s)

    def is_late(self, name: str) -> bool:
        """Whether some recovery took longer than its kind may."""
        return max(self.recovered_s, default=0.0) > MOST_S.get(name, float("inf"))


def said_of(kind: Kind) -> tuple[str, str]:
    """What a kind does, and what must come of it."""
    does, _, must = " ".join((kind.__doc__ or "").split()).partition(" Must: ")
    return does, must


def reference_in(folder: Path) -> Reference:
    """Train the run that nobody disturbs."""
    folder.mkdir()
    trial = Trial(folder, Reference(folder / "run"), random.Random(0))
    trial.train()
    try:
        trial.ends_with(0)
    except MissError as error:
        sys.exit(f"the run that nobody disturbs failed: {error}\n{trial.log[-3000:]}")
    finally:
        trial.clear()
    return trial.reference


def try_once(kind: Kind, folder: Path, reference: Reference, rng: random.Random) -> tuple[Trial, str | None]:
    """Do a trial; return it and what was missed, None if nothing was."""
    folder.mkdir()
    trial = Trial(folder, reference, rng)
    try:
        kind(trial)
    except Exception as error:  # one trial that goes wrong ends no other
        return trial, f"{type(error).__name__}: {error}"
    finally:
        trial.clear()
    return trial, None


def drill(kinds: Sequence[Kind], options: argparse.Namespace, folder: Path) -> dict[str, Tally]:
    """Do all trials, a line each; the kinds take turns."""
    reference = reference_in(folder / "reference")
    tallies = {kind.__name__: Tally() for kind in kinds}
    times = {kind: options.kills if kind in KILLS else options.times for kind in kinds}
    for number in range(max(times.values())):
        for kind in (kind for kind in kinds if number < times[kind]):
            name, start = kind.__name__, time.monotonic()
            own = folder / f"{name}-{number}"
            rng = random.Random(f"{options.seed} {name} {number}")
            trial, miss = try_once(kind, own, reference, rng)
            tally = tallies[name]
            took = f"{time.monotonic() - start:.0f} s"
            after = f", next step after {trial.recovered_s:.1f} s" if trial.recovered_s else ""
            print(f"{number} {name} ({trial.moment}{after}; {took}): {miss or 'good'}", flush=True)
            if trial.recovered_s is not None:
                tally.recovered_s.append(trial.recovered_s)
            if miss is None:
                tally.good += 1
                shutil.rmtree(own)
            else:
                tally.missed.append(miss)
                print(f"  output: {own / 'log'}", flush=True)
    shutil.rmtree(folder / "reference")
    return tallies


def table(kinds: Sequence[Kind], tallies: dict[str, Tally]) -> str:
    """What was done and what came of it, in Markdown."""
    rows = [
        "| kind | what is done | what must come of it | did | s to the next step |",
        "|---|---|---|---|---|",
    ]
    for kind in kinds:
        tally = tallies[kind.__name__]
        did = f"{tally.good} of {tally.good + len(tally.missed)}"
        seconds = " / ".join(f"{of:.1f}" for of in tally.spread()) if tally.recovered_s else ""
        cells = [f"`{kind.__name__}`", *said_of(kind), did, seconds]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=3, help="trials of each kind of kill (3)")
    parser.add_argument("--times", type=int, default=1, help="trials of each other kind (1)")
    parser.add_argument("--kinds", help="these alone, with commas; `kills` stands for all kinds of kill")
    parser.add_argument("--quick", action="store_true", help=f"once each: {', '.join(QUICK)}; untimed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--untimed", action="store_true", help="however long recovery takes, it is not missed"
    )
    parser.add_argument("--table", action="store_true", help="print a table in Markdown, too")
    parser.add_argument("--list", action="store_true", help="say what the kinds are, and do nothing")
    options = parser.parse_args()
    if options.quick:
        options.kinds, options.kills, options.untimed = ",".join(QUICK), 1, True
    return options


def chosen(text: str | None) -> list[Kind]:
    """The kinds of a list of names."""
    by_name = {kind.__name__: [kind] for kind in KINDS} | {"kills": list(KILLS)}
    names = text.split(",") if text else list(by_name)[:-1]
    unknown = sorted(set(names) - set(by_name))
    if unknown:
        sys.exit(f"--kinds {text}: there is no {', '.join(unknown)}; there are {', '.join(by_name)}")
    return [kind for name in names for kind in by_name[name]]


def main() -> int:
    options = arguments()
    kinds = chosen(options.kinds)
    if options.list:
        for kind in kinds:
            does, must = said_of(kind)
            print(f"{kind.__name__}: {does}\n    must: {must}")
        return 0
    if not Path("data/quickstart").is_dir():
        sys.exit("data/quickstart is not there: run `make data` first, and this in the folder that holds it")
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="fault_drill_"))
    tallies = drill(kinds, options, folder)
    with suppress(OSError):  # trials that missed are kept
        folder.rmdir()
    if options.table:
        print(table(kinds, tallies))
    missed = any(tally.missed for tally in tallies.values())
    late = not options.untimed and any(tally.is_late(name) for name, tally in tallies.items())
    by_kind = {name: tally.figures(name) for name, tally in tallies.items()}
    facts = {"benchmark": "fault_drill", "seed": options.seed, "seconds": round(time.monotonic() - start)}
    print(json.dumps(facts | {"kinds": by_kind}))
    return int(missed or late)


if __name__ == "__main__":
    sys.exit(main())
