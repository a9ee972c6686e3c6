"""Keys that a configuration leaves open, and what was chosen for them: `omni.planning.choose` chooses.

A key is open where `layout.domain`, `layout.context`, `layout.llm.zero`, `packing.divisor`,
`data.microbatch_tokens` or, of a pipeline, `layout.llm.vpp` is null, where `model.llm.recompute` is `auto`,
or where a section of `POLICIES` has the policy `auto`; then `data.sample_tokens` is open, too, unless it is
given. With `model.llm.recompute` so is what encoders send to the host, where that is null. `system=omni`, the
default, leaves open all that are neither of the model nor of the data. Its schedule is `auto` as well, a
policy that chooses for each step. Where a placement takes ranks, `placement.ranks` is open if it is null:
`omni.planning.allocation` settles it before anything is chosen.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from omni.config import ChoiceConfig, Config
from omni.llm_config import LLMConfig
from parallel.placements import PlacementPolicy
from parallel.policy import find

AUTO = "auto"
SCHEDULE, PLACEMENT = "pipeline.policy", "placement.policy"
DOMAIN, PACKS, LONGEST = "layout.domain", "packing.divisor", "data.sample_tokens"
CONTEXT, ZERO, VPP = "layout.context", "layout.llm.zero", "layout.llm.vpp"
MICROBATCH, BESIDE = "data.microbatch_tokens", "placement.ranks"
RECOMPUTE, RECOMPUTE_LONG = "model.llm.recompute", "model.llm.recompute_long"
KEEP_ATTENTION = "model.llm.keep_attention"
_OFF = dict.fromkeys((RECOMPUTE_LONG, KEEP_ATTENTION), False)  # where what the LLM recomputes is open
OF_ENCODERS, OFFLOAD, KEEPS = "model.encoders.", ".offload", ".keep_attention"
"""What a key begins and ends with that says how many inputs of an encoder's layers go to the host, and
whether layers that are made anew keep what attention puts out.
"""
PASS_TOKENS = 16_384  # of a microbatch that nobody gave, unless a rank's share of the longest sample is more
LLM_SP, ENCODER_SP, BALANCE, PAIRING, PACKING = (
    "llm_sp.policy",
    "encoder_sp.policy",
    "balance.policy",
    "pairing.policy",
    "packing.policy",
)
POLICIES: Mapping[str, tuple[str, str]] = {
    LLM_SP: ("uniform", "dynamic"),
    ENCODER_SP: ("none", "dynamic"),
    BALANCE: ("two_constraint", "lpt"),
    PAIRING: ("alike", "in_order"),
    PACKING: ("first_fit_decreasing", "graded"),
}
"""The policies that an open key is chosen of; the first is taken where the other gains nothing."""

Keys = Mapping[str, Any]


@dataclass(frozen=True)
class Tried:
    """A candidate: its keys, the simulated nanoseconds of a step, why it cannot be, if so, and the bytes that
    a rank would hold `beyond` its device's memory, less than 0 if it fits; and whether no schedule but a
    `lean` one does.
    """

    keys: Keys
    step_ns: int | None = None
    refused: str = ""
    beyond: int = 0
    lean: bool = False


@dataclass(frozen=True)
class RunChoice:
    """What was chosen: keys, the `best` of the candidates that were `tried`, of samples what is cut; `again`
    if the run had choices, and for how many ranks these were.
    """

    keys: Keys
    best: Tried
    tried: Sequence[Tried]
    cut: str = ""
    again: int | None = None

    def lines(self) -> Iterator[str]:
        """Say what was chosen, which keys give the same without choosing, and what others would take."""
        again = f" again (before: for {self.again} ranks)" if self.again else ""
        yield f"chosen{again}: {text_of(self.keys)}"
        if self.cut:
            yield f"  {self.cut}"
        own = self.best.step_ns
        if own is None:
            return
        step = "a step of at most 64 samples a replica, in its busiest domains"
        yield f"  simulated, {step}: {own / 1e6:,.1f} ms. With other keys:"
        for each in self.tried:
            if each is not self.best:
                other = {key: value for key, value in each.keys.items() if self.best.keys[key] != value}
                step_ns = each.step_ns
                said = (
                    each.refused if step_ns is None else f"{step_ns / 1e6:,.1f} ms ({step_ns / own - 1:+.1%})"
                )
                why = f", {each.refused}" if each.refused and step_ns is not None else ""
                yield f"    {text_of(other)}: {said}{why}"


def text_of(keys: Keys) -> str:
    """Return keys as they stand on a command line; an encoder's file need not have all of its keys."""
    return " ".join(
        f"{'++' * of_encoder(key)}{key.removesuffix('.policy')}={value}" for key, value in keys.items()
    )


def open_keys(config: Config) -> list[str]:
    """Return the keys that a configuration leaves to be chosen."""
    keys = [key for key in (DOMAIN, ZERO, MICROBATCH, PACKS, CONTEXT, VPP) if value_of(config, key) is None]
    if value_of(config, RECOMPUTE) == AUTO:
        keys += [RECOMPUTE, *_OFF, *_of_encoders(config, OFFLOAD)]
    keys += [key for key in POLICIES if value_of(config, key) == AUTO]
    if {*keys} - {CONTEXT}:  # alone it follows from the samples, and nothing is simulated
        keys += _of_encoders(config, KEEPS)
    if keys and config.data.sample_tokens is None:
        keys.append(LONGEST)
    beside = find(PlacementPolicy, config.placement.policy, PLACEMENT).beside
    return [*keys, BESIDE] if beside and config.placement.ranks is None else keys


