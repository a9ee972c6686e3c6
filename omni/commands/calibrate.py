"""`omni calibrate`: measure this machine and write a cluster file."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from omni.commands._out import check_out, make_room

_DESCRIPTION = """\
Starts ranks as `omni train` does and measures what one can do beside the others: matrix products of several
sizes, attention, a transformer layer, memory, starting a pass, and the links between ranks by kind of
collective. Writes a file of the configuration group `cluster`, with what was measured as comments: half a
minute. Nothing else should run meanwhile. On a CPU the cluster is named cpu: plans for it are made as for
this machine, others as for GPUs.

  omni calibrate --out conf/cluster/mine.yaml
  omni plan --config-dir conf cluster=mine
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the file to write: FOLDER/cluster/NAME.yaml"
    )
    parser.add_argument("--ranks", type=int, help="ranks to start (default: one a GPU, or two without GPUs)")
    parser.add_argument("--precision", default="auto", help="fp32, bf16, or auto: bf16 on a GPU (default)")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print what was written. Returns 2 for a user's mistake, else the exit code of the ranks."""
    from infra.launch import launch_local

    try:
        ranks = _check(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    out = arguments.out.absolute()
    print(f"starting {ranks} rank{'s' * (ranks > 1)} that measure, for about a minute ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        job.write_text(json.dumps({"out": str(out), "precision": arguments.precision}))
        code = launch_local(job, ranks, "omni.calibration.worker")
    if code == 0:
        print(f"{out}:\n{out.read_text(encoding='utf-8')}")
        print(f"use it: omni plan --config-dir {out.parents[1]} cluster={out.stem}")
    return code


def _check(arguments: argparse.Namespace) -> int:
    """The number of ranks. Raises ConfigError for what cannot be measured, or written."""
    from omni.config import ConfigError, LaunchConfig
    from omni.planning.layouts import count_ranks
    from ops.names import PRECISIONS

    out: Path = arguments.out
    if out.suffix != ".yaml" or out.absolute().parent.name != "cluster":
        raise ConfigError(
            f"--out {out}: --config-dir finds files called FOLDER/cluster/NAME.yaml; choose such a path"
        )
    if arguments.precision not in PRECISIONS:
        raise ConfigError(f"--precision {arguments.precision}: choose one of {', '.join(PRECISIONS)}")
    if arguments.ranks is not None and arguments.ranks < 1:
        raise ConfigError(f"--ranks {arguments.ranks}: must be at least 1")
    ranks = count_ranks(LaunchConfig(ranks=arguments.ranks))
    check_out("--out", out)
    make_room(out)
    return ranks
