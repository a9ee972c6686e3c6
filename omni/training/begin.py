"""What a run begins with that has no checkpoint of its own yet: random weights, those of another run, or
published ones.
"""

import shutil
from datetime import timedelta

from infra.checkpoint import CheckpointError, first_problem, locate, read_manifest
from infra.run_folder import RunFolder, write_json
from omni.config import ConfigError
from omni.models.llm import NAME as LLM
from omni.open_models.folder import open_folder, other_file
from omni.planning.run_spec import RunSpec
from omni.rank.build import Rank
from omni.rank.folder_weights import FolderReader, wanted_of
from omni.rank.state import spread_weights
from omni.training.fingerprint import fingerprint
from omni.training.loading import from_first, load
from omni.training.start import new_adapters, shared_components
from parallel.control import Control
from parallel.groups import node_group


def begin(spec: RunSpec, folder: RunFolder, rank: Rank, control: Control) -> None:
    """Give a rank, whose weights have been drawn, those of `start.checkpoint` or `start.weights`. All ranks
    call it.

    Raises:
        ConfigError: on every rank, if it cannot be read, is damaged, or holds another model. Another run's
            checkpoint is left as it is, and no other one taken for it.
    """
    start = spec.config.start
    if start.weights is not None:
        _begin_with_published(start.weights, folder, rank, control)
    if start.checkpoint is None:
        return
    storage, step = locate(start.checkpoint)
    try:
        manifest = from_first(control, lambda: read_manifest(storage, step))
        saved = manifest["fingerprint"]
        current = fingerprint(spec)
        names = shared_components(saved, current, spec.components, start.checkpoint)
        components = {name: own for name, own in rank.components.items() if name in names}
        drawn = new_adapters(saved, current, names)
        damage = load(storage, manifest, rank, control, components, start.optimizer, drawn)
    except CheckpointError as error:
        raise ConfigError(f"start.checkpoint={start.checkpoint} cannot be read: {error}") from error
    if damage is not None:
        raise ConfigError(f"start.checkpoint={start.checkpoint} is damaged: {damage}")


def _begin_with_published(url: str, folder: RunFolder, rank: Rank, control: Control) -> None:
    """Give a rank its part of the LLM in a folder of published weights, and note in the run folder which
    files they were.
    """
    weights, problem = open_folder(url), None
    own = weights.identity()
    first = control.broadcast("loading", own)
    if (name := other_file(first, own)) is not None:
        problem = f"{name} is another file than the first rank's"
    if (told := first_problem(problem, control, "loading")) is not None:
        raise ConfigError(f"start.weights={url}: {told}. Give all nodes the same folder")
    own_llm = rank.components.get(LLM)
    wanted = wanted_of(weights, own_llm, rank.names[LLM]) if own_llm is not None else []
    with node_group(control.tree, timedelta(seconds=control.timeout_s)) as group:
        reader = FolderReader(weights, group)
        reader.fill(wanted)
    if (told := first_problem(reader.problem, control, "loading")) is not None:
        raise ConfigError(f"start.weights={url} cannot be read: {told}")
    spread_weights({name: own for name, own in rank.components.items() if name == LLM})
    if rank.is_first:
        shutil.rmtree(folder.hashes, ignore_errors=True)  # of files that a launch before began with
        write_json(folder.weights, {"folder": str(weights.storage), "files": first})
