"""Metrics to Weights & Biases, offline unless a key is configured; the W&B history is metrics.jsonl's.

A resumed run is the same W&B run. Its history is brought level with metrics.jsonl before new steps follow:
offline, the earlier W&B folder is set aside and all earlier records are written again into a new one (0.3
ms a record), so that the one folder left holds the whole history exactly once; online, the records the
server lacks are sent. Steps that the server already has and that the run repeats keep their first values
there: W&B takes each step once.
"""

import logging
import netrc
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import wandb

from dataloader.within import within
from infra.run_folder import RunFolder, read_metrics, read_summary, set_aside, write_text
from infra.timelines import TimelineError, drawn, recorded_steps
from infra.tracker import MODES, TAKE_S, TIMELINE, About, Tracker, record

START_S = 60.0
FINISH_S = 60.0
REPLAYED = 10  # records of earlier steps that W&B is given at once
LONGEST_TAG = 64  # for W&B

logger = logging.getLogger(__name__)


def start_wandb(folder: RunFolder, about: About, resumed_from: int | None) -> "WandbTracker":
    """Start or resume the W&B run of this folder; its files go to `<run folder>/wandb`.

    Raises ValueError, within about a minute, if W&B cannot start or does not take what was recorded before.
    """
    mode = resolve_mode(about.mode)
    if resumed_from is None or mode == "offline":
        set_aside(folder.path / "wandb")
    try:
        run = wandb.init(
            id=_run_id(folder, fresh=resumed_from is None),
            resume="allow",
            name=about.name,
            project=about.project,
            group=about.group,
            tags=list(dict.fromkeys(tag[:LONGEST_TAG] for tag in about.tags)),
            config=dict(about.config),
            dir=str(folder.path),
            mode=mode,  # type: ignore[arg-type]
            settings=_settings(),
        )
    except Exception as error:
        raise ValueError(
            f"tracking=wandb cannot start in mode {mode} ({error}): check the key and the network, "
            "or choose tracking.mode=offline or tracking=jsonl"
        ) from error
    run.define_metric("progress/step")
    run.define_metric("*", step_metric="progress/step")
    tracker = WandbTracker(run)
    if resumed_from is not None:
        try:
            tracker.replay(folder)
        except TimeoutError as error:
            raise ValueError(
                f"tracking=wandb: {tracker.place} has not taken the next {REPLAYED} records of earlier steps "
                f"in {TAKE_S:g} s: end its process (wandb-core) if it is stopped, make room on its disk, or "
                f"choose tracking=jsonl and `omni sync` afterwards"
            ) from error
    return tracker


def sync_wandb(folder: RunFolder, about: About) -> str:
    """Bring the W&B run of a folder level with its metrics.jsonl, and say where it is.

    Online, the server is sent the steps that it lacks. Offline, the run is built anew, with the same id, in
    place of earlier offline files. Either way a second call changes nothing.

    Raises ValueError if there is nothing to send, or W&B cannot start, TimeoutError if it has not taken all.
    """
    records = read_metrics(folder.metrics)
    if not records:
        raise ValueError(f"{folder.metrics} holds no steps: give the folder of a run that has trained")
    offline = resolve_mode(about.mode) == "offline"
    before = set_aside(folder.path / "wandb") if offline else None
    tracker = start_wandb(folder, about, int(records[-1]["progress/step"]))
    if folder.summary.exists():
        tracker.summary(read_summary(folder.summary))
    tracker.finish(0 if folder.summary.exists() else 1)
    if before is not None:
        shutil.rmtree(before)  # all that it held is in the new one
    return tracker.place


