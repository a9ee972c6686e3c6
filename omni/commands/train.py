"""`omni train`: compose the configuration, check it, write the run folder, start the ranks."""

import os
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from infra.last_words import last_words
from infra.launch import launch_local, new_launch
from infra.run_folder import RunFolder, write_text
from infra.run_lock import holding
from infra.secrets import secret_in
from omni.compose import check_shadowed, load_config, offer_policies, to_config
from omni.config import Config, ConfigError
from omni.refusals import refusal

if TYPE_CHECKING:
    from omni.planning.run_spec import RunSpec

WORKER = "omni.training.worker"


def run(arguments: list[str]) -> int:
    """Hand the command line to Hydra. The exit code is that of the run, 2 for a user's mistake."""
    parent = os.getppid()  # before anything that takes time: whoever started this may end meanwhile
    sys.argv = ["omni train", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors on instead of printing them
    offer_policies()
    in_job = False

    def job(config: DictConfig) -> None:
        nonlocal in_job
        in_job = True
        _job(config, parent)
        in_job = False

    try:
        hydra.main(version_base="1.3", config_path="pkg://hydra_conf", config_name="config")(job)()
    except Exception as error:  # outside a job, Hydra's: all of them are about the command line
        if in_job:
            raise
        print(f"error: {refusal(error, arguments)}", file=sys.stderr)
        return 2
    return 0


def _job(composed: DictConfig, parent: int) -> None:
    """One job: a single run, or one of a sweep."""
    try:
        code = train(to_config(_resolve(composed)), parent)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            with suppress(OSError):  # Hydra makes a folder for every job of a sweep; one in use is not empty
                Path(HydraConfig.get().runtime.output_dir).rmdir()
    if code:
        sys.exit(code)


def _resolve(composed: DictConfig) -> DictConfig:
    state = HydraConfig.get()
    check_shadowed(composed, list(state.overrides.task))
    chosen = any(override.startswith("run.dir=") for override in state.overrides.task)
    if state.mode is RunMode.MULTIRUN and not chosen:
        with open_dict(composed):
            composed.run.dir = state.runtime.output_dir
    return composed


def train(config: Config, parent: int) -> int:
    """Check a configuration, write it to its run folder and train it on this machine, for as long as the
    process `parent` lives, which started this one.

    Raises:
        ValueError: for every mistake that can be found before a rank starts.
    """
    from omni.planning.fullest import check_first_steps
    from omni.planning.layouts import count_ranks
    from omni.planning.optim_schedule import learning_rate_notes
    from omni.planning.prepare import prepare_run
    from omni.training.start import check_start

    ranks = count_ranks(config)
    spec = prepare_run(config, ranks)
    path = Path(config.run.dir).absolute()
    done, cursor, before = _continued(RunFolder(path), spec)
    if done == 0:
        cursor = config.start.cursor or 0
        check_start(spec)
    for note in learning_rate_notes(config.optim, config.train.steps, done, before):
        print(f"note: {note}", file=sys.stderr)
    check_first_steps(spec, done + 1, cursor)
    text = _written(config)
    folder, launch, restarts = RunFolder(path), new_launch(), config.launch.max_restarts
    with ExitStack() as held:
        try:
            held.enter_context(holding(folder, launch))
            write_text(folder.config, text)
        except OSError as error:
            raise ConfigError(
                f"run.dir={config.run.dir}: no run folder can be written there ({error}): choose another"
            ) from error
        print(f"starting {ranks} rank{'s' * (ranks > 1)} on this machine ...", flush=True)
        start = time.monotonic()
        code = launch_local(folder.config, ranks, WORKER, max_restarts=restarts, launch=launch, parent=parent)
    print(last_words(folder, code, config.train.steps, time.monotonic() - start), file=sys.stderr)
    return code


def _written(config: Config) -> str:
    """The text of config.yaml, which trackers are told of, too: it holds no secret of this environment."""
    text = OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)
    name = secret_in(text, os.environ)
    if name is not None:
        raise ConfigError(
            f"the configuration holds the value of {name}, and would be written to config.yaml and to W&B: "
            f"leave it in the environment, where ranks find it, too"
        )
    return text


def _continued(folder: RunFolder, spec: "RunSpec") -> tuple[int, int, int | None]:
    """Return the step after which a run folder is continued, 0 for a new one, its position in the stream, and
    its train.steps until now, None if that is not known. A folder of another run is refused before anything
    is written to it.
    """
    from infra.checkpoint import CheckpointError, latest_checkpoint, read_manifest
    from omni.training.fingerprint import check_fingerprint, fingerprint

    checkpoint = latest_checkpoint(folder.checkpoints)
    if checkpoint is None:
        return 0, 0, None
    try:
        manifest = read_manifest(checkpoint)
        check_fingerprint(manifest["fingerprint"], fingerprint(spec), checkpoint)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    with suppress(ConfigError):  # it may be of an older version, or gone
        return manifest["step"], manifest["cursor"], load_config(folder.config).train.steps
    return manifest["step"], manifest["cursor"], None