def _of_encoders(config: Config, end: str) -> list[str]:
    """The keys with such an end that are open, of encoders whose layers are computed anew."""
    keys = (f"{OF_ENCODERS}{name}{end}" for name in config.model.encoders)
    return [key for key in keys if _computes_anew(config, key) and value_of(config, key) is None]


def _computes_anew(config: Config, key: str) -> bool:
    """Whether the encoder of a key has its layers computed anew."""
    name = key.removeprefix(OF_ENCODERS).rsplit(".", 1)[0]
    return bool(config.model.encoders.get(name, {}).get("recompute") == "full")


def of_encoder(key: str) -> bool:
    """Whether a key that is chosen is an encoder's."""
    return key.startswith(OF_ENCODERS)


def unchosen(config: Config) -> Config:
    """Return a configuration whose open keys are as if nothing were to be shared."""
    plain = {
        DOMAIN: None,  # the least
        ZERO: 1,
        VPP: 1,
        PACKS: 1,
        CONTEXT: None,
        LONGEST: None,
        MICROBATCH: PASS_TOKENS,
        RECOMPUTE: recomputed(config.model.llm)[0],
        **_OFF,
        BESIDE: None,
    }
    plain |= {key: names[0] for key, names in POLICIES.items()}
    return with_keys(config, {key: plain.get(key) for key in open_keys(config)})


def recomputed(llm: LLMConfig) -> tuple[str, str, str]:
    """What the LLM may recompute where that is open: what is tried first, what holds least, what takes least.

    Layers with windows recompute all or nothing (`omni.llm_config.WINDOWS_STAY`).
    """
    return "selective" if llm.window is None else "none", "full", "none"


def as_saved(config: Config, saved: Config, given: Collection[str] = ()) -> Config:
    """Return a configuration, composed anew, whose open keys are as they were saved with the run that it
    continues. So is the schedule, if it is `auto` and is not among the keys that were `given`: a run that
    began before that was the default goes on as it was.
    """
    keys = open_keys(config)
    if config.pipeline.policy == AUTO and SCHEDULE not in given:
        keys.append(SCHEDULE)
    kept = {key: value_of(saved, key) for key in keys}
    still = replace(saved.choice, keys=[key for key in saved.choice.keys if key in kept])
    return _of_layout(replace(with_keys(config, kept), choice=still), saved)


def continued(config: Config, saved: Config, given: Collection[str] = ()) -> Config:
    """Return a configuration, composed of a saved one and overrides, with what had been chosen and is neither
    among the keys that were `given` nor set by an option. One that empties its section sets nothing.
    """
    empty: dict[str, Any] = {DOMAIN: 1, ZERO: 1, VPP: 1, PACKS: 1, CONTEXT: 4096, LONGEST: None}
    empty |= {MICROBATCH: None, RECOMPUTE: AUTO, **_OFF}
    empty |= dict.fromkeys(filter(of_encoder, saved.choice.keys))
    values = {key: (value_of(config, key), value_of(saved, key)) for key in saved.choice.keys}
    keys = [key for key, (now, before) in values.items() if now in (before, empty.get(key, before))]
    idle = [key for key in saved.choice.keys if of_encoder(key) and not _computes_anew(config, key)]
    keys = [key for key in keys if key not in given and key not in idle]
    config = with_keys(config, {key: value_of(saved, key) for key in keys} | dict.fromkeys(idle))
    return _of_layout(replace(config, choice=replace(saved.choice, keys=keys)), saved)


def _of_layout(config: Config, saved: Config) -> Config:
    """A configuration that was saved, with what was chosen open again if it now has another layout."""
    now, before = ((of.layout.llm, of.layout.encoders, of.placement) for of in (config, saved))
    return config if now == before else opened(config)


def reopened(config: Config, ranks: int) -> Config:
    """Return a configuration whose chosen keys are open again if they were chosen for other ranks."""
    return config if config.choice.ranks in (None, ranks) else opened(config)


def opened(config: Config) -> Config:
    """Return a configuration with what was chosen open again, but for how long a sample may be: that decides
    what is trained on.
    """
    keys = (key for key in config.choice.keys if key != LONGEST)
    values = _OFF | dict.fromkeys((RECOMPUTE, *POLICIES), AUTO)
    return with_keys(config, {key: values.get(key) for key in keys})


def chosen(config: Config, keys: Keys, ranks: int) -> Config:
    """Return a configuration with what was chosen for so many ranks, which it remembers, also of how long a
    sample may be, which is chosen once.
    """
    kept = [key for key in config.choice.keys if key == LONGEST and key not in keys]
    return replace(with_keys(config, keys), choice=ChoiceConfig(ranks, [*keys, *kept]))


def value_of(config: Config, key: str) -> Any:
    """Return the value of a key, also of an entry of a mapping."""
    return reduce(_entry, key.split("."), config)


def with_keys(config: Config, keys: Keys) -> Config:
    """Return a configuration with other values of keys. An encoder that lacks a key has none for null, and
    keys of one that is gone stay away.
    """
    config = deepcopy(config)
    for key, value in keys.items():
        *sections, name = key.split(".")
        holder = reduce(_entry, sections, config)
        if isinstance(holder, dict):
            if value is not None or name in holder:
                holder[name] = value
        elif holder is not None:
            setattr(holder, name, value)
    return config


def _entry(section: Any, name: str) -> Any:
    """An entry of a section, None of an encoder that is not there."""
    return section.get(name) if isinstance(section, dict) else section and getattr(section, name)
