"""`omni train`: compose the configuration, check it, write the run folder, start the ranks.

A multirun is a sweep: all its jobs are checked before the first is started. One that fails then leaves the
others running.
"""

import os
import sys
from collections.abc import Sequence

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from omni.commands._jobs import prepare_jobs
from omni.commands._launchers import Composed, LauncherConfig, offer_launchers, settings_of, single_job
from omni.commands._start import start_jobs
from omni.compose import offer_policies
from omni.refusals import refusal


def run(arguments: list[str]) -> int:
    """Hand the command line to Hydra. The exit code is that of the run, of a sweep that of the first job
    which did not complete; 2 for a user's mistake.
    """
    parent = os.getppid()  # before anything that takes time: whoever started this may end meanwhile
    sys.argv = ["omni train", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors on instead of printing them
    offer_policies()
    codes: list[int] = []
    in_job = False

    def launch(composed: Sequence[Composed], launcher: LauncherConfig) -> Sequence[int]:
        nonlocal in_job
        in_job = True
        own = start_jobs(prepare_jobs(composed, launcher), launcher, composed[0].sweep, parent)
        in_job = False
        codes.extend(own)
        return own

    def task(config: DictConfig) -> None:
        try:
            launch([single_job(config)], settings_of(HydraConfig.get().launcher))
        except ValueError as error:  # told here, or Hydra adds a line of its own
            print(f"error: {error}", file=sys.stderr)
            codes.append(2)

    leave_nothing = offer_launchers(launch)
    try:
        hydra.main(version_base="1.3", config_path="pkg://hydra_conf", config_name="config")(task)()
    except Exception as error:
        if isinstance(error, BrokenPipeError) or (in_job and not isinstance(error, ValueError)):
            raise
        leave_nothing()
        # Outside a job they are Hydra's, and all of them about the command line.
        print(f"error: {error if in_job else refusal(error, arguments)}", file=sys.stderr)
        return 2
    return next((code for code in codes if code), 0)
