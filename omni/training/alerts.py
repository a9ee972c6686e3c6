"""When somebody should look: losses that are not finite or jump, gradients of 0, steps skipped or stalled,
choices that the mixture of samples has left behind.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from omni.training.choice_watch import AT_START, COSTS, OVER

WINDOW = 50  # steps that a step is compared with, and between two alerts of a kind
ENOUGH = 20  # steps before anything is compared
SPIKE_STEPS = 3  # in a row: one step of few tokens may be far off
SPIKE_NATS = 0.3  # above the median, and ...
SPIKE_DEVIATIONS = 5  # ... so many median absolute deviations
PLAN_STEPS = 3  # in a row: the first plans of a process take longer
PLAN_S = 0.2  # steps are not held up by plans that are quicker
PLAN_SHARE = 0.9  # of a step: plans are made one after the other, so no step is shorter than its plan
STALL_RATIO = 5  # times the median step
STALL_S = 2.0
LOSS = "loss/train/"
CAUSE = "perf/idle_frac/"


@dataclass(frozen=True)
class Alert:
    """A reason to look: its kind, and a sentence."""

    title: str
    text: str


class Alerts:
    """Looks at the metrics of each step in turn.

    The loss of a source spikes when three of its steps in a row exceed the median of the 50 before by 0.3
    nats and by 5 median absolute deviations; planning is slow when it takes nine tenths of each of three
    steps in a row; a step stalls when it takes 5 times the median step and 2 s; a choice is out of date when
    steps are planned to take the share `choice_costs` longer than after it. An alert of one kind comes at
    most every 50 steps.
    """

    def __init__(self, choice_costs: float = math.inf) -> None:
        self._choice_costs = choice_costs
        self._losses: dict[str, deque[float]] = {}
        self._step_s: deque[float] = deque(maxlen=WINDOW)
        self._skipped = 0.0
        self._said: dict[str, int] = {}
        self._slow_plans = 0

    def step(self, metrics: Mapping[str, float]) -> list[Alert]:
        """Return what is to be said after a step."""
        step = int(metrics["progress/step"])
        found = [*self._not_finite(step, metrics), *self._skips(step, metrics), *self._zero(step, metrics)]
        found += [*self._spikes(step, metrics), *self._stalls(step, metrics)]
        found += [*self._plans(step, metrics), *self._outdated(step, metrics)]
        new = [alert for alert in found if step - self._said.get(alert.title, -WINDOW) >= WINDOW]
        self._said |= {alert.title: step for alert in new}
        return new

    def _plans(self, step: int, metrics: Mapping[str, float]) -> Iterator[Alert]:
        plan_s, step_s = metrics.get("plan/ms", 0.0) / 1e3, metrics.get("perf/step_s", math.inf)
        slow = plan_s >= max(PLAN_S, PLAN_SHARE * step_s)
        self._slow_plans = self._slow_plans + 1 if slow else 0
        if self._slow_plans >= PLAN_STEPS:
            yield Alert(
                "slow planning",
                f"step {step}: its plan took {plan_s:.2f} s (plan/ms) and the step {step_s:.2f} s, so ranks "
                f"wait for plans: look at the policies that were chosen, your own first",
            )

    def _outdated(self, step: int, metrics: Mapping[str, float]) -> Iterator[Alert]:
        if metrics.get(COSTS, 0.0) > self._choice_costs:
            yield Alert(
                "choice out of date",
                f"step {step}: the last steps are planned to take {metrics[COSTS]:.0%} longer, beside even "
                f"work, than when keys were chosen for the run (this one {metrics[OVER]:.2f} times even "
                f"work, then {metrics[AT_START]:.2f}): samples have become others. With "
                f"health.choose_again=true they are chosen again when the run goes on",
            )

    def _not_finite(self, step: int, metrics: Mapping[str, float]) -> Iterator[Alert]:
        bad = [key for key, value in metrics.items() if key.startswith("loss/") and not math.isfinite(value)]
        if bad:
            yield Alert("loss not finite", f"step {step}: {', '.join(bad)} not finite")

    def _skips(self, step: int, metrics: Mapping[str, float]) -> Iterator[Alert]:
        skipped = metrics.get("optim/skipped_steps", 0)
        if skipped > self._skipped:
            norm = metrics.get("optim/grad_norm", math.nan)
            so_far = f"{skipped:g} such steps since the run began"
            yield Alert("step skipped", f"step {step} updated nothing, gradient norm {norm:g}; {so_far}")
        self._skipped = skipped

    def _zero(self, step: int, metrics: Mapping[str, float]) -> Iterator[Alert]:
        if metrics.get("optim/grad_norm") == 0 and metrics.get("loss/train", 0) != 0:
            yield Alert(
                "gradient zero",
                f"step {step}: the gradient norm is exactly 0, so nothing is learnt: a weight or a moment of "
                f"the optimizer may be damaged, or everything is frozen",
            )

    def _spikes(self, step: int, metrics: Mapping[str, float]) -> Iterator[Alert]:
        for key, loss in metrics.items():
            if not key.startswith(LOSS) or not math.isfinite(loss):
                continue
            losses = self._losses.setdefault(key, deque(maxlen=WINDOW + SPIKE_STEPS))
            losses.append(loss)
            earlier, least = list(losses)[:-SPIKE_STEPS], min(list(losses)[-SPIKE_STEPS:])
            if len(earlier) < ENOUGH:
                continue
            middle = median(earlier)
            deviation = median(abs(value - middle) for value in earlier)
            if least > middle + max(SPIKE_NATS, SPIKE_DEVIATIONS * deviation):
                yield Alert(
                    "loss spike",
                    f"step {step}: {key} is {loss:.4g} and was {least:.4g} or more in its last {SPIKE_STEPS} "
                    f"steps; the median of {len(earlier)} steps before is {middle:.4g}",
                )

    def _stalls(self, step: int, metrics: Mapping[str, float]) -> Iterator[Alert]:
        step_s = metrics["perf/step_s"]
        if len(self._step_s) >= ENOUGH:
            usual = median(self._step_s)
            if step_s > max(STALL_RATIO * usual, STALL_S):
                causes = {key.removeprefix(CAUSE): v for key, v in metrics.items() if key.startswith(CAUSE)}
                worst = max(causes, key=lambda cause: causes[cause], default="")
                waited = f"; ranks waited most for {worst} ({causes[worst]:.0%})" if worst else ""
                yield Alert("stall", f"step {step} took {step_s:.1f} s, usually {usual:.2g} s{waited}")
        self._step_s.append(step_s)
