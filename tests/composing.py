"""Compositions in the process of tests: what Hydra makes of the same choices is made once.

A composition takes an eighth of a second of CPU, and was a third of what pytest computed. Most of it reads
the same files again: which of them the choices of a command line stand for, and what these hold together.
Both are kept here by the choices, with a copy for each caller; so are single overrides as they are parsed.
Values are set, checked and made a configuration as ever.

Commands and ranks run in processes of their own, where nothing is kept. Files of a user and what a run saved
are read each time.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.defaults_list import DefaultsList
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

LOADER = config_loader_impl.ConfigLoaderImpl
AS_HYDRA_DOES = {
    (config_loader_impl, "create_defaults_list"): config_loader_impl.create_defaults_list,
    (LOADER, "_compose_config_from_defaults_list"): LOADER._compose_config_from_defaults_list,
    (OverridesParser, "parse_rule"): OverridesParser.parse_rule,
}
Key = tuple[Any, ...]
_lists: dict[Key, DefaultsList] = {}
_composed: dict[int, tuple[Any, bytes]] = {}
_groups: dict[Key, bool] = {}


def remember() -> None:
    """Keep what is composed from now on."""
    config_loader_impl.create_defaults_list = _defaults_list
    LOADER._compose_config_from_defaults_list = _compose
    OverridesParser.parse_rule = _parse


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Compose as Hydra does."""
    now = {(of, name): getattr(of, name) for of, name in AS_HYDRA_DOES}
    for (of, name), function in AS_HYDRA_DOES.items():
        setattr(of, name, function)
    try:
        yield
    finally:
        for (of, name), function in now.items():
            setattr(of, name, function)


@cache
def _parsed(text: str, rule: str) -> Any:
    parse = AS_HYDRA_DOES[OverridesParser, "parse_rule"]
    return parse(OverridesParser.create(), text, rule)


def _parse(parser: OverridesParser, s: str, rule_name: str) -> Any:
    return copy(_parsed(s, rule_name))  # who composes writes to it


def _names(stored: dict[str, Any]) -> Iterator[str]:
    """What programs offer beside files."""
    for name, of in stored.items():
        yield name
        if isinstance(of, dict):
            yield from _names(of)


def _defaults_list(repo: Any, overrides_list: list[Override], **how: Any) -> DefaultsList:
    create = AS_HYDRA_DOES[config_loader_impl, "create_defaults_list"]
    sources = tuple((source.provider, source.scheme(), source.path) for source in repo.get_sources())
    of_user = "hydra.searchpath" in {override.get_key_element() for override in overrides_list}
    if of_user or how["config_name"] != "config":  # any other is what a run saved
        return create(repo=repo, overrides_list=overrides_list, **how)
    known = (*sources, *_names(ConfigStore.instance().repo))
    choices, values = [], []
    for override in overrides_list:
        name = override.key_or_group
        if (known, name) not in _groups:
            _groups[known, name] = repo.group_exists(name)
        is_choice = _groups[known, name] and not isinstance(override.value(), dict)
        (choices if is_choice else values).append(override)
    key = (known, *sorted(how.items()), *(override.input_line for override in choices))
    if key not in _lists:
        _lists[key] = create(repo=repo, overrides_list=choices, **how)
    return replace(_lists[key], config_overrides=values)


def _compose(loader: Any, defaults: Any, repo: Any) -> DictConfig:
    number = id(defaults)  # `_lists` holds it
    if number not in _composed or _composed[number][0] is not defaults:
        compose = AS_HYDRA_DOES[LOADER, "_compose_config_from_defaults_list"]
        _composed[number] = (defaults, pickle.dumps(compose(loader, defaults=defaults, repo=repo)))
    copied: DictConfig = pickle.loads(_composed[number][1])
    return copied
