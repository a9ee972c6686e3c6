"""What a run begins with that has no checkpoint of its own yet: random weights, or those of another run."""

from pathlib import Path

from infra.checkpoint import read_manifest
from omni.planning.run_spec import RunSpec
from omni.rank.build import Rank
from omni.rank.state import read_state
from omni.training.start import check_start


def begin(spec: RunSpec, rank: Rank) -> None:
    """Give a rank, whose weights have been drawn, those of `start.checkpoint`."""
    start, names = spec.config.start, check_start(spec)
    if start.checkpoint is None:
        return
    path = Path(start.checkpoint)
    components = {name: own for name, own in rank.components.items() if name in names}
    files = sorted(read_manifest(path)["files"])
    read_state(path, files, components, rank.names, rank.stage, rank.rank, moments=start.optimizer)
