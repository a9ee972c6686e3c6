"""Whether a run may begin with the weights of another run's checkpoint, and which components they are for."""

from collections.abc import Iterable, Mapping
from typing import Any

from infra.checkpoint import CheckpointError, locate, read_manifest
from omni.config import ConfigError, StartConfig
from omni.llm_config import LLMConfig
from omni.models.llm import NAME as LLM
from omni.models.registry import published
from omni.open_models.folder import check_same, open_folder
from omni.planning.run_spec import RunSpec
from omni.training.fingerprint import fingerprint


def check_start(spec: RunSpec) -> tuple[str, ...]:
    """Return the components whose weights `start.checkpoint` or `start.weights` gives the run, none without,
    and look at those that encoders name.

    Raises:
        ConfigError: if there is no such checkpoint or folder, or it holds another model.
    """
    start = spec.config.start
    for name, encoder in spec.encoders.items():
        published(name, encoder)
    if start.weights is not None:
        _check_weights(start, spec.config.model.llm)
        return (LLM,)
    given = start.checkpoint
    if given is None:
        return ()
    try:
        manifest = read_manifest(*locate(given))
    except (OSError, ValueError, CheckpointError) as error:
        raise ConfigError(
            f"start.checkpoint={given} cannot be read: {error}. Give a checkpoint of a run, such as "
            f"runs/NAME/checkpoints/step_00000100: omni checkpoint show RUN lists them"
        ) from error
    saved, current = manifest["fingerprint"], fingerprint(spec)
    held = shared_components(saved, current, spec.components, given)
    new = new_adapters(saved, current, held)
    if new and start.optimizer:
        raise ConfigError(
            f"start.optimizer=true, but start.checkpoint={given} has no state of the adapters of "
            f"{', '.join(new)}: set it to false, or leave lora out"
        )
    return held


def _check_weights(start: StartConfig, llm: LLMConfig) -> None:
    """Refuse a folder of published weights that is not whole, or holds another model than `llm`."""
    assert start.weights is not None
    if start.checkpoint is not None or start.optimizer:
        raise ConfigError(
            f"start.weights={start.weights} with start.checkpoint={start.checkpoint} and "
            f"start.optimizer={start.optimizer}: a run begins with a folder's weights or with a checkpoint, "
            f"and a folder has no state of an optimizer; leave one out"
        )
    folder = open_folder(start.weights)
    check_same(folder, llm)
    folder.check()


def shared_components(
    saved: Mapping[str, Any], current: Mapping[str, Any], components: tuple[str, ...], path: str
) -> tuple[str, ...]:
    """Return the components whose weights a checkpoint holds; those that it lacks are drawn as in any run.

    `saved` and `current` are the fingerprints of the checkpoint and of the run, which may add adapters.

    Raises:
        ConfigError: if a component is another one in the checkpoint, naming the first differences.
    """
    held = tuple(name for name in components if any(key.startswith(_keys(name)) for key in saved))
    free = tuple(f"{_keys(name)}lora." for name in new_adapters(saved, current, held))
    different = [
        key
        for key in sorted(set(saved) | set(current))
        if saved.get(key) != current.get(key)
        and key.startswith(tuple(map(_keys, held)))
        and not key.startswith(free)
    ]
    if different:
        told = [f"{key}={current.get(key)!r} (checkpoint: {saved.get(key)!r})" for key in different[:5]]
        if any(".lora." in key for key in different):
            told[-1] += " (omni checkpoint export --as hf merges adapters, into a folder for start.weights)"
        raise ConfigError(
            f"start.checkpoint={path} holds another model: {'; '.join(told)}. Set these keys to what the "
            f"checkpoint has, or choose a checkpoint that fits."
        )
    return held


def new_adapters(
    saved: Mapping[str, Any], current: Mapping[str, Any], components: Iterable[str]
) -> tuple[str, ...]:
    """The components that have adapters in a run and none in the checkpoint it begins with: what these belong
    to is read, and they are drawn.
    """
    ranks = {name: f"{_keys(name)}lora.rank" for name in components}
    return tuple(name for name, key in ranks.items() if current.get(key) and not saved.get(key))


def _keys(component: str) -> str:
    return "model.llm." if component == LLM else f"model.encoders.{component}."
