"""`omni sweep show`: the results of a sweep as one table, read from its folders alone."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from infra.launchers.job import QUEUED_AGAIN, columns
from infra.run_folder import RunFolder, read_metrics
from infra.run_state import read_state
from omni.commands._start import SWEEP, near
from omni.compose import load_config
from omni.config import ConfigError

SHOWN = ("loss/train", "perf/tokens_per_s", "perf/mfu")
EVALUATED = "loss/eval/"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    shown = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = shown.add_parser("show", help="one line a job: what it sets, how far it is, losses and speed")
    show.add_argument("sweep", type=Path, help="folder of the sweep, as omni train -m named it")
    show.add_argument("--json", action="store_true", help="figures alone")


def run(arguments: argparse.Namespace) -> int:
    """Print the table. The exit code is 2 if the folder holds no sweep."""
    try:
        jobs = read_sweep(arguments.sweep)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(jobs, indent=2) if arguments.json else table(jobs))
    return 0


def read_sweep(sweep: Path) -> list[dict[str, Any]]:
    """Return what is known of each job: its entry in `sweep.json`, its state, its last step and metrics.

    Of losses on held-out data the last of each source counts, however long ago it was.

    Raises:
        ConfigError: if the folder holds no sweep.
    """
    try:
        entries = json.loads((sweep / SWEEP).read_text())["jobs"]
        return [_read_job(entry, sweep) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{sweep} is not the folder of a sweep: {error}") from error


def table(jobs: list[dict[str, Any]]) -> str:
    """Return one line a job. A column is left out where no job has a value for it."""
    found = {key for job in jobs for key in job["metrics"]}
    names = [*SHOWN[:1], *sorted(key for key in found if key.startswith(EVALUATED)), *SHOWN[1:]]
    names = [name for name in names if name in found]
    rows = [["job", "state", "step", *names, "FOLDER", "sets"]]
    for job in jobs:
        figures = [f"{job['metrics'][name]:.4g}" if name in job["metrics"] else "-" for name in names]
        head = [str(job["number"]), job["state"], f"{job['step']}/{job['steps']}"]
        rows.append([*head, *figures, near(Path(job["folder"])), " ".join(job["sets"])])
    return columns(rows)


def _read_job(entry: dict[str, Any], sweep: Path) -> dict[str, Any]:
    folder = RunFolder((sweep / entry["folder"]).resolve())
    records = read_metrics(folder.metrics)
    last = {key: value for record in records for key, value in record.items()}
    kept = {key: value for key, value in last.items() if key in SHOWN or key.startswith(EVALUATED)}
    code, steps = folder.path / "exit_code", load_config(folder.config).train.steps
    return {
        **entry,
        "folder": str(folder.path),
        "state": _state(code.read_text().strip() if code.exists() else "0", read_state(folder, steps).doing),
        "step": int(last.get("progress/step", 0)),
        "steps": steps,
        "metrics": kept,
    }


def _state(code: str, doing: str) -> str:
    """What became of a job, by the exit code that its launcher wrote when it ended; else what it is doing, in
    the words of `omni status`.
    """
    if code == QUEUED_AGAIN:
        return "waits to be started again"
    if int(code):
        return f"failed ({code})" if int(code) < 128 else f"stopped ({code})"
    return re.split("[:,]", doing)[0]
