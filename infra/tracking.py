"""Where the metrics of a run go: always to metrics.jsonl, and from there to W&B, TensorBoard or Prometheus.

metrics.jsonl is the source of truth and the others are views of it: a view that cannot start is refused
with a remedy, a view that breaks later, or takes nothing more, is dropped with one warning while the run and
its JSONL continue.
Only one rank makes a tracker.
"""

import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dataloader.within import within
from infra.json_lines import JsonLines
from infra.run_folder import RunFolder, set_aside, truncate_after, write_json
from infra.shard_file import CheckpointError
from infra.tracker import KINDS, TAKE_S, About, Tracker, record
from infra.tracking_prometheus import start_prometheus

FINISH_S = 90.0  # more than W&B takes without a network, less than train.timeout_s, in which peers wait

logger = logging.getLogger(__name__)


def make_tracker(kind: str, folder: RunFolder, about: About, resumed_from: int | None) -> "Trackers":
    """The tracker `kind`: "jsonl" alone, or "wandb" or "tensorboard" on top of it; and Prometheus if asked.

    `resumed_from` is the step of the checkpoint that was loaded: later steps are dropped from the earlier
    records and the new ones follow. None starts new records; those already in the folder are renamed
    (`metrics.jsonl.1`), not overwritten.

    Raises ValueError if the kind or mode is unknown or if W&B, TensorBoard or the port cannot start.
    """
    if kind not in KINDS:
        raise ValueError(f"tracking={kind} is unknown: choose one of {', '.join(KINDS)}")
    if resumed_from is None:
        set_aside(folder.metrics)
    else:
        truncate_after(folder.metrics, resumed_from)
    views: dict[str, Tracker] = {}
    if kind == "wandb":
        # Imported when chosen: wandb takes half a second and starts a process.
        from infra.tracking_wandb import start_wandb

        views[kind] = start_wandb(folder, about, resumed_from)
    elif kind == "tensorboard":
        views[kind] = _start_tensorboard(folder, about.config, resumed_from)
    if about.prometheus is not None:
        views["prometheus"] = start_prometheus(*about.prometheus, about.name)
    return Trackers(JsonlTracker(folder, resumed_from), views)


class JsonlTracker(Tracker):
    """One line of metrics.jsonl a step, and summary.json."""

    where = "metrics.jsonl"

    def __init__(self, folder: RunFolder, resumed_from: int | None) -> None:
        self._lines = JsonLines(folder.metrics)
        self._summary_path = folder.summary
        self._summary: dict[str, object] = {}
        self._last_step = -1 if resumed_from is None else resumed_from

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line. Where the disk takes none it waits, until `settle` at the latest."""
        assert step > self._last_step, f"step {step} after step {self._last_step}: one record a step, rising"
        self._last_step = step
        self._lines.append(record(step, metrics))

    def settle(self) -> None:
        """Have all lines on the disk. A checkpoint is committed after it: what a run continues from never
        knows of a step that has no record, even if the machine fails.

        Raises:
            CheckpointError: if they cannot be written, or if the file is not the one at its path any more, so
                that records are lost.
        """
        try:
            self._lines.settle()
        except OSError as error:
            raise CheckpointError(
                f"{self._lines.path} lacks records of steps and cannot be written ({error}). A checkpoint is "
                f"saved after the records of its steps alone, so the run stops: make room there. `omni "
                f"resume` goes on from the last checkpoint where there is one"
            ) from error
        if not self._lines.is_in_place:
            raise CheckpointError(
                f"{self._lines.path} was removed or replaced while the run writes to it, and perhaps all of "
                f"its folder: what it records is lost, so it stops. `omni resume` goes on from the last "
                f"checkpoint where there is one"
            )

    def summary(self, values: Mapping[str, object]) -> None:
        """Write summary.json, atomically; one that cannot be written is told."""
        self._summary.update(values)
        try:
            write_json(self._summary_path, self._summary)
        except OSError as error:
            logger.warning("%s is not written: %s", self._summary_path, error)

    def finish(self, exit_code: int) -> None:
        """Close the file."""
        self._lines.close()


class Trackers(Tracker):
    """JSONL first, then each view, until that view fails."""

    def __init__(self, jsonl: JsonlTracker, views: dict[str, Tracker]) -> None:
        self._jsonl = jsonl
        self._views = views
        self.where = ", ".join(each.where for each in (jsonl, *views.values()))
        self.shows_pictures = any(view.shows_pictures for view in views.values())

    def picture(self, step: int, name: str, svg: str) -> None:
        """Hand on to the views."""
        self._each(lambda view: view.picture(step, name, svg))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append to metrics.jsonl, then hand on."""
        self._jsonl.log(step, metrics)
        self._each(lambda view: view.log(step, metrics))

    def settle(self) -> None:
        """Have metrics.jsonl on the disk."""
        self._jsonl.settle()

    def checkpoint(self, step: int, where: str) -> None:
        """Hand on to the views."""
        self._each(lambda view: view.checkpoint(step, where))

    def alert(self, title: str, text: str) -> None:
        """Hand on to the views."""
        self._each(lambda view: view.alert(title, text))

    def summary(self, values: Mapping[str, object]) -> None:
        """Write summary.json, then hand on."""
        self._jsonl.summary(values)
        self._each(lambda view: view.summary(values))

    def finish(self, exit_code: int) -> None:
        """Close all."""
        self._jsonl.finish(exit_code)
        self._each(lambda view: view.finish(exit_code), FINISH_S)

    def _each(self, call: Callable[[Tracker], None], seconds: float = TAKE_S) -> None:
        for kind, view in list(self._views.items()):
            try:
                within(seconds, partial(call, view))
            except Exception as error:
                del self._views[kind]
                logger.warning(
                    "tracking: %s failed and is dropped, metrics.jsonl continues (`omni sync` brings W&B "
                    "level with it afterwards): %r",
                    kind,
                    error,
                    exc_info=error,
                )


def _start_tensorboard(folder: RunFolder, config: Mapping[str, Any], resumed_from: int | None) -> Tracker:
    path = folder.path / "tensorboard"
    if resumed_from is None:
        set_aside(path)
    try:
        return _TensorBoard(path, config, resumed_from)
    except Exception as error:
        raise ValueError(
            f"tracking=tensorboard cannot start ({error!r}): install tensorboard and make {path} writable, "
            "or choose tracking=jsonl"
        ) from error


class _TensorBoard(Tracker):
    where = "TensorBoard (tensorboard/)"

    def __init__(self, path: Path, config: Mapping[str, Any], resumed_from: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides the events of the steps that the resumed run repeats.
        self._writer = SummaryWriter(str(path), purge_step=None if resumed_from is None else resumed_from + 1)
        self._write_text("config", config)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in record(step, metrics).items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()  # under 1 ms, and a killed run has lost nothing

    def summary(self, values: Mapping[str, object]) -> None:
        self._write_text("summary", values)

    def finish(self, exit_code: int) -> None:
        self._writer.close()

    def _write_text(self, tag: str, values: Mapping[str, Any]) -> None:
        indented = json.dumps(values, indent=2, default=str).replace("\n", "\n    ")
        self._writer.add_text(tag, "    " + indented)  # Markdown's code block
