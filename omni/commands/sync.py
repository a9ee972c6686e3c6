"""`omni sync`: bring the W&B run of a run folder level with its metrics.jsonl."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

_DESCRIPTION = """\
Makes the W&B run of a run folder hold what its metrics.jsonl holds: each step once, as the last attempt at
it left it, however often the run was resumed, with the configuration and the summary. It works for any run,
whatever its tracking was. Where a key for the W&B host is configured (WANDB_API_KEY, or an entry in
~/.netrc), the server is sent the steps that it lacks. Where there is none, and with WANDB_MODE=offline, the
run is written to files, under the same id, which `wandb sync` uploads from anywhere. A second call changes
nothing.

  omni sync runs/mine
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", type=Path, help="the run folder")


def run(arguments: argparse.Namespace) -> int:
    """Upload, or write. Returns 2 where there is nothing to sync, or W&B cannot start; 1 where it has not
    taken all in time.
    """
    from infra.launch import new_launch
    from infra.run_folder import RunFolder
    from infra.run_lock import holding
    from infra.tracking_wandb import sync_wandb
    from omni.about import about_run
    from omni.compose import load_config

    folder = RunFolder(arguments.run.absolute())
    try:
        # The machine that syncs has its own ways to W&B: what the run itself was told of them does not count.
        about = replace(about_run(load_config(folder.config), folder.path), mode="auto")
        with holding(folder, new_launch()):  # nothing trains there meanwhile, and writes to W&B itself
            where = sync_wandb(folder, about)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, TimeoutError) else 2
    offline = Path(where).is_dir()
    print(f"written to {where}; upload: wandb sync {where}" if offline else f"W&B holds it: {where}")
    return 0
