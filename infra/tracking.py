"""Where the metrics of a run go: always to metrics.jsonl, and from there to W&B or TensorBoard if chosen.

metrics.jsonl is the source of truth and the others are views of it: a view that cannot start is refused
with a remedy, a view that breaks later is dropped with one warning while the run and its JSONL continue.
Only one rank makes a tracker.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.run_folder import RunFolder, append_line, set_aside, truncate_after, write_json
from infra.tracker import KINDS, Tracker, record

logger = logging.getLogger(__name__)


def make_tracker(
    kind: str,
    folder: RunFolder,
    config: Mapping[str, Any],
    name: str,
    project: str,
    group: str | None,
    mode: str,
    resumed_from: int | None,
) -> Tracker:
    """The tracker `kind`: "jsonl" alone, or "wandb" or "tensorboard" on top of it.

    `config` is the resolved configuration in plain containers. `name`, `project`, `group` and `mode` are
    W&B's; `mode` is "auto" (online if a key for the W&B host is configured, else offline), "offline" or
    "online". `resumed_from` is the step of the checkpoint that was loaded: later steps are dropped from the
    earlier records and the new ones follow. None starts new records; those already in the folder are
    renamed (`metrics.jsonl.1`), not overwritten.

    Raises ValueError if the kind or mode is unknown or if W&B or TensorBoard cannot start.
    """
    if kind not in KINDS:
        raise ValueError(f"tracking={kind} is unknown: choose one of {', '.join(KINDS)}")
    if resumed_from is None:
        set_aside(folder.metrics)
    else:
        truncate_after(folder.metrics, resumed_from)
    view: Tracker | None = None
    if kind == "wandb":
        # Imported when chosen: wandb takes half a second and starts a process.
        from infra.tracking_wandb import start_wandb

        view = start_wandb(folder, config, name, project, group, mode, resumed_from)
    elif kind == "tensorboard":
        view = _start_tensorboard(folder, config, resumed_from)
    jsonl = JsonlTracker(folder, resumed_from)
    return jsonl if view is None else _WithView(jsonl, view, kind)


class JsonlTracker:
    """One line of metrics.jsonl a step, and summary.json."""

    def __init__(self, folder: RunFolder, resumed_from: int | None) -> None:
        self._file = folder.metrics.open("a", encoding="utf-8")
        self._summary_path = folder.summary
        self._summary: dict[str, object] = {}
        self._last_step = -1 if resumed_from is None else resumed_from

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append and flush one line."""
        assert step > self._last_step, f"step {step} after step {self._last_step}: one record a step, rising"
        self._last_step = step
        append_line(self._file, record(step, metrics))

    def summary(self, values: Mapping[str, object]) -> None:
        """Write summary.json, atomically."""
        self._summary.update(values)
        write_json(self._summary_path, self._summary)

    def finish(self, exit_code: int) -> None:
        """Close the file."""
        self._file.close()


class _WithView:
    """JSONL first, then the view, until the view fails."""

    def __init__(self, jsonl: JsonlTracker, view: Tracker, kind: str) -> None:
        self._jsonl = jsonl
        self._view: Tracker | None = view
        self._kind = kind

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._jsonl.log(step, metrics)
        if self._view is not None:
            try:
                self._view.log(step, metrics)
            except Exception as error:
                self._drop(error)

    def summary(self, values: Mapping[str, object]) -> None:
        self._jsonl.summary(values)
        if self._view is not None:
            try:
                self._view.summary(values)
            except Exception as error:
                self._drop(error)

    def finish(self, exit_code: int) -> None:
        self._jsonl.finish(exit_code)
        if self._view is not None:
            try:
                self._view.finish(exit_code)
            except Exception as error:
                self._drop(error)

    def _drop(self, error: Exception) -> None:
        self._view = None
        logger.warning(
            "tracking: %s failed and is dropped, metrics.jsonl continues: %r",
            self._kind,
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


class _TensorBoard:
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
