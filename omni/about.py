"""What trackers are told of a run. No torch here."""

from dataclasses import asdict
from pathlib import Path

from infra.tracker import About
from omni.config import Config


def about_run(config: Config, folder: Path) -> About:
    """Return what W&B is told of a run in `folder`. The name has the folder's, to tell runs apart, unless it
    is or ends with that.
    """
    name, tracking = config.run.name, config.tracking
    return About(
        config=asdict(config),
        name=name if f"-{name}".endswith(f"-{folder.name}") else f"{name}/{folder.name}",
        project=tracking.project,
        group=tracking.group,
        mode=tracking.mode,
        tags=tuple(tracking.tags),
        prometheus=None if (port := tracking.prometheus_port) is None else (tracking.prometheus_host, port),
    )
