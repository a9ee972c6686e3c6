"""Whether a run may begin with the weights of another run's checkpoint, and which components they are for."""

from collections.abc import Mapping
from typing import Any

from infra.checkpoint import CheckpointError, locate, read_manifest
from omni.config import ConfigError
from omni.models.llm import NAME as LLM
from omni.planning.run_spec import RunSpec
from omni.training.fingerprint import fingerprint


def check_start(spec: RunSpec) -> tuple[str, ...]:
    """Return the components whose weights `start.checkpoint` gives the run, none without it.

    Raises:
        ConfigError: if there is no such checkpoint, or it holds another model.
    """
    given = spec.config.start.checkpoint
    if given is None:
        return ()
    try:
        manifest = read_manifest(*locate(given))
    except (OSError, ValueError, CheckpointError) as error:
        raise ConfigError(f"start.checkpoint={given} cannot be read: {error}") from error
    return shared_components(manifest["fingerprint"], fingerprint(spec), spec.components, given)


def shared_components(
    saved: Mapping[str, Any], current: Mapping[str, Any], components: tuple[str, ...], path: str
) -> tuple[str, ...]:
    """Return the components whose weights a checkpoint holds; those that it lacks are drawn as in any run.

    `saved` and `current` are the fingerprints of the checkpoint and of the run.

    Raises:
        ConfigError: if a component is another one in the checkpoint, naming the first differences.
    """
    keys = {name: "model.llm." if name == LLM else f"model.encoders.{name}." for name in components}
    held = tuple(name for name in components if any(key.startswith(keys[name]) for key in saved))
    different = [
        f"{key}={current.get(key)!r} (checkpoint: {saved.get(key)!r})"
        for key in sorted(set(saved) | set(current))
        if saved.get(key) != current.get(key) and any(key.startswith(keys[name]) for name in held)
    ]
    if different:
        raise ConfigError(
            f"start.checkpoint={path} holds another model: {'; '.join(different[:5])}. Set these keys to "
            f"what the checkpoint has, or choose a checkpoint that fits."
        )
    return held
