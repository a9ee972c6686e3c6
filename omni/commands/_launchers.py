"""Hydra's launchers are ours: all jobs of a multirun are composed, checked, and only then started.

Hydra composes; `composed_jobs` gives what it composed, one entry a job, each resolved by itself, so that a
sweep may change anything, also how many ranks and nodes a job takes. `settings_of` types the chosen
launcher's keys.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, filter_overrides, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.plugins.plugin import Plugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from infra.launchers.ray_cluster import RayError, check_installed
from infra.launchers.script import Batch
from omni.config import ConfigError

KINDS = ("local", "render", "slurm", "ray")
MULTIRUN = "multirun.yaml"  # which Hydra writes into the folder of a sweep


@dataclass
class LauncherConfig(Batch):
    """The keys of all launchers; `hydra_conf/hydra/launcher/` says what they mean and which each has."""

    kind: str = "local"
    parallel: int = 1
    ranks_per_node: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    wait: bool = False
    address: str | None = None
    room_s: int = 600


@dataclass(frozen=True)
class Composed:
    """A job as Hydra composed it, without Hydra's own section.

    `overrides` are all that were given for it, `sets` those that tell it from the other jobs of its sweep,
    which has the folder `sweep`; a single run has neither.
    """

    config: DictConfig
    overrides: tuple[str, ...]
    number: int = 0
    sets: tuple[str, ...] = ()
    sweep: Path | None = None


def settings_of(launcher: Any) -> LauncherConfig:
    """Return the keys of the launcher that was chosen.

    Raises:
        ConfigError: for a launcher that is not ours or not installed, and for values of a wrong type.
    """
    values = OmegaConf.to_container(launcher, resolve=True)
    assert isinstance(values, dict)
    values.pop("_target_", None)
    if values.get("kind") not in KINDS:
        raise ConfigError(f"hydra/launcher: choose one of {', '.join(KINDS)}; Hydra's own do not start ranks")
    if isinstance(values.get("time"), int):
        raise ConfigError(
            f"hydra.launcher.time={values['time']}: YAML reads 24:00:00 as seconds, Slurm a number "
            f"as minutes: write '24:00:00' in quotes, and minutes as '60:00'"
        )
    try:
        settings: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(LauncherConfig), values))
    except (OmegaConfBaseException, ValueError) as error:
        key = getattr(error, "full_key", "")
        raise ConfigError(f"hydra.launcher.{key}: {str(error).splitlines()[0]}") from error
    least_values = {"parallel": 1, "ranks_per_node": 1, "cpus_per_rank": 1, "save_before_s": 0, "room_s": 0}
    for key, least in least_values.items():
        value = getattr(settings, key)
        if value is not None and value < least:
            raise ConfigError(f"hydra.launcher.{key}={value}: must be at least {least}")
    if settings.kind == "ray":
        try:
            check_installed()
        except RayError as error:
            raise ConfigError(str(error)) from error
    return settings


def offer_launchers(
    start: Callable[[Sequence[Composed], LauncherConfig], Sequence[int]],
) -> Callable[[], None]:
    """Have Hydra hand all jobs of a multirun to `start`, which returns their exit codes.

    Returns what takes away the folders that Hydra makes for a sweep first of all: for one that is refused.
    """
    made: list[Path] = []

    def leave_nothing() -> None:
        with suppress(OSError, IndexError):
            (made[0] / MULTIRUN).unlink()
            for folder in made:
                folder.rmdir()

    class OmniLauncher(Launcher):
        def __init__(self, **settings: Any) -> None:
            pass  # they are read from the configuration, where they are whole

        def setup(
            self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
        ) -> None:
            self.context, self.config = hydra_context, config
            folder = Path(config.hydra.sweep.dir).absolute()
            made.extend(path for path in (folder, *folder.parents) if not path.exists())

        def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
            setup_globals()
            jobs = list(_compose(self.context, self.config, job_overrides, initial_job_idx))
            codes = start(jobs, settings_of(self.config.hydra.launcher))
            return [_returned(job, code) for job, code in zip(jobs, codes, strict=True)]

    _register(OmniLauncher, _sweeper())
    return leave_nothing


def _sweeper() -> type[Sweeper]:
    """Hydra's own, but for composing every job a first time to see whether that works: here all jobs are
    composed before the first one starts anyway.
    """
    Plugins.instance()  # first, because it runs the modules of Hydra's plugins again
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    class OmniSweeper(BasicSweeper):
        def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
            pass

    return OmniSweeper


def _register(*classes: type[Plugin]) -> None:
    """Let Hydra find classes as `hydra_plugins.omni.<name>`: it takes plugins from hydra_plugins alone."""
    plugins = Plugins.instance()  # first, because it looks for a hydra_plugins that is installed
    home = sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))
    own = sys.modules["hydra_plugins.omni"] = ModuleType("hydra_plugins.omni")
    home.omni = own  # type: ignore[attr-defined]
    for each in classes:
        setattr(own, each.__name__, each)
        each.__module__, each.__qualname__ = own.__name__, each.__name__
        plugins.register(each)


def single_job(config: DictConfig) -> Composed:
    """Return the job of a run that is no multirun, from within Hydra's task function."""
    return Composed(config, tuple(HydraConfig.get().overrides.task))


def _compose(
    context: HydraContext, master: DictConfig, job_overrides: Sequence[Sequence[str]], first: int
) -> Iterator[Composed]:
    sweep = Path(master.hydra.sweep.dir).absolute()
    common = set(job_overrides[0]).intersection(*job_overrides[1:]) if len(job_overrides) > 1 else set()
    for number, overrides in enumerate(job_overrides, first):
        composed = context.config_loader.load_sweep_config(master, list(overrides))
        with read_write(composed), open_dict(composed):
            composed.hydra.job.id = composed.hydra.job.num = number
            composed.hydra.runtime.output_dir = str(sweep / str(composed.hydra.sweep.subdir))
            composed.hydra.sweep.dir = str(sweep)
        HydraConfig.instance().set_config(composed)  # ${hydra:…} in the job's own keys
        given = tuple(filter_overrides(overrides))
        config = deepcopy(composed)
        with read_write(config), open_dict(config):
            del config["hydra"]
            if not any(override.startswith("run.dir=") for override in given):
                config.run.dir = composed.hydra.runtime.output_dir
        yield Composed(config, given, number, tuple(each for each in given if each not in common), sweep)


def _returned(job: Composed, code: int) -> JobReturn:
    returned = JobReturn(overrides=job.overrides, cfg=job.config, working_dir=job.config.run.dir)
    returned.status, returned.return_value = JobStatus.COMPLETED, code
    return returned
