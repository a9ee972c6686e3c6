"""Keys of `model.llm` that a folder of published weights says, in place of the user. No torch here."""

from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from omni.config import ConfigError
from omni.open_models.folder import contradiction, default_keys, open_folder

_LLM = "model.llm"


def take_keys(composed: DictConfig, overrides: Sequence[str]) -> None:
    """Set in a composed configuration what the folder `start.weights` says of the LLM, if there is one. What
    was left at its default counts as not set, unless one of `overrides` sets it.

    Raises:
        ConfigError: if the folder cannot be read, or a key that is set contradicts it.
    """
    url = OmegaConf.select(composed, "start.weights")
    if url is None:
        return
    folder, defaults = open_folder(url), default_keys()
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    named = {override.key_or_group for override in parsed}
    for key, value in folder.keys.items():
        name = f"{_LLM}.{key}"
        is_set = not OmegaConf.is_missing(*_holder(composed, name))
        given = OmegaConf.select(composed, name) if is_set else None
        if is_set and given != value and (given != defaults[key] or name in named):
            raise contradiction(folder, key, given, value)
        try:
            OmegaConf.update(composed, name, value)
        except OmegaConfBaseException as error:
            raise ConfigError(
                f"start.weights={url}: its config.json means {name}={value!r}, which cannot be "
                f"({str(error).splitlines()[0]}): take the file that the weights came with"
            ) from error


def _holder(composed: DictConfig, name: str) -> tuple[DictConfig, str]:
    section, _, key = name.rpartition(".")
    return OmegaConf.select(composed, section), key
