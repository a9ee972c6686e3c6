"""How far a run is, what ran through all of its steps, and when it must not go on.

All ranks count from the same plans and totals, so all hold the same, and stop at the same step.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataloader.loader import Failure
from infra.screen import beside
from omni.rank.totals import StepTotals
from pipeline.plan import StepPlan


class BadDataError(RuntimeError):
    """More bad data than the configuration allows; the message names the items."""


class NoUpdateError(RuntimeError):
    """Too many steps in a row, or the last ones, updated nothing; the message says why, and where to look."""


def check_failures(failures: Iterable[Failure], on_error: str, rank: int) -> None:
    """Apply `data.on_error` to what a rank could not read or decode.

    Raises:
        BadDataError: naming the first of it, unless it is to be skipped.
    """
    for failure in failures:
        sample = f"source {failure.source}, sample {failure.sample} ({failure.name!r})"
        of = "its text" if failure.item is None else f"item {failure.item}"
        text = f"{sample}, {of}: {failure.reason}"
        if on_error == "fail":
            raise BadDataError(f"{text}. Mend the data, or set data.on_error=skip to train without it.")
        beside(f"rank {rank}: skipped {text}")


FEW_SAMPLES = 1_000  # the share of bad ones is taken of so many at least: a few bad ones may come first
COUNTERS = {
    "tokens": "tokens",
    "skipped_steps": "skipped_steps",
    "dropped": "dropped",
    "truncated": "truncated",
    "bad_samples": "tombstones",  # checkpoints have called them so since the first
}
"""What runs through the whole training and is saved with it, by the names that checkpoints have."""


@dataclass
class Progression:
    """The last step that is done, where the stream goes on, and counters of the whole training.

    `sound`: neither the loss nor the gradient of the last step to learn from was other than finite.
    `metrics` is where messages send the reader.
    """

    metrics: Path
    step: int = 0
    cursor: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    dropped: int = 0
    truncated: int = 0
    bad_samples: int = 0
    skipped_in_a_row: int = 0
    sound: bool = True

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it beside the step."""
        saved = {key: getattr(self, name) for name, key in COUNTERS.items()}
        return {"cursor": self.cursor, "progression": saved}

    def restore(self, manifest: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.step, self.cursor = manifest["step"], manifest["cursor"]
        for name, key in COUNTERS.items():
            setattr(self, name, manifest["progression"].get(key, 0))  # which earlier versions did not count

    def advance(
        self,
        plan: StepPlan,
        totals: StepTotals,
        lost: int,
        truncated: int,
        updated: bool,
        max_error_share: float,
    ) -> None:
        """Count what a step did, which `lost` so many samples to bad data and had so many `truncated`, and
        move on in the stream.

        Raises:
            BadDataError: if more than this share of the samples so far had bad items.
        """
        self.step, self.cursor = plan.step, plan.taken.next_cursor
        self.tokens += plan.taken.tokens
        self.skipped_steps += not updated
        self.dropped += len(plan.taken.skipped)
        self.truncated += truncated
        self.bad_samples += lost
        self.skipped_in_a_row = 0 if updated else self.skipped_in_a_row + 1
        if totals.num_targets:  # a step without changes nothing
            self.sound = updated and math.isfinite(totals.loss)
        self.check_data(max_error_share)

    def check_data(self, max_error_share: float) -> None:
        """Stop a run of which more than this share of the samples so far had bad items.

        Raises:
            BadDataError: with the numbers.
        """
        samples = max(self.cursor, FEW_SAMPLES)
        if self.bad_samples > max_error_share * samples:
            raise BadDataError(
                f"{self.bad_samples} of {self.cursor} samples had bad items, more than "
                f"data.max_error_share={max_error_share} of {samples}: mend the data (omni data verify) or "
                f"raise the share"
            )

    def check_updates(self, totals: StepTotals, norms: Mapping[str, float], most: int) -> None:
        """Stop a run of which the last `most` steps updated nothing; `norms` are those of its gradients.

        Raises:
            NoUpdateError: naming the cause.
        """
        if self.skipped_in_a_row < most:
            return
        bad = ", ".join(f"{name} {norm}" for name, norm in norms.items() if not math.isfinite(norm))
        cause = f"the gradient norm is not finite ({bad})" if totals.num_targets else "it has no target token"
        raise NoUpdateError(
            f"step {self.step} updates nothing, because {cause}, and neither did any of the last "
            f"optim.max_skipped={most} steps. {self._remedy('skipped')}"
        )

    def check_end(self) -> None:
        """Refuse to call a run done whose last step to learn from was not finite.

        Raises:
            NoUpdateError: saying what to look at.
        """
        if not self.sound:
            raise NoUpdateError(
                f"after the last step, {self.step}, the loss or the gradient norm is not finite, and no "
                f"checkpoint of it was saved. {self._remedy('such')}"
            )

    def _remedy(self, which: str) -> str:
        return (
            f"Look at loss/train and optim/grad_norm/<component> in {self.metrics}, and at the data of the "
            f"first {which} step. Then train in a new run folder, with mended data, a lower optim.lr or a "
            f"longer warm-up; where the gradients before were as usual, a device may have damaged its "
            f"memory: then `omni resume` goes on from the last checkpoint."
        )
