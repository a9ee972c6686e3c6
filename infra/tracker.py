"""What every tracker is: what it is told of the run, and of each of its steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KINDS = ("jsonl", "wandb", "tensorboard")
MODES = ("auto", "offline", "online")  # of W&B
TAKE_S = 30.0  # for a view to take a record, which is milliseconds where its process or disk is not stuck
TIMELINE = "timeline"  # the picture of a recorded step


@dataclass(frozen=True)
class About:
    """What a tracker is told of a run before its first step: the resolved configuration in plain containers,
    and W&B's name, project, group, mode ("auto", online if a key for the W&B host is configured, else
    offline; "offline" or "online") and tags; and the host and port that Prometheus scrapes, if it does.
    """

    config: Mapping[str, Any]
    name: str
    project: str = "omni"
    group: str | None = None
    mode: str = "auto"
    tags: tuple[str, ...] = ()
    prometheus: tuple[str, int] | None = None


class Tracker:
    """What the run knows of tracking. What a tracker has no place for, it leaves as it is here.

    `where` says in a few words where it all goes.
    """

    where = ""
    shows_pictures = False

    def picture(self, step: int, name: str, svg: str) -> None:
        """Record a picture of a step, before the step itself."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step, once, steps rising. "progress/step" is added to the record."""

    def checkpoint(self, step: int, where: str) -> None:
        """Record where the checkpoint of a step lies, a path of this machine or a URL; nothing is copied."""

    def alert(self, title: str, text: str) -> None:
        """Tell whoever watches the run of something that needs a look."""

    def summary(self, values: Mapping[str, object]) -> None:
        """Add to the final numbers of the run; later values replace earlier ones of the same name."""

    def finish(self, exit_code: int) -> None:
        """Write everything out and close; 0 marks the run as succeeded."""


def record(step: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """One step as every tracker stores it: "progress/step" first, ints as ints, all else as float64."""
    assert metrics.get("progress/step", step) == step, f"metrics of step {metrics['progress/step']} at {step}"
    values = {key: value if type(value) is int else float(value) for key, value in metrics.items()}
    return {"progress/step": step, **values}
