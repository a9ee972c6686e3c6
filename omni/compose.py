"""From command-line overrides to a typed configuration. No torch here."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from omni.compose_stages import take_steps, typed_stages
from omni.compose_weights import take_keys
from omni.config import MAPPINGS, RENAMED, Config, ConfigError
from omni.keys import check_keys
from omni.planning.choice import AUTO, POLICIES
from omni.policies import KINDS
from omni.refusals import groups, refusal, renamed
from parallel.policy import registered

ConfigStore.instance().store(name="schema", node=Config)


def offer_policies() -> None:
    """Let `section=name` choose any policy that an installed package registers, without a file for it, and
    `section=auto` have one chosen where that is known.
    """
    for section, kind, _ in KINDS:
        for name in registered(kind.group):
            ConfigStore.instance().store(group=section, name=name, node={"policy": name})
    for key in POLICIES:
        section, _, policy = key.partition(".")
        ConfigStore.instance().store(group=section, name=AUTO, node={policy: AUTO})


def compose_config(overrides: Sequence[str], config_dir: str | None = None) -> Config:
    """Compose a configuration outside `omni train`, from the same overrides and a user's folder of files.

    Raises:
        ConfigError: for an unknown key, a wrong type, a choice that something else shadows, or a folder that
            there is not.
    """
    own = own_files(config_dir)
    GlobalHydra.instance().clear()
    offer_policies()
    try:
        with initialize_config_module("hydra_conf", version_base="1.3"):
            composed = compose("config", [*own, *overrides])
            check_shadowed(composed, overrides)
            take_keys(composed, overrides)
            take_steps(composed, overrides)
    except ConfigError:
        raise
    except Exception as error:  # Hydra raises many kinds; all of them are about the overrides
        raise ConfigError(refusal(error, overrides)) from error
    return to_config(composed)


def own_files(config_dir: str | None) -> list[str]:
    """Return the override that has Hydra look into a user's folder of files, none without one.

    Raises:
        ConfigError: if there is no such folder.
    """
    if config_dir is None:
        return []
    if not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir {config_dir}: there is no such folder")
    return [f"hydra.searchpath=['file://{Path(config_dir).absolute()}']"]


def to_config(composed: DictConfig) -> Config:
    """Turn a composed configuration into the dataclasses.

    Raises:
        ConfigError: for a key that means nothing, a wrong type, or a key without default that was not set.
    """
    missing = sorted(key for key in OmegaConf.missing_keys(composed) if not key.startswith("run."))
    if missing:
        raise ConfigError(f"{', '.join(missing)}: not set; choose an experiment or set the keys")
    # Merging into the bare schema again refuses keys that were added with a plus.
    return _typed(OmegaConf.create(OmegaConf.to_container(composed, resolve=True)))


def load_config(path: Path) -> Config:
    """Read the resolved `config.yaml` of a run folder.

    Raises:
        ConfigError: if the file is no such configuration.
    """
    try:
        loaded = OmegaConf.load(path)
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} is not the configuration of a run: {error}") from error
    try:
        if isinstance(loaded, DictConfig):
            _convert(loaded)
        return _typed(loaded)
    except ConfigError as error:
        raise ConfigError(f"{path} is not the configuration of a run: {error}") from error


def _convert(saved: DictConfig) -> None:
    """Bring what earlier versions saved to the keys of this one."""
    if "deal" not in saved:
        saved["deal"] = {"policy": "by_length"}
    for old, new in RENAMED.items():
        section, _, key = old.rpartition(".")
        held = OmegaConf.select(saved, section.removesuffix("[]"))
        for own in (held or ()) if section.endswith("[]") else (held,):
            if isinstance(own, DictConfig) and key in own:
                own[new.rpartition(".")[2]] = own.pop(key)
    cluster = saved.get("cluster") or {}
    if isinstance(cluster.get("efficiency"), int | float):  # one of the run's precision
        share, peak = cluster["efficiency"], cluster["flops"]
        both = ("fp32", "bf16")
        cluster["flops"] = dict.fromkeys(both, peak)
        cluster["efficiency"] = {
            "products": dict.fromkeys(both, share),
            "attention": share,
            "attention_backward": share,
        }
        cluster["device"] = "cpu" if cluster["name"] == "cpu" else "cuda"
        cluster["queues"] = "per_communicator" if cluster["name"] == "cpu" else "one"


def _typed(values: DictConfig | ListConfig) -> Config:
    config: Any = _merged(Config, values, "")
    for section, key, entry in MAPPINGS:
        mapping = getattr(getattr(config, section), key)
        for name, value in mapping.items():
            mapping[name] = _merged(entry, value, f"{section}.{key}.{name}.")
            unset = [field for field, v in vars(mapping[name]).items() if v == MISSING]
            if unset:
                raise ConfigError(f"{section}.{key}.{name}.{unset[0]}: not set")
    typed_stages(config, _merged)
    check_keys("", config)
    return config


@cache
def _structured(schema: type) -> DictConfig:
    """A schema as OmegaConf has it, made once: to merge copies it."""
    return OmegaConf.structured(schema)


def _merged(schema: type, values: Any, prefix: str) -> Any:
    try:
        return OmegaConf.to_object(OmegaConf.merge(_structured(schema), values or {}))
    except (OmegaConfBaseException, ValueError) as error:
        key = (prefix + str(getattr(error, "full_key", "") or "")).removesuffix(".")
        keys = ", ".join(field.name for field in fields(schema))
        why = f"{key}: {str(error).splitlines()[0]} (known here: {keys})"
        raise ConfigError("\n".join(renamed(str(error))) or why) from error


def check_shadowed(composed: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse a choice on the command line that something else overrules, and several where one counts.

    `optim=wsd experiment=quickstart` chooses an optimizer whose values the experiment then replaces: a user
    who asked for it by name would not get it.

    Raises:
        ConfigError: naming the choice, the key, both values and the remedy.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    chosen = [override for override in parsed if is_choice(override)]
    set_keys = {override.key_or_group for override in parsed if override not in chosen}
    for override in parsed:
        if isinstance(override.value(), list) and override.key_or_group in groups() - {"experiment"}:
            raise ConfigError(
                f"{override.input_line}: of {override.key_or_group} one is taken, and the others would be "
                f"left out without a word: name one"
            )
    for override in chosen:
        group, option = override.key_or_group, str(override.value())
        for key, value in _values_of(group, option):
            final = OmegaConf.select(composed, key)
            is_set = any(key == k or key.startswith(k + ".") for k in set_keys)
            if final != value and not is_set:
                raise ConfigError(
                    f"{group}={option} sets {key}={value}, but the composed configuration has {key}={final}: "
                    f"another choice overrules it. Leave {group}={option} out, or set {key}={value} as well."
                )


def keys_of(overrides: Sequence[str]) -> set[str]:
    """The keys that overrides set, and those that the options they choose set themselves. Hydra is
    initialised.
    """
    keys = set[str]()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        name, value = override.key_or_group, override.value()
        if is_choice(override):
            keys.update(key for key, _ in _values_of(name, str(value)))
        elif isinstance(value, dict) and value:
            keys.update(f"{name}.{key}" for key, _ in leaves(value))
        else:
            keys.add(name)
    return keys


def given_keys(overrides: Sequence[str], config_dir: str | None = None) -> set[str]:
    """Return the keys that overrides of `compose_config` set, as `keys_of`, but for those of an experiment,
    which is a whole run; with a system other than the default those that are a system's, too.
    """
    own = own_files(config_dir)
    GlobalHydra.instance().clear()
    offer_policies()
    with initialize_config_module("hydra_conf", version_base="1.3"):
        compose("config", own)
        keys = keys_of([text for text in overrides if not text.lstrip("+~").startswith("experiment")])
    if any(text.lstrip("+").startswith("system=") and text != "system=omni" for text in overrides):
        keys |= {f"{section}.policy" for section, _, _ in KINDS} | {"layout.domain", "packing.divisor"}
    return keys


def is_choice(override: Override) -> bool:
    """Whether an override chooses an option of a group. Hydra is initialised."""
    if override.key_or_group.startswith("hydra/"):
        return False
    # Of the repository itself: the loader would copy all that it holds, for each override.
    loader: Any = GlobalHydra.instance().config_loader()
    return bool(loader.repository.get_group_options(override.key_or_group)) and isinstance(
        override.value(), str
    )


def _values_of(group: str, option: str) -> Iterator[tuple[str, Any]]:
    """The keys that a group's option sets itself, with their values; interpolations are left out."""
    loader: Any = GlobalHydra.instance().config_loader()
    loaded = loader.repository.load_config(f"{group}/{option}")
    if loaded is None:
        return
    package = loaded.header.get("package") or group.replace("/", ".")
    prefix = "" if package == "_global_" else f"{package}."
    values = OmegaConf.to_container(loaded.config, resolve=False)
    assert isinstance(values, dict)
    values.pop("defaults", None)
    yield from ((prefix + key, value) for key, value in leaves(values) if "${" not in str(value))


def leaves(values: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a mapping of mappings with their keys, joined by dots."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from ((f"{key}.{inner}", leaf) for inner, leaf in leaves(value))
        else:
            yield str(key), value
