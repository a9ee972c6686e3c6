"""What a run is doing, read from its folder alone: by anyone who may read the files, from any machine."""

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dataloader.storage import Storage
from infra.checkpoint import complete, folder_of
from infra.run_folder import RunFolder
from infra.run_lock import Holder, holder_of

TAIL_BYTES = 2**16  # that surely hold the last record
QUIET_STEPS = 10  # as long as so many steps without a record is worth a word
QUIET_S = 60.0


@dataclass(frozen=True)
class RunState:
    """A run as its folder shows it.

    `alive` says whether the `holder` of the lock still runs, None if that cannot be seen from here. `record`
    is the last line of the metrics, empty if there is none, written `age_s` seconds ago. `steps` is how many
    the run is to take, None if its configuration does not say.
    """

    holder: Holder | None
    alive: bool | None
    record: dict[str, float]
    age_s: float
    steps: int | None
    checkpoint: str | None

    @property
    def step(self) -> int:
        """The last step that was recorded."""
        return int(self.record.get("progress/step", 0))

    @property
    def left_s(self) -> float | None:
        """Seconds that the remaining steps take at the pace of the last one; None if that is not known."""
        pace = self.record.get("perf/step_s")
        return None if pace is None or self.steps is None else pace * max(0, self.steps - self.step)

    @property
    def doing(self) -> str:
        """What the run is doing, in a word or two, and why we think so."""
        if self.holder is not None and self.alive is not False:
            return self._of_launch(self.holder)
        if self.steps is not None and self.step >= self.steps:
            return "done"
        ended = "a launch ended without a word" if self.holder else "no launch trains it"
        return f"stopped: {ended}" if self.record or self.holder or self.checkpoint else "not begun"

    def _of_launch(self, holder: Holder) -> str:
        where = f"process {holder.pid} on {holder.host}"
        if self.alive is None:
            return f"training, as far as can be seen from here: {where} holds the lock"
        quiet = self.age_s > max(QUIET_S, QUIET_STEPS * self.record.get("perf/step_s", 0.0))
        if not self.record:
            return f"starting: {where}"
        if quiet:
            return f"training, but quiet for {self.age_s:.0f} s (saving, evaluating or stuck): {where}"
        return f"training: {where}"


def read_state(folder: RunFolder, steps: int | None, storage: Storage | None = None) -> RunState:
    """Read the state of a run that is to take `steps`, with checkpoints in `storage` or its own folder.

    Raises:
        LockedError: for a lock that is damaged.
        ValueError: if the folder is none of a run.
    """
    if not folder.config.is_file():
        raise ValueError(f"{folder.path} is no run folder: it has no {folder.config.name}")
    holder, alive = holder_of(folder)
    saved = complete(storage or Storage.at(folder.checkpoints))
    written = folder.metrics.stat().st_mtime if folder.metrics.exists() else time.time()
    name = folder_of(saved[-1]) if saved else None
    return RunState(holder, alive, _last_record(folder.metrics), time.time() - written, steps, name)


def _last_record(path: Path) -> dict[str, float]:
    """The last whole line of the metrics; one that is being written does not count."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines(keepends=True)
    for line in reversed(lines):
        if line.endswith("\n"):
            # What is no record is left out.
            with suppress(ValueError, TypeError, AttributeError, RecursionError):
                return {key: float(value) for key, value in json.loads(line).items()}
    return {}
