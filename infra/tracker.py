"""What every tracker is: the interface that the trainer knows, and a step as all of them store it."""

from collections.abc import Mapping
from typing import Protocol

KINDS = ("jsonl", "wandb", "tensorboard")
MODES = ("auto", "offline", "online")  # of W&B


class Tracker(Protocol):
    """What the trainer knows of tracking."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step, once, steps rising. "progress/step" is added to the record."""

    def summary(self, values: Mapping[str, object]) -> None:
        """Add to the final numbers of the run; later values replace earlier ones of the same name."""

    def finish(self, exit_code: int) -> None:
        """Write everything out and close; 0 marks the run as succeeded."""


def record(step: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """One step as every tracker stores it: "progress/step" first, ints as ints, all else as float64."""
    assert metrics.get("progress/step", step) == step, f"metrics of step {metrics['progress/step']} at {step}"
    values = {key: value if type(value) is int else float(value) for key, value in metrics.items()}
    return {"progress/step": step, **values}
