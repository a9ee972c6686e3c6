"""Ranks that measure something on this machine: checked and written down first, then run to their end."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from omni.config import ConfigError

if TYPE_CHECKING:
    from omni.config import Config
    from omni.planning.run_spec import RunSpec


def written(config: "Config") -> "RunSpec":
    """Write a configuration into its run folder, with what is chosen for it, and return what its ranks will
    run.

    Raises:
        ValueError: if it is refused.
    """
    from omegaconf import OmegaConf

    from infra.run_folder import RunFolder, write_text
    from omni.planning.layouts import count_ranks
    from omni.planning.prepare import prepare_run
    from omni.planning.trainable import check_trainable
    from omni.training.start import check_start

    check_trainable(config)
    spec = prepare_run(config, count_ranks(config.launch))
    for line in spec.choice.lines() if spec.choice else ():
        print(line, file=sys.stderr)
    check_start(spec)
    folder = RunFolder.create(Path(config.run.dir))
    write_text(folder.config, OmegaConf.to_yaml(OmegaConf.structured(spec.config), resolve=True))
    return spec


def run_to_end(spec: "RunSpec", module: str, env: Mapping[str, str] | None = None) -> None:
    """Run a module as the ranks of a configuration that was written, to their end. `env` is added to their
    environment.

    Raises:
        ConfigError: if one failed.
    """
    from infra.launch import launch_local
    from infra.run_folder import RunFolder

    code = launch_local(RunFolder(Path(spec.config.run.dir)).config, spec.arrangement.world, module, env=env)
    if code:
        raise ConfigError(f"the ranks of the measurement failed with exit code {code}: see above")