def resolve_mode(mode: str) -> str:
    """Either "offline" or "online" for `mode`.

    "auto" is online if WANDB_API_KEY is set or netrc names the W&B host (WANDB_BASE_URL, else
    api.wandb.ai), unless WANDB_MODE=offline. Raises ValueError for an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"tracking.mode={mode} is unknown: choose one of {', '.join(MODES)}")
    if mode != "auto":
        return mode
    asked = os.environ.get("WANDB_MODE")
    if asked not in (None, "", "online", "offline"):
        raise ValueError(f"WANDB_MODE={asked} with tracking=wandb: unset it, or choose tracking=jsonl")
    if asked == "offline":
        return "offline"
    return "online" if os.environ.get("WANDB_API_KEY") or _netrc_has_host() else "offline"


def _netrc_has_host() -> bool:
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    named = os.environ.get("NETRC")
    for path in [named] if named else map(os.path.expanduser, ("~/.netrc", "~/_netrc")):
        try:
            if host in netrc.netrc(path).hosts:
                return True
        except FileNotFoundError:
            continue
        except (OSError, netrc.NetrcParseError) as error:
            # Not the error's own words, which quote the file.
            why = error.strerror if isinstance(error, OSError) else f"line {error.lineno} cannot be read"
            logger.warning("%s is not looked at for a key of W&B: %s", path, why)
    return False


def _run_id(folder: RunFolder, fresh: bool) -> str:
    """The W&B id of this run folder, kept in a file of it: it survives a move of the folder, and two
    machines with the same path do not write into one W&B run.
    """
    path = folder.path / "wandb_id"
    if fresh or not path.exists():
        write_text(path, uuid.uuid4().hex[:16] + "\n")
    return path.read_text().strip()


def _settings() -> wandb.Settings:
    settings = wandb.Settings(
        init_timeout=START_S,
        console="off",  # the screen is ours, and capturing stdout would end the live progress
        silent=True,
        disable_code=True,
        disable_git=True,
        reinit="create_new",  # never continue in a run that someone else has open in this process
    )
    # Without a bound an upload with no network keeps the run from ending; W&B's own word of it is silenced
    # above. Older wandb has no such settings.
    for name, value in (("finish_timeout", FINISH_S), ("finish_timeout_raises", True)):
        if name in wandb.Settings.model_fields:
            setattr(settings, name, value)
    return settings


class WandbTracker(Tracker):
    """A W&B run."""

    shows_pictures = True

    def __init__(self, run: Any) -> None:
        self._run = run
        # Its address, or its folder offline.
        self.place: str = str(Path(run.dir).parent) if run.offline else run.url
        self.where = "W&B offline (omni sync uploads it)" if run.offline else f"W&B {run.url}"

    def replay(self, folder: RunFolder) -> None:
        """Log the steps of metrics.jsonl that the run does not have yet, with their recorded timelines.

        Raises:
            TimeoutError: if W&B does not take the next REPLAYED in TAKE_S seconds.
        """
        lacking = [
            earlier
            for earlier in read_metrics(folder.metrics)
            if int(earlier["progress/step"]) >= self._run.starting_step
        ]
        recorded = frozenset(recorded_steps(folder))
        for first in range(0, len(lacking), REPLAYED):
            some = lacking[first : first + REPLAYED]
            within(TAKE_S, partial(self._replay, folder, recorded, some))

    def _replay(
        self, folder: RunFolder, recorded: frozenset[int], records: Sequence[Mapping[str, float]]
    ) -> None:
        for earlier in records:
            step = int(earlier["progress/step"])
            if step in recorded:
                with suppress(TimelineError):  # some rank was ended before it had written
                    self.picture(step, TIMELINE, drawn(folder, step))
            self.log(step, earlier)

    def picture(self, step: int, name: str, svg: str) -> None:
        """Add a picture to the record of a step that is logged next."""
        self._run.log({name: wandb.Html(svg, data_is_not_path=True)}, step=step, commit=False)

    def checkpoint(self, step: int, where: str) -> None:
        """Log a version of the run's checkpoint that refers to a folder, or only names the URL of one: W&B
        would ask its store, with a client of its own.
        """
        about = {"step": step, "where": where}
        artifact = wandb.Artifact(f"checkpoint-{self._run.id}", type="checkpoint", metadata=about)
        if "://" not in where:
            artifact.add_reference(f"file://{where}", checksum=False)
        self._run.log_artifact(artifact, aliases=["latest", f"step_{step}"])

    def alert(self, title: str, text: str) -> None:
        """Have W&B send an alert, by whatever way the user has chosen there."""
        self._run.alert(title, text, level="WARN")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one step."""
        # commit: otherwise the record waits for the next step, and a killed run has one less.
        self._run.log(record(step, metrics), step=step, commit=True)

    def summary(self, values: Mapping[str, object]) -> None:
        """Add to W&B's summary."""
        self._run.summary.update(dict(values))

    def finish(self, exit_code: int) -> None:
        """Close the run, and wait until W&B's own process has ended.

        Raises:
            TimeoutError: if W&B has not taken all of it in FINISH_S seconds.
        """
        try:
            try:
                self._run.finish(exit_code=exit_code)
            finally:
                # finish returns before W&B's process has written the file's last block; its end does not.
                within(FINISH_S, partial(wandb.teardown, exit_code))
        except TimeoutError as error:
            raise TimeoutError(
                f"{self.place} had not taken all of the run after {FINISH_S:g} s: `omni sync` sends the rest"
            ) from error
