"""What a folder of published weights says in place of the user: keys of `model.llm` and, with
`model=from_folder`, its encoders and its tokenizer. No torch here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from omni.config import ConfigError
from omni.data_config import DataConfig
from omni.open_models.folder import Folder, contradiction, default_keys, open_folder

_LLM, _ENCODERS = "model.llm", "model.encoders"


def take_keys(composed: DictConfig, overrides: Sequence[str]) -> None:
    """Set in a composed configuration what the folder `start.weights` says, if there is one. What was left at
    its default counts as not set, unless one of `overrides` sets it.

    Raises:
        ConfigError: if the folder cannot be read, or a key of the LLM that is set contradicts it.
    """
    url, whole = OmegaConf.select(composed, "start.weights"), OmegaConf.select(composed, "model.from_folder")
    if url is None:
        if whole:
            raise ConfigError("model.from_folder=true, and start.weights is not set: name the folder there")
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
        _set(composed, url, name, value)
    if whole:
        _take_encoders(composed, folder)


def _take_encoders(composed: DictConfig, folder: Folder) -> None:
    """Set the encoders that lie in a folder, with keys that are given in place of theirs, and its tokenizer
    where none is chosen.
    """
    if not folder.family.encoders:
        raise ConfigError(
            f"model.from_folder=true, and start.weights={folder.url} holds a model of text alone: leave "
            f"model=from_folder out"
        )
    if not Path(folder.url).is_dir():
        raise ConfigError(
            f"start.weights={folder.url}: encoders and tokenizers are read from folders of this machine: "
            f"bring it here, or leave model=from_folder out"
        )
    for name, keys in folder.family.encoders.items():
        given: Mapping[str, Any] = OmegaConf.select(composed, f"{_ENCODERS}.{name}") or {}
        own = {} if {"name", "_target_"} & given.keys() else {**keys, "folder": folder.url}
        _set(composed, folder.url, f"{_ENCODERS}.{name}", {**own, **given})
    if OmegaConf.select(composed, "data.tokenizer") == DataConfig.tokenizer:
        _set(composed, folder.url, "data.tokenizer", {"name": "hf", "path": folder.url})


def _set(composed: DictConfig, url: str, name: str, value: Any) -> None:
    try:
        OmegaConf.update(composed, name, value, force_add=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"start.weights={url}: its config.json means {name}={value!r}, which cannot be "
            f"({str(error).splitlines()[0]}): take the file that the weights came with"
        ) from error


def _holder(composed: DictConfig, name: str) -> tuple[DictConfig, str]:
    section, _, key = name.rpartition(".")
    return OmegaConf.select(composed, section), key
