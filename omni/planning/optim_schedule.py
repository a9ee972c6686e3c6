"""Learning rate and freezing as functions of the step alone."""

import math
from collections.abc import Mapping

from omni.config import ComponentOptimConfig, ConfigError, OptimConfig


def check_optim(config: OptimConfig, components: tuple[str, ...], steps: int) -> None:
    """Raise ConfigError for settings that contradict each other."""
    warmup = warmup_steps(config, steps)
    if config.decay_steps is not None and warmup + config.decay_steps > steps:
        raise ConfigError(
            f"optim.decay_steps={config.decay_steps} and a warm-up of {warmup} do not fit train.steps={steps}"
        )
    for name in config.components:
        if name not in components:
            raise ConfigError(
                f"optim.components.{name}: there is no such component; there are {', '.join(components)}"
            )
    starts = {1} | {span[0] for component in config.components.values() for span in component.frozen}
    for step in sorted(s for s in starts if 1 <= s <= steps):
        if len(frozen_components(config.components, step)) == len(components):
            raise ConfigError(f"optim.components: every component is frozen at step {step}; nothing trains")


def warmup_steps(config: OptimConfig, steps: int) -> int:
    """Return the steps of warm-up in a run of `steps`: those configured, or a tenth of a run that is shorter
    than they are, so that a first try of a few steps needs no other settings.
    """
    return config.warmup_steps if config.warmup_steps <= steps else steps // 10


def learning_rate_notes(
    config: OptimConfig, steps: int, done: int = 0, before: int | None = None
) -> list[str]:
    """Say where learning rates are not what a user may expect: of a warm-up that is shortened, and of a run
    that goes on after step `done` with `steps` in all where it had `before`.
    """
    notes = []
    warmup = warmup_steps(config, steps)
    if warmup != config.warmup_steps:
        notes.append(
            f"optim.warmup_steps={config.warmup_steps} does not fit train.steps={steps}: the warm-up takes "
            f"{warmup} steps"
        )
    if before is not None and 0 < done < steps:
        was, now = learning_rate(config, done, before), learning_rate(config, done + 1, steps)
        if was != learning_rate(config, done, steps):
            notes.append(
                f"train.steps was {before} and is {steps}, and learning rates follow it: step {done} had "
                f"{was:.3g}, step {done + 1} takes {now:.3g}"
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
    return tuple(
        sorted(
            name
            for name, component in components.items()
            if any(first <= step < last for first, last in component.frozen)
        )
    )
