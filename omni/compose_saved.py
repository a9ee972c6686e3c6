"""From the configuration of a run and overrides to that of the run continued, or of a stage of its own.

A configuration that was saved is resolved: it no longer knows which options it was composed of. So an option
that is chosen anew, such as `layout=pp2`, replaces its whole section, as if it had been composed of it alone;
other keys stay as they were saved.
"""

from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from omni.compose import check_shadowed, is_choice, keys_of, leaves, offer_policies, own_files, to_config
from omni.compose_stages import take_steps
from omni.config import Config, ConfigError
from omni.planning.choice import continued
from omni.refusals import refusal

NAME = "saved"
LAUNCHER = "hydra/launcher="


def compose_saved(
    saved: Config, overrides: Sequence[str], config_dir: str | None = None
) -> tuple[Config, Any]:
    """Return a run's configuration with overrides as `omni train` takes them, and the keys of the launcher
    that they choose, which is not part of a run: `local` unless they say otherwise.

    Raises:
        ConfigError: as `compose_config` does, and for an experiment: it was composed into the run.
    """
    searched = own_files(config_dir)
    GlobalHydra.instance().clear()
    offer_policies()
    values = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(saved)))
    assert isinstance(values, DictConfig)
    try:
        with initialize_config_module("hydra_conf", version_base="1.3"):
            appended = [_appended(values, text) for text in overrides]
            if not any(text.startswith(LAUNCHER) for text in overrides):
                appended.append(f"{LAUNCHER}local")
            ConfigStore.instance().store(name=NAME, node=values)
            composed = compose(NAME, [*searched, *appended], return_hydra_config=True)
            check_shadowed(composed, appended)
            given = keys_of(overrides)
            take_steps(composed, overrides)
            _follow(composed, values, given)
            launcher = OmegaConf.create(OmegaConf.to_container(composed.hydra.launcher, resolve=True))
            with open_dict(composed):
                del composed["hydra"]
    except ConfigError:
        raise
    except Exception as error:  # Hydra raises many kinds; all of them are about the overrides
        raise ConfigError(refusal(error, overrides)) from error
    return continued(to_config(composed), saved, given), launcher


def _follow(composed: DictConfig, values: DictConfig, given: set[str]) -> None:
    """Let stages, which were saved with all keys of `optim`, have those that are other now in the run: what
    of a stage was that of the run, and is not given itself.
    """
    of_run: Any = OmegaConf.to_container(values.optim)
    for key, was in leaves(of_run):
        now = OmegaConf.select(composed, f"optim.{key}")
        for own in (f"stages.{name}.optim.{key}" for name in composed.stages if now != was):
            if own not in given and OmegaConf.select(composed, own) == was:
                OmegaConf.update(composed, own, now)


def _appended(values: DictConfig, text: str) -> str:
    """Return an override as the saved values take it: there an option is always new. Empties its section."""
    override = OverridesParser.create().parse_override(text)
    if not is_choice(override):
        return text
    group, option = override.key_or_group, override.value()
    if group == "experiment":
        raise ConfigError(f"experiment={option}: the run has one composed into it; set the keys that change")
    loader: Any = GlobalHydra.instance().config_loader()
    loaded = loader.repository.load_config(f"{group}/{option}")  # None: Hydra will say which ones there are
    section = group.replace("/", ".")
    empty = OmegaConf.select(OmegaConf.structured(Config), section, default=None)
    if loaded is not None and loaded.header.get("package") is None and empty is not None:
        OmegaConf.update(values, section, OmegaConf.to_container(empty), merge=False)
    return f"+{group}={option}"
