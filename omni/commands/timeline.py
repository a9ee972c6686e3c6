"""`omni timeline`: what the ranks of a run did in a recorded step, beside what was simulated for it."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from omni.commands._shared import check_drawing, write_drawing

if TYPE_CHECKING:
    from infra.timelines import Recorded

_DESCRIPTION = """\
Shows a step of a run that was recorded (train.timeline_every=N records every N-th step and the last one):
what the ranks of a domain did, their clocks put on one, above what the simulator said of the same plan. It
prints where time went, in ms of a rank, and draws both on one scale, idle time coloured by its cause.

  omni train train.steps=20 train.timeline_every=10 run.dir=runs/try
  omni timeline runs/try
  omni timeline runs/try --step 10 --draw step.json      (for https://ui.perfetto.dev)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--step", type=int, help="which step to show (default: the last one recorded)")
    parser.add_argument("--domain", type=int, default=0, help="whose ranks to show (default 0)")
    parser.add_argument(
        "--draw",
        type=Path,
        help="where to draw: a picture (.svg) or for Perfetto (.json); default both, beside the records",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print and draw. Returns 2 where there is no such recorded step."""
    from infra.run_folder import RunFolder
    from infra.timelines import pictures, read_step

    folder = RunFolder(arguments.run.absolute())
    try:
        check_drawing(arguments.draw)
        if not folder.config.exists():
            raise ValueError(f"{arguments.run} is not a run folder: it has no {folder.config.name}")
        step, recorded = read_step(folder, arguments.step, arguments.domain)
        stem = folder.timelines / f"step_{step}_domain_{arguments.domain}"
        paths = [arguments.draw] if arguments.draw else [Path(f"{stem}.svg"), Path(f"{stem}.json")]
        where = f"step {step}, domain {arguments.domain}"
        for path in paths:
            write_drawing(path, pictures(where, recorded))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in lines(where, recorded):
        print(line)
    print(f"drawn: {', '.join(map(str, paths))}")
    return 0


def lines(where: str, recorded: "Recorded") -> Iterator[str]:
    """Say where the time of the measured and of the simulated step went, in ms of a rank."""
    from pipeline.drawing import spent_ns

    sides = [
        {key: ns / len(rows) / 1e6 for key, ns in spent_ns(rows).items()}
        for rows in (recorded.measured, recorded.simulated)
    ]
    yield f"{where}: clocks of ranks within {recorded.error_ns / 1e6:.3f} ms"
    yield f"{'mean ms of a rank':34} {'measured':>10} {'simulated':>10}"
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        yield f"  {key:32} " + " ".join(
            f"{side[key]:10.3f}" if key in side else f"{'-':>10}" for side in sides
        )
    yield f"  {'step':32} " + " ".join(f"{sum(side.values()):10.3f}" for side in sides)
