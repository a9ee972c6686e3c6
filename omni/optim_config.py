"""The keys of the optimizer, of components and of stages: dataclasses that type `optim` and `stages`. No
torch here.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from omni.keys import Rule, Rules, at_least, one_of

LR_SCHEDULES = ("cosine", "wsd")


@dataclass
class ComponentOptimConfig:
    """Per component: a factor on the learning rate, the spans of steps [first, last) it is frozen for or
    true for all, and rates and a schedule of its own. Keys that are null are those of `optim`.
    """

    lr_scale: float = at_least(0, 1.0)
    frozen: Any = field(default_factory=list)
    lr: float | None = at_least(0, None)
    min_lr: float | None = at_least(0, None)
    warmup_steps: int | None = at_least(0, None)
    schedule: str | None = one_of((*LR_SCHEDULES, None), None)
    decay_steps: int | None = at_least(1, None)

    rules: ClassVar[Rules] = (
        Rule("frozen", lambda own: _are_spans(own.frozen), "give true, false, or spans [first, last)"),
    )


def _are_spans(frozen: Any) -> bool:
    """Whether `frozen` says of every step whether a component is."""
    if isinstance(frozen, bool):
        return True
    return isinstance(frozen, list) and all(
        isinstance(span, list)
        and len(span) == 2
        and all(type(step) is int for step in span)
        and 0 <= span[0] < span[1]
        for span in frozen
    )


@dataclass
class OptimConfig:
    """AdamW and its schedule: linear warm-up, then cosine or WSD (stable, then linear decay) to `min_lr`.

    `moments_dtype` is that of both moments as they are kept; what is computed with them is in fp32. In bf16
    they take half of the memory, and are rounded so that their mean stays (`ops/adamw.py`).
    `max_skipped` steps in a row without an update, because their gradient norm was not finite, end the run.
    """

    lr: float = at_least(0)
    min_lr: float = at_least(0, 0.0)
    warmup_steps: int = at_least(0, 0)
    schedule: str = one_of(LR_SCHEDULES, "cosine")
    decay_steps: int | None = at_least(1, None)
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = at_least(1e-20, 1e-8)
    weight_decay: float = at_least(0, 0.1)
    moments_dtype: str = one_of(("fp32", "bf16"), "fp32")
    clip: float = at_least(0, 1.0)
    max_skipped: int = at_least(1, 10)
    components: dict[str, Any] = field(default_factory=dict)

    rules: ClassVar[Rules] = (
        Rule("beta1", lambda own: 0 <= own.beta1 < 1, "must lie in [0, 1)"),
        Rule("beta2", lambda own: 0 <= own.beta2 < 1, "must lie in [0, 1)"),
    )


OF_STAGE = ("lr", "min_lr", "warmup_steps", "schedule", "decay_steps")
"""Keys of `optim` that may differ by stage and, with `components`, by component."""


@dataclass
class StageConfig:
    """`steps` of a run, one stage after the other in the order of `stages`, and what of `optim` is
    other in them: rates, their schedule, and `components`. Steps of schedules and of spans count from 1 in
    each stage. What a stage does not say is that of `optim`.
    """

    steps: int = at_least(1)
    optim: Any = field(default_factory=dict)
