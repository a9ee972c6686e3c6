"""`omni resume`: go on with a run, or begin a stage of its own with its weights."""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from omni.commands._of_checkpoint import checkpoint_of
from omni.commands._shared import add_configuration

if TYPE_CHECKING:
    from infra.run_folder import RunFolder
    from omni.commands._launchers import LauncherConfig
    from omni.config import Config

_DESCRIPTION = """\
Goes on with a run from its last checkpoint, with the configuration in its folder and any overrides. What
decides samples and losses must stay (docs/running.md); layout, policies, cadence, tracking and length may
change:

  omni resume runs/mine
  omni resume runs/mine train.steps=4000 layout=pp2

With --fork it begins a stage in a folder of its own with the weights of a checkpoint, at step 1. There
learning rate, data, freezing and length may change; the model may not:

  omni resume runs/align --fork runs/all '~optim.components.llm' train.steps=1000
  omni resume runs/long --fork runs/anneal --optimizer --step 8000 optim.lr=1e-4 optim.decay_steps=500

hydra/launcher=slurm submits it, hydra/launcher=ray runs it on a cluster, as for omni train.

A stage that draws samples as before (the same data.sources, data.window_groups and train.seed, and no
data.mixture) goes on where the checkpoint was among them, any other begins with the first; start.cursor=N
says otherwise.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--fork", type=Path, metavar="FOLDER", help="begin a stage in this new run folder")
    parser.add_argument("--step", type=int, help="fork the checkpoint of this step (default: the last one)")
    parser.add_argument(
        "--optimizer", action="store_true", help="fork with the optimizer's state, not with weights alone"
    )
    add_configuration(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train. The exit code is that of `omni train`, 2 for a user's mistake."""
    from omni.commands._jobs import prepare_job
    from omni.commands._start import start_jobs

    parent = os.getppid()
    try:
        config, launcher = _configured(arguments)
        return start_jobs([prepare_job(config, launcher)], launcher, None, parent)[0]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _configured(arguments: argparse.Namespace) -> "tuple[Config, LauncherConfig]":
    """The configuration that the command line asks for, and who launches it."""
    from infra.run_folder import RunFolder
    from omni.commands._launchers import settings_of
    from omni.compose import load_config
    from omni.compose_saved import compose_saved
    from omni.config import ConfigError
    from omni.stage import as_stage, with_cursor

    folder = RunFolder(arguments.run.absolute())
    saved = load_config(folder.config)
    if arguments.fork is None:
        if arguments.optimizer or arguments.step is not None:
            raise ConfigError("--optimizer and --step are those of a stage: give it a folder with --fork")
        config, launcher = compose_saved(saved, arguments.overrides, arguments.config_dir)
        return _in_folder(config, folder), settings_of(launcher)
    own = RunFolder(arguments.fork.absolute())
    if own.config.exists():
        raise ConfigError(f"--fork {arguments.fork} is a run: choose a new folder, or resume that run")
    checkpoint, manifest = checkpoint_of(folder, saved, arguments.step)
    stage = as_stage(saved, checkpoint, arguments.optimizer, manifest["step"])
    config, launcher = compose_saved(stage, arguments.overrides, arguments.config_dir)
    kept_at = config.train.checkpoint_dir
    if kept_at is not None and kept_at == saved.train.checkpoint_dir:
        raise ConfigError(
            f"train.checkpoint_dir={kept_at} holds the checkpoints of {arguments.run}: give the stage one of "
            f"its own, or train.checkpoint_dir=null to keep them in {arguments.fork}"
        )
    return _in_folder(with_cursor(config, saved, manifest["cursor"]), own), settings_of(launcher)


def _in_folder(config: "Config", folder: "RunFolder") -> "Config":
    return replace(config, run=replace(config.run, dir=str(folder.path)))
