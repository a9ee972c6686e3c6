"""What a run begins with that has no checkpoint of its own yet: random weights, or those of another run."""

from infra.checkpoint import CheckpointError, locate, read_manifest
from omni.config import ConfigError
from omni.planning.run_spec import RunSpec
from omni.rank.build import Rank
from omni.training.fingerprint import fingerprint
from omni.training.loading import from_first, load
from omni.training.start import shared_components
from parallel.control import Control


def begin(spec: RunSpec, rank: Rank, control: Control) -> None:
    """Give a rank, whose weights have been drawn, those of `start.checkpoint`. All ranks call it.

    Raises:
        ConfigError: on every rank, if it cannot be read, is damaged, or holds another model. Another run's
            checkpoint is left as it is, and no other one taken for it.
    """
    start = spec.config.start
    if start.checkpoint is None:
        return
    storage, step = locate(start.checkpoint)
    try:
        manifest = from_first(control, lambda: read_manifest(storage, step))
        saved = manifest["fingerprint"]
        names = shared_components(saved, fingerprint(spec), spec.components, start.checkpoint)
        components = {name: own for name, own in rank.components.items() if name in names}
        damage = load(storage, manifest, rank, control, components, start.optimizer)
    except CheckpointError as error:
        raise ConfigError(f"start.checkpoint={start.checkpoint} cannot be read: {error}") from error
    if damage is not None:
        raise ConfigError(f"start.checkpoint={start.checkpoint} is damaged: {damage}")
