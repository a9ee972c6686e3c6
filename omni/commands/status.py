"""`omni status`: what runs are doing, from their folders alone."""

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infra.run_state import RunState

_DESCRIPTION = """\
Reads what a run is doing from its folder: whether a launch trains it, and which, how far it is and when it
ends at its pace, its losses, and the checkpoint that it would continue from. Asks no process, so it works
from any machine that sees the folder. Of several runs, and of a sweep's folder, a line each.

  omni status runs/quickstart/20260101-120000
  omni status runs/sweep
"""
_SHOWN = ("loss/", "perf/tokens_per_s", "perf/mfu", "optim/skipped_steps", "health/restarts")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="RUN", help="run folders, or folders of them"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the state of every run. Returns 2 for a folder without runs, or one that cannot be read."""
    found = [run for folder in arguments.folders for run in _runs(folder)]
    try:
        states = [(path, _state(path)) for path in found]
    except (ValueError, OSError) as error:  # a store that does not answer, or a file that may not be read
        print(f"error: {error}", file=sys.stderr)
        return 2
    if len(states) == 1:
        print("\n".join(_page(*states[0])))
        return 0
    for path, state in states:
        print(f"{path}  {_progress(state)}  {_number(state, 'loss/train')}  {state.doing}")
    return 0


def _runs(folder: Path) -> list[Path]:
    """The folder itself, if it is a run's or holds none; else the run folders in it."""
    inside = sorted((path.parent for path in folder.glob("*/config.yaml")), key=_by_number)
    return [folder] if (folder / "config.yaml").exists() or not inside else inside


def _by_number(path: Path) -> tuple[int, str]:
    return (int(path.name) if path.name.isdigit() else -1, path.name)


def _state(path: Path) -> "RunState":
    from infra.run_folder import RunFolder
    from infra.run_state import read_state
    from omni.compose import load_config
    from omni.config import ConfigError
    from omni.training.storage import storage_of

    folder, steps, storage = RunFolder(path.absolute()), None, None
    with suppress(ConfigError):  # of an older version, or none: read_state says so
        config = load_config(folder.config)
        steps, storage = config.train.steps, storage_of(config, folder)
    return read_state(folder, steps, storage)


def _page(path: Path, state: "RunState") -> list[str]:
    left = "" if state.left_s is None or not state.alive else f", about {state.left_s / 60:.0f} min left"
    lines = [
        f"{path}: {state.doing}",
        f"  step        {_progress(state)}{left}",
        f"  checkpoint  {state.checkpoint or _without(path)}",
    ]
    if state.holder is not None:
        ended = ", which ended" if state.alive is False else ""
        lines.append(f"  lock        {state.holder.described}{ended}")
    shown = [key for key in state.record if key.startswith(_SHOWN)]
    width = max(map(len, shown), default=0)
    return [*lines, *(f"  {key.ljust(width)}  {state.record[key]:.6g}" for key in shown)]


def _without(path: Path) -> str:
    """What becomes of a run without a checkpoint."""
    from infra.run_folder import RunFolder

    last = RunFolder(path).last_checkpoint
    if last.exists():
        saved = last.read_text(encoding="utf-8", errors="replace").strip()
        return f"none is seen from here, and it saved {saved}: it would not start"
    return "none: it would begin anew"


def _progress(state: "RunState") -> str:
    return f"{state.step} of {state.steps if state.steps is not None else '?'}"


def _number(state: "RunState", key: str) -> str:
    return f"{key} {state.record[key]:.4g}" if key in state.record else ""
