"""What a user reads where Hydra refuses the overrides: its reason, and how the key is really called.

Hydra's own hint is to append what it does not know, which is right for entries of mappings alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files

from omni.config import RENAMED, RENAMED_OPTIONS, Config
from omni.policies import KINDS
from parallel.policy import how_to_add

# Of what Hydra says: hints for its own developers, and where it looked for files.
_LEFT_OUT = ("To append", "full_key:", "reference_type=", "object_type=", "Config search path:", "provider=")
_OPTIONS = "Available options in"
_GRAMMAR = "override_grammar"  # the page that Hydra names for what it could not read
_ONE_NUMBER = {
    "to Dict[str, int]": "cluster.flops",
    "not a subclass of EfficiencyConfig": "cluster.efficiency",
}
"""What Hydra says of a cluster file of before 2026-11-24, and the key that it is about."""


def refusal(error: Exception, overrides: Sequence[str]) -> str:
    """Return Hydra's reason to refuse `overrides`, with what helps to mend them."""
    text = f"{error}\n{error.__cause__ or ''}"
    said = text.splitlines()
    reason = [line.strip() for line in said if line.strip() and not line.strip().startswith(_LEFT_OUT)]
    reason = list(dict.fromkeys(reason))
    at = next((n for n, line in enumerate(reason) if line.startswith(_OPTIONS)), None)
    if at is not None:  # a line each
        reason[at:] = [f"{reason[at]} {', '.join(reason[at + 1 :])}"]
    quotes = _of_quotes(overrides, text)
    return "\n".join([*reason, *renamed(text), *_of_former_files(said), *quotes, *_advice(overrides, text)])


def renamed(said: str) -> list[str]:
    """Return what a key or an option that was refused is called now, if it has another name than it had."""
    # Of an entry of a list, OmegaConf says its own key alone.
    full_keys = {old: f"full_key: {old.rpartition('[].')[2]}\n" for old in RENAMED}
    keys = [f"{old} is {new} now" for old, new in RENAMED.items() if full_keys[old] in f"{said}\n"]
    options = RENAMED_OPTIONS.items()
    return keys + [f"{old} is {new} now".replace("/", "=") for old, new in options if f"'{old}'" in said]


def _of_quotes(overrides: Sequence[str], said: str) -> Iterator[str]:
    """Say how a value is given that Hydra's grammar does not take as it stands."""
    for text in overrides:
        key, _, value = text.partition("=")
        if _GRAMMAR in said and value and value in said and not set(value) & set("'\"{}[]"):
            yield f"{key}: a value with brackets, or letters beyond English ones: \"{key}='{value}'\""


def _of_former_files(said: Sequence[str]) -> Iterator[str]:
    """Say what to do with a cluster file whose rates were one number."""
    for mark, key in _ONE_NUMBER.items():
        if any(mark in line for line in said):
            yield (
                f"{key}: one number is how cluster files of before 2026-11-24 had it; it is a mapping now, "
                "of precisions or kinds of work: omni calibrate --out FOLDER/cluster/NAME.yaml writes a new "
                "file, and docs/running.md lists the keys of cluster"
            )


def _advice(overrides: Sequence[str], said: str) -> Iterator[str]:
    for override in overrides:
        key, given, value = override.lstrip("+~").partition("=")
        if override.startswith("-") or key.startswith("hydra") or not (given or override.startswith("~")):
            continue
        section, _, _ = key.partition(".")
        yield from (f"{section}: {how_to_add(kind.group)}" for own, kind, _ in KINDS if own == section)
        if key in groups() and given and value in ("null", ""):
            yield f"{key}={value}: name one of its files, or leave it out with ~{key}"
        elif override.startswith("~") and key in _schema()[1]:
            yield _of_entries(key)
        elif given and override[0] not in "+~" and not {key.partition(mark)[0] for mark in "/@"} & groups():
            yield from _of_key(key, said)


def _of_key(key: str, said: str) -> Iterator[str]:
    """What to say of a key that is not known, or of an entry of a mapping that Hydra `said` it does not know;
    nothing of others.
    """
    known, mappings = _schema()
    mapping = next((name for name in mappings if f"{key}.".startswith(name + ".")), None)
    if mapping:
        if f"field '{key}' is not Optional" in said:
            yield _of_entries(mapping) if key == mapping else f"{key}: to leave it out, write ~{key}"
        elif f"'{key}'" in said:
            yield f"{key}: to add an entry to {mapping}, write +{key}"
    elif key not in known | groups() | RENAMED.keys():
        leaf = key.rpartition(".")[2]
        same = sorted(name for name in known if name.rpartition(".")[2] == leaf)
        near = same or get_close_matches(key, sorted(known | groups()), 3, 0.7)
        meant = f"did you mean {' or '.join(near)}?" if near else "omni train --help lists all keys"
        yield f"{key}: there is no such key; {meant}"


def _of_entries(mapping: str) -> str:
    return f"{mapping}: its entries are left out one by one, such as ~{mapping}.NAME"


@cache
def groups() -> frozenset[str]:
    """Return the groups of configuration files that a choice is made from."""
    return frozenset(entry.name for entry in files("hydra_conf").iterdir() if entry.is_dir())


@cache
def _schema() -> tuple[frozenset[str], tuple[str, ...]]:
    """All keys of the configuration, and those among them that are mappings."""
    known, mappings = set(), []
    for key, kind in _keys(Config, ""):
        known.add(key)
        if kind is dict:
            mappings.append(key)
    return frozenset(known), tuple(mappings)


def _keys(schema: type, prefix: str) -> Iterator[tuple[str, object]]:
    for field in fields(schema):
        kind = field.default_factory
        yield prefix + field.name, kind
        if kind is not NO_DEFAULT and isinstance(kind, type) and is_dataclass(kind):
            yield from _keys(kind, f"{prefix}{field.name}.")
