"""Learning rate and freezing as functions of the step alone, by stage and component."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from omni.config import ConfigError
from omni.optim_config import OF_STAGE, ComponentOptimConfig, OptimConfig, StageConfig


@dataclass(frozen=True)
class OptimStage:
    """Steps of a run from its step `first` on, under one `optim`; `name` is "" where a run has no stages."""

    name: str
    first: int
    steps: int
    optim: OptimConfig


Stages = tuple[OptimStage, ...]


def stages_of(optim: OptimConfig, stages: Mapping[str, StageConfig], steps: int) -> Stages:
    """Return the stages of a run of `steps`, in their order; one of all steps if there are none."""
    if not stages:
        return (OptimStage("", 1, steps, optim),)
    firsts = accumulate((stage.steps for stage in stages.values()), initial=1)
    return tuple(
        OptimStage(name, first, stage.steps, stage.optim)
        for (name, stage), first in zip(stages.items(), firsts, strict=False)
    )


def stage_at(stages: Stages, step: int) -> OptimStage:
    """Return the stage that a step is in; what comes after the end counts to the last."""
    return next((stage for stage in reversed(stages) if stage.first <= step), stages[0])


def frozen_at(stages: Stages, step: int) -> tuple[str, ...]:
    """Return the components that do not train at `step` of the run, in the order of their names."""
    stage = stage_at(stages, step)
    return frozen_components(stage.optim.components, step - stage.first + 1)


def first_steps(stages: Stages, components: tuple[str, ...]) -> dict[str, int]:
    """Return the first step in which each component learns; those that never do are left out."""
    found: dict[str, int] = {}
    for stage in stages:
        spans = [of.frozen for of in stage.optim.components.values() if not isinstance(of.frozen, bool)]
        for own in sorted({1} | {last for of in spans for _, last in of if last <= stage.steps}):
            frozen = frozen_components(stage.optim.components, own)
            for name in components:
                if name not in frozen:
                    found.setdefault(name, stage.first + own - 1)
    return found


def rate_at(stages: Stages, name: str, step: int) -> float:
    """Learning rate of a component at `step` of the run, 0 while it is frozen."""
    if name in frozen_at(stages, step):
        return 0.0
    stage = stage_at(stages, step)
    own = stage.optim.components.get(name)
    rate = learning_rate(of_component(stage.optim, name), step - stage.first + 1, stage.steps)
    return rate * (own.lr_scale if own else 1.0)


def of_component(config: OptimConfig, name: str) -> OptimConfig:
    """Return the optimizer's keys with the rates and the schedule that a component has of its own."""
    own = config.components.get(name)
    said = {key: value for key in OF_STAGE if (value := getattr(own, key, None)) is not None}
    return replace(config, **said)


def check_stages(stages: Stages, components: tuple[str, ...]) -> None:
    """Raise ConfigError for settings of a stage that contradict each other, naming it."""
    for stage in stages:
        check_optim(stage.optim, components, stage.steps, stage.name)


def check_optim(config: OptimConfig, components: tuple[str, ...], steps: int, stage: str = "") -> None:
    """Raise ConfigError for settings that contradict each other; `stage` names the stage that they are of."""
    section, total = (f"stages.{stage}.optim", f"stages.{stage}.steps") if stage else ("optim", "train.steps")
    for name in config.components:
        if name not in components:
            raise ConfigError(
                f"{section}.components.{name}: there is no such component; there are {', '.join(components)}"
            )
    for name in ("", *config.components):
        own, of = of_component(config, name), f"{section}.components.{name}" if name else section
        if own.min_lr > own.lr:
            raise ConfigError(
                f"{of}: min_lr={own.min_lr} is above lr={own.lr}, and rates would rise to it: give a min_lr "
                f"of at most lr there"
            )
        warmup = warmup_steps(own, steps)
        if own.decay_steps is not None and warmup + own.decay_steps > steps:
            raise ConfigError(
                f"{of}.decay_steps={own.decay_steps} and a warm-up of {warmup} do not fit {total}={steps}"
            )
    spans = [of.frozen for of in config.components.values() if not isinstance(of.frozen, bool)]
    for step in sorted({1} | {first for of in spans for first, _ in of if 1 <= first <= steps}):
        if len(frozen_components(config.components, step)) == len(components):
            raise ConfigError(
                f"{section}.components: every component is frozen at step {step}; nothing trains"
            )


def warmup_steps(config: OptimConfig, steps: int) -> int:
    """Return the steps of warm-up in a run of `steps`: those configured, or a tenth of a run that is shorter
    than they are, so that a first try of a few steps needs no other settings.
    """
    return config.warmup_steps if config.warmup_steps <= steps else steps // 10


def stage_notes(stages: Stages, done: int = 0, before: int | None = None) -> list[str]:
    """Say where learning rates are not what a user may expect, by stage, and by component where its
    rates are its own; as `learning_rate_notes`.
    """
    notes = []
    for stage in stages:
        past = stage.first - 1  # only the last stage may have another length than before
        had = before - past if before is not None and stage is stages[-1] else None
        given = stage.steps, max(0, done - past), had
        said = learning_rate_notes(stage.optim, *given)
        for name in stage.optim.components:
            own = of_component(stage.optim, name)
            if learning_rate_notes(own, *given) != said:
                said += learning_rate_notes(own, *given, f"optim.components.{name}")
        notes += [f"stages.{stage.name}: {note}" if stage.name else note for note in said]
    return notes


def learning_rate_notes(
    config: OptimConfig, steps: int, done: int = 0, before: int | None = None, key: str = "optim"
) -> list[str]:
    """Say where learning rates are not what a user may expect: of a warm-up that is shortened, and of a run
    that goes on after step `done` with `steps` in all where it had `before`. `key` is where they are set.
    """
    notes = []
    warmup = warmup_steps(config, steps)
    if warmup != config.warmup_steps:
        notes.append(
            f"{key}.warmup_steps={config.warmup_steps} does not fit train.steps={steps}: the warm-up takes "
            f"{warmup} steps"
        )
    if before is not None and 0 < done < steps:
        was, now = learning_rate(config, done, before), learning_rate(config, done + 1, steps)
        if was != learning_rate(config, done, steps):
            notes.append(
                f"train.steps was {before} and is {steps}, and learning rates of {key} follow it: step "
                f"{done} had {was:.3g}, step {done + 1} takes {now:.3g}"
            )
    return notes


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Learning rate of step `step` (1 … steps), before a component's own factor.

    Warm-up (`warmup_steps`) rises linearly and reaches `lr` at its last step. Cosine then falls over all
    remaining steps; WSD stays and falls linearly over the last `decay_steps` (all remaining ones if null).
    Both end at `min_lr`.
    """
    warmup = warmup_steps(config, steps)
    if step <= warmup:
        return config.lr * step / warmup
    after = steps - warmup
    decay = after if config.decay_steps is None or config.schedule == "cosine" else config.decay_steps
    done = max(0.0, (step - (steps - decay)) / decay) if decay else 1.0
    share = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1.0 - done
    return config.min_lr + (config.lr - config.min_lr) * share


def frozen_components(components: Mapping[str, ComponentOptimConfig], step: int) -> tuple[str, ...]:
    """Return the components that do not train at `step`, in the order of their names."""
    return tuple(sorted(name for name, component in components.items() if _is_frozen(component, step)))


def _is_frozen(component: ComponentOptimConfig, step: int) -> bool:
    if isinstance(component.frozen, bool):
        return component.frozen
    return any(first <= step < last for first, last in component.frozen)
