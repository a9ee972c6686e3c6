"""Layouts that a run may have: which there are, and how one differs from its neighbours.

A candidate is a mapping of keys of the configuration, as everywhere in planning. A key that was given is
never changed. Of the LLM's tp, cp and pp all combinations are listed that ranks and sizes allow, tensor and
context parallelism inside a node; all else is changed one thing at a time.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from omni.config import Config, EncoderLayoutConfig
from omni.llm_config import RECOMPUTE as RECOMPUTATIONS
from omni.llm_config import LLMConfig
from omni.models.llm import check_llm_layout
from omni.models.registry import Encoder
from omni.planning.choice import (
    AUTO,
    BESIDE,
    DOMAIN,
    MICROBATCH,
    PACKING,
    PACKS,
    PLACEMENT,
    POLICIES,
    RECOMPUTE,
    ZERO,
    Keys,
    value_of,
    with_keys,
)
from parallel.layout import MOST_ZERO, Layout
from parallel.placements import COLOCATED, DISAGGREGATED, STAGE0

TP, CP, PP, EP, VPP, DP = (f"layout.llm.{axis}" for axis in ("tp", "cp", "pp", "ep", "vpp", "dp"))
PASS = "pass"
"""Tokens of a pack, from which `data.microbatch_tokens` and `packing.divisor` follow."""
MOST_EP, MOST_VPP = 64, 4
LEAST_PASS, MOST_PASS = 64, 65_536
_PLACEMENTS = (COLOCATED.name, STAGE0.name, DISAGGREGATED.name)


@dataclass(frozen=True)
class Space:
    """The values that each free key may have, in an order in which neighbours differ least, and the sizes of
    the LLM's axes, of those that were given one each. `encoders` are the names of all encoders.
    """

    sizes: Mapping[str, Sequence[int]]
    values: Mapping[str, Sequence[Any]]
    encoders: tuple[str, ...]
    ranks: int
    per_node: int

    def splits(self, beside: int = 0) -> Iterator[Keys]:
        """Yield every tp, cp and pp whose replica divides the ranks that are not `beside` the LLM."""
        given = all(len(self.sizes[key]) == 1 for key in (TP, CP))
        for tp, cp, pp in product(*(self.sizes[key] for key in (TP, CP, PP))):
            fits = (self.ranks - beside) % (tp * cp * pp) == 0
            if fits and (tp * cp <= self.per_node or given):
                yield {TP: tp, CP: cp, PP: pp}

    def next_of(self, key: str, keys: Keys) -> Keys | None:
        """Return the next larger value of a key, None where there is none."""
        own = self.values.get(key, ())
        after = own[own.index(keys[key]) + 1 :] if key in keys and own else ()
        return {key: after[0]} if after else None

    def neighbours(self, keys: Keys, key: str) -> tuple[Any, ...]:
        """Return the values next to a candidate's own of a key; of placements all others. What one stage
        cannot show is left out.
        """
        values, staged = self.values[key], keys[PP] > 1
        if key == PLACEMENT:
            return tuple(own for own in values if own != keys[key] and (staged or own != STAGE0.name))
        if key in (VPP, PACKING) and not staged:
            return ()
        if keys[key] not in values:
            return tuple(values)
        at = values.index(keys[key])
        return (*values[at + 1 : at + 2], *values[max(0, at - 1) : at])


def encoder_tp(name: str) -> str:
    """Return the key of an encoder's tensor-parallel size."""
    return f"layout.encoders.{name}.tp"


def encoder_recompute(name: str) -> str:
    """Return the key that says what an encoder recomputes."""
    return f"model.encoders.{name}.recompute"


def spelt_out(config: Config, encoders: Mapping[str, Encoder]) -> Config:
    """Return a configuration in which what encoders may leave out has its default: their layouts, and what
    those that know the key recompute.
    """
    config = with_keys(config, {})
    for name, encoder in encoders.items():
        config.layout.encoders.setdefault(name, EncoderLayoutConfig())
        for key in fields(encoder.Config):
            if key.name == "recompute":
                config.model.encoders[name].setdefault(key.name, key.default)
    return config


def space_of(
    config: Config, given: Collection[str], encoders: Mapping[str, Encoder], vocab_size: int, ranks: int
) -> Space:
    """Return the space of a configuration, spelt out, in which no key that was `given` is changed. Policies
    are free where they are `auto`.
    """
    per_node, llm = config.cluster.ranks_per_node, config.model.llm
    sizes = {
        key: [value_of(config, key)] if key in given else own
        for key, own in _sizes(llm, vocab_size, ranks, per_node).items()
    }
    values: dict[str, Sequence[Any]] = {  # what gains most often comes first
        RECOMPUTE: [own for own in RECOMPUTATIONS if own != "selective" or llm.window is None]
    }
    for name, encoder in encoders.items():
        values[encoder_tp(name)] = [n for n in _powers(min(per_node, ranks)) if n == 1 or _takes(encoder, n)]
        if "recompute" in config.model.encoders[name]:
            values[encoder_recompute(name)] = [own for own in RECOMPUTATIONS if own != "selective"]
    values |= {
        DOMAIN: list(_powers(2 * ranks - 1)),
        PASS: [n for n in _powers(MOST_PASS) if n >= LEAST_PASS],
        VPP: list(_powers(min(MOST_VPP, llm.layers))),
        **sizes,
        **{key: names for key, names in POLICIES.items() if value_of(config, key) == AUTO},
        PLACEMENT: _PLACEMENTS if encoders else _PLACEMENTS[:1],
        ZERO: list(range(1, MOST_ZERO + 1)),
    }
    fixed = set(given) | ({PASS} if {MICROBATCH, PACKS} <= set(given) else set())
    if PLACEMENT in fixed or BESIDE in fixed:
        fixed |= {PLACEMENT}
    free = {key: own for key, own in values.items() if key not in fixed and len(own) > 1}
    return Space(sizes, free, tuple(encoders), ranks, per_node)


def _powers(most: int) -> Iterator[int]:
    yield from (1 << n for n in range(max(1, most).bit_length()))


def _sizes(llm: LLMConfig, vocab_size: int, ranks: int, per_node: int) -> dict[str, list[int]]:
    """The sizes of each axis that the LLM allows by itself, ascending: divisors of ranks, powers of two."""

    def allowed(axis: str, most: int) -> list[int]:
        own = (n for n in range(1, min(most, ranks) + 1) if ranks % n == 0 or n & (n - 1) == 0)
        return [n for n in own if n == 1 or _can(llm, vocab_size, axis, n)]

    return {
        TP: allowed("tp", per_node),
        CP: [n for n in range(1, min(per_node, ranks) + 1) if ranks % n == 0 or n & (n - 1) == 0],
        PP: allowed("pp", llm.layers),
        EP: allowed("ep", MOST_EP) if llm.mixture is not None else [1],
    }


def _can(llm: LLMConfig, vocab_size: int, axis: str, size: int) -> bool:
    layout = Layout(**{axis: size, **({"dp": size} if axis == "ep" else {})})
    try:
        check_llm_layout(llm, layout, vocab_size)
    except ValueError:
        return False
    return True


def _takes(encoder: Encoder, tp: int) -> bool:
    try:
        encoder.check_tp("tp", tp)
    except ValueError:
        return False
    return True
