"""What `omni eval` and `omni generate` share: a checkpoint, its run's configuration, and ranks."""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni.commands._out import check_out
from omni.commands._shared import add_configuration

if TYPE_CHECKING:
    from infra.run_folder import RunFolder
    from omni.config import Config
    from omni.planning.run_spec import RunSpec
    from omni.training.task import Task


def add_checkpoint(parser: argparse.ArgumentParser, out: str) -> None:
    """Declare a checkpoint, the file for what comes of it, and overrides."""
    parser.add_argument(
        "run", type=Path, metavar="RUN_OR_CHECKPOINT", help="a run folder, or a checkpoint in it (step_N)"
    )
    parser.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest good one)")
    parser.add_argument("--out", type=Path, metavar="FILE", help=out)
    add_configuration(parser)


def checkpoint_of(folder: "RunFolder", saved: "Config", step: int | None) -> tuple[str, dict[str, Any]]:
    """Return where a checkpoint of a run lies, the newest good one unless a step is given, and its manifest.

    Raises:
        ConfigError: naming those that there are, if there is none such.
    """
    from infra.checkpoint import CheckpointError, complete, folder_of, newest, read_manifest
    from omni.config import ConfigError
    from omni.training.storage import storage_of

    storage = storage_of(saved, folder)
    try:
        steps = complete(storage)
        if step is None:
            manifest, damaged = newest(storage)
            for number, problem in damaged:
                print(f"warning: {folder_of(number)} is passed over: {problem}", file=sys.stderr)
        else:
            manifest = read_manifest(storage, step) if step in steps else None
    except (CheckpointError, OSError) as error:
        raise ConfigError(str(error)) from error
    if manifest is None:
        there = ", ".join(map(folder_of, steps)) or "none"
        raise ConfigError(f"{folder.path} has no such checkpoint; there are: {there}")
    return storage.locate(folder_of(manifest["step"])), manifest


def configured(arguments: argparse.Namespace) -> "Config":
    """Return the configuration of the checkpoint's run with overrides, beginning with its weights.

    Raises:
        ConfigError: for a checkpoint that is not there, and overrides that nothing would heed.
    """
    from omni.commands._launchers import settings_of
    from omni.compose import load_config
    from omni.compose_saved import compose_saved
    from omni.config import ConfigError
    from omni.stage import as_stage

    check_out("--out", arguments.out)
    folder, step = _found(arguments.run, arguments.step)
    saved = load_config(folder.config)
    location, manifest = checkpoint_of(folder, saved, step)
    begun = as_stage(saved, location, optimizer=False, step=manifest["step"])
    config, launcher = compose_saved(begun, arguments.overrides, arguments.config_dir)
    if (kind := settings_of(launcher).kind) != "local":
        raise ConfigError(f"hydra/launcher={kind}: ranks for a checkpoint start on this machine alone")
    for key in ("start", "run"):
        if getattr(config, key) != getattr(begun, key):
            raise ConfigError(
                f"{key} is another than the run's: this begins with the checkpoint {location} and has no run "
                f"folder; leave the key out"
            )
    return replace(config, train=replace(config.train, checkpoint_dir=None))


def _found(path: Path, step: int | None) -> "tuple[RunFolder, int | None]":
    """The run folder that a path names, or in which the checkpoint lies that it names, and its step."""
    from infra.checkpoint import folder_of
    from infra.run_folder import RunFolder
    from omni.config import ConfigError

    folder, inside = RunFolder(path.absolute()), RunFolder(path.absolute().parent.parent)
    number = path.name.rpartition("_")[2]
    if folder.config.exists():
        return folder, step
    if not (number.isdecimal() and path.absolute() == inside.checkpoints / folder_of(int(number))):
        raise ConfigError(
            f"{path} is neither a run folder, which has a config.yaml, nor a checkpoint in one: give the run "
            f"folder, with --step N for one of its checkpoints"
        )
    if step not in (None, int(number)):
        raise ConfigError(f"--step {step}: {path} is that of step {int(number)}; leave one of them out")
    return inside, int(number)


def resolved(config: "Config", task: "Task") -> "RunSpec":
    """Resolve a configuration for a task.

    Raises:
        ValueError: for every mistake that can be found before a rank starts.
    """
    from infra.checkpoint import locate, read_manifest
    from omni.config import ConfigError
    from omni.planning.layouts import count_ranks
    from omni.planning.prepare import prepare_run
    from omni.planning.trainable import check_trainable
    from omni.training.start import check_start

    check_trainable(config)
    spec = prepare_run(config, count_ranks(config.launch), task.trace)
    where = str(config.start.checkpoint)
    drawn = sorted(set(spec.components) - set(check_start(spec)))
    if drawn:
        raise ConfigError(f"model.encoders.{drawn[0]}: {where} has no weights for it; leave it out")
    learnt = read_manifest(*locate(where))["fingerprint"]
    known = learnt.get("data.tokenizer"), learnt.get("data.tokenizer_digest", "")
    if known != (spec.tokenizer.name, spec.tokenizer.digest):
        raise ConfigError(
            f"data.tokenizer={config.data.tokenizer} makes other tokens than {where} has learnt: give the "
            f"one that its run had"
        )
    return spec


def run_ranks(spec: "RunSpec", task: "Task", parent: int) -> tuple[int, dict[str, Any] | None]:
    """Run the ranks that do a task, in a folder of their own that goes with them. Return their exit code and
    what came of it, None if they came to no result.
    """
    from omegaconf import OmegaConf

    from infra.launch import launch_local
    from infra.run_folder import RunFolder, write_text
    from omni.training.task import read_result

    with tempfile.TemporaryDirectory(prefix="omni-") as path:
        folder = RunFolder.create(Path(path))
        config = replace(spec.config, run=replace(spec.config.run, dir=path))
        write_text(folder.config, OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True))
        task.write(folder)
        env, ranks = dict(config.cluster.env), spec.arrangement.world
        code = launch_local(folder.config, ranks, "omni.training.of_checkpoint", env=env, parent=parent)
        return code, read_result(folder)
