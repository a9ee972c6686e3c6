"""The stages of a run: their number of steps becomes the run's, and each gets all keys of its optimizer.

A stage says what of `optim` is other in it. `config.yaml` of a run folder holds the stages resolved, so a run
that goes on needs nothing else.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from omni.config import Config, ConfigError
from omni.keys import check_keys
from omni.optim_config import OF_STAGE, ComponentOptimConfig, OptimConfig, StageConfig

_STEPS = "train.steps"


def take_steps(composed: DictConfig, overrides: Sequence[str]) -> None:
    """Set `train.steps` of a composed configuration to the steps of its stages, if it has any.

    Raises:
        ConfigError: if one of `overrides` sets it to another number.
    """
    stages = OmegaConf.select(composed, "stages")
    if not stages:
        return
    steps = [OmegaConf.select(stages, f"{name}.steps") for name in stages]
    if not all(type(of) is int and of > 0 for of in steps):
        return  # `typed_stages` names it
    total = sum(steps)
    named = {override.key_or_group for override in OverridesParser.create().parse_overrides(list(overrides))}
    given = OmegaConf.select(composed, _STEPS)
    if _STEPS in named and given != total:
        raise _other(given, total, list(stages)[-1])
    OmegaConf.update(composed, _STEPS, total)


def typed_stages(config: Config, merged: Callable[[type, Any, str], Any]) -> None:
    """Give each entry of `config.stages`, untyped until now, its type, with all keys of its `optim`. `merged`
    puts values into a dataclass, and names the key of one that does not fit.

    Raises:
        ConfigError: for a key that a stage cannot change, or steps that are not those of the run.
    """
    for name, value in config.stages.items():
        key = f"stages.{name}"
        stage = merged(StageConfig, value, f"{key}.")
        check_keys(key, stage)
        stage.optim = _optim(config.optim, stage.optim or {}, f"{key}.optim", merged)
        config.stages[name] = stage
    total = sum(stage.steps for stage in config.stages.values())
    if config.stages and config.train.steps != total:
        raise _other(config.train.steps, total, list(config.stages)[-1])


def _optim(base: OptimConfig, own: Any, key: str, merged: Callable[[type, Any, str], Any]) -> OptimConfig:
    """All keys of the optimizer in a stage: those of the run, and its `own` instead."""
    every: Any = OmegaConf.to_container(OmegaConf.structured(base))
    found: OptimConfig = merged(OptimConfig, OmegaConf.merge(every, own), f"{key}.")
    for name, value in vars(base).items():
        if name not in (*OF_STAGE, "components") and getattr(found, name) != value:
            raise ConfigError(
                f"{key}.{name}={getattr(found, name)}: a stage changes {', '.join(OF_STAGE)} and components, "
                f"and {name} is the same in all: set optim.{name}"
            )
    for name, value in found.components.items():
        found.components[name] = merged(ComponentOptimConfig, value, f"{key}.components.{name}.")
    return found


def _other(given: object, total: int, last: str) -> ConfigError:
    return ConfigError(
        f"{_STEPS}={given}: the stages have {total} steps together, which is what the run has; leave it out, "
        f"and set stages.{last}.steps for a longer or shorter last stage"
    )
