"""What a run begins with that has no checkpoint of its own yet: random weights, those of another run, or
published ones, of the LLM and of encoders.
"""

import shutil
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from infra.checkpoint import CheckpointError, first_problem, locate, read_manifest
from infra.run_folder import RunFolder, write_json
from omni.config import ConfigError
from omni.models.llm import NAME as LLM
from omni.models.registry import published
from omni.open_models.folder import Folder, open_folder, other_file
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
    """Give a rank, whose weights have been drawn, those of `start.checkpoint` or `start.weights`, and
    encoders the published ones that they name, unless the checkpoint has them. All ranks call it.

    Raises:
        ConfigError: on every rank, if it cannot be read, is damaged, or holds another model. Another run's
            checkpoint is left as it is, and no other one taken for it.
    """
    start, folders = spec.config.start, dict[str, Folder]()
    if start.weights is not None:
        folders[LLM] = open_folder(start.weights)
    for name, encoder in spec.encoders.items():
        if (of_encoder := published(name, encoder)) is not None:
            folders[name] = of_encoder
    if folders:
        # One for all: another one of the same ranks would take the name and the addresses of the first.
        with node_group(control.tree, timedelta(seconds=control.timeout_s)) as group:
            files = {
                name: _begin_with_published(of, name, rank, control, group) for name, of in folders.items()
            }
        if rank.is_first and LLM in folders:
            shutil.rmtree(folder.hashes, ignore_errors=True)  # of files that a launch before began with
            write_json(folder.weights, {"folder": str(folders[LLM].storage), "files": files[LLM]})
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


def _begin_with_published(
    weights: Folder, component: str, rank: Rank, control: Control, group: dist.ProcessGroup
) -> dict[str, dict[str, Any]]:
    """Give a rank its part of a component in a folder of published weights, which it reads with the `group`
    of its node, and say which files they were.
    """
    problem, key = None, f"{weights.key}={weights.url}".replace("encoder.", f"model.encoders.{component}.")
    own = weights.identity()
    first = control.broadcast("loading", own)
    if (name := other_file(first, own)) is not None:
        problem = f"{name} is another file than the first rank's"
    if (told := first_problem(problem, control, "loading")) is not None:
        raise ConfigError(f"{key}: {told}. Give all nodes the same folder")
    held = rank.components.get(component)
    # The rest of an encoder, such as a projector, is drawn.
    only = None if component == LLM else weights.rules
    wanted = wanted_of(weights, held, rank.names[component], only) if held is not None else []
    reader = FolderReader(weights, group)
    reader.fill(wanted, partial(control.coming, "loading"))
    if (told := first_problem(reader.problem, control, "loading")) is not None:
        raise ConfigError(f"{key} cannot be read: {told}")
    spread_weights({name: own for name, own in rank.components.items() if name == component})
    return first
