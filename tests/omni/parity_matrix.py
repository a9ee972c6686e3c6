"""The combinations under which training must equal one rank: the full list, and few cases with every pair.

A case gives each axis a value: seven axes of layout and placement, and what else shapes a plan. Not a
combination is what the platform refuses, what takes more than `MOST_RANKS`, and an axis set to what changes
nothing, such as a transport where all rows stay on their rank. Pure: no rank and no model is needed here.

Invariant: two values that occur together in any combination occur together in a case of `covering_array`, a
pairwise covering array found greedily (Cohen et al., The AETG System, IEEE TSE 23(7), 1997, section 4).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
from own_policies import own

from parallel.layout import Arrangement, Layout, LayoutError, arrange
from parallel.placements import PlacementPolicy

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
MOST_RANKS = 8
LAYERS = 4
EXPERTS = {"experts": 4, "topk": 2, "ffn": 48, "shared_ffn": 32, "dense_layers": 1}


def _axis(*values: int | str) -> Any:
    """A field whose first value is what one rank has."""
    return field(default=values[0], metadata={"values": values})


@dataclass(frozen=True)
class Case:
    """One value of each axis. The first eight make a layout: `beside` ranks hold encoders
    alone if these are disaggregated. `domain` is the least number of replicas that plan together.
    """

    tp: int = _axis(1, 2, 4)
    cp: int = _axis(1, 2, 4)
    pp: int = _axis(1, 2, 4)
    dp: int = _axis(1, 2, 3)
    ep: int = _axis(1, 2, 4)
    encoder_tp: int = _axis(1, 2)
    placement: str = _axis("colocated", "stage0", "disaggregated")
    beside: int = _axis(0, 1, 2, 3)
    domain: str = _axis("1", "dp")
    model: str = _axis("dense", "experts")
    encoder_sp: str = _axis("none", "all", "dynamic", "long_short", "hybrid_pow2")
    llm_sp: str = _axis("uniform", "dynamic")
    schedule: str = _axis(
        "encode_first",
        "one_f_one_b",
        "disaggregated",
        "interleaved",
        "zero_bubble_h1",
        "zero_bubble_h2",
        "joint",
        "joint_interleaved",
        "joint_zero_bubble_h1",
        "joint_zero_bubble_h2",
        "auto",
    )
    recompute: str = _axis("none", "full")
    boundary: str = _axis("auto", "two_level", "reduce_scatter")
    data: str = _axis("mixed", "one")
    frozen: str = _axis("none", "image", "llm", "in_turn")

    @property
    def vpp(self) -> int:
        """Virtual stages of the LLM on a rank."""
        return 2 if "interleaved" in self.schedule else 1

    @property
    def layout(self) -> Layout:
        """The LLM's layout."""
        return Layout(self.tp, self.cp, self.dp, self.pp, self.ep, self.vpp)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp + self.beside

    @property
    def replicas(self) -> int:
        """Value of layout.domain."""
        return self.dp if self.domain == "dp" else 1

    def arrangement(self) -> Arrangement:
        """Return where everything lives; LayoutError if the platform refuses it."""
        placement = own(PlacementPolicy)[self.placement]
        return arrange(self.layout, {"image": self.encoder_tp}, placement, self.beside, self.replicas)

    @property
    def reference(self) -> "Case":
        """The same model and data on one rank."""
        return Case(model=self.model, data=self.data, frozen=self.frozen)

    @cached_property
    def name(self) -> str:
        """The values that one rank does not have, in words."""
        axes = [
            f"{axis}{size}" for axis in ("tp", "cp", "pp", "dp", "ep") if (size := getattr(self, axis)) > 1
        ]
        home = f"beside{self.beside}" if self.beside else self.placement
        words = {
            "encoder_tp": "enc_tp2",
            "placement": home,
            "domain": "one_domain",
            "model": "experts",
            "encoder_sp": f"enc_{self.encoder_sp}",
            "llm_sp": f"llm_{self.llm_sp}",
            "schedule": self.schedule,
            "recompute": "recompute",
            "boundary": self.boundary,
            "data": "one_item",
            "frozen": f"frozen_{self.frozen}",
        }
        changed = [word for axis, word in words.items() if getattr(self, axis) != AXES[axis][0]]
        return " ".join([*axes, *changed]) or "one_rank"

    def settings(self) -> dict[str, Any]:
        """Return what to set in the configuration, key by key."""
        return (
            {
                "layout.llm.tp": self.tp,
                "layout.llm.cp": self.cp,
                "layout.llm.dp": self.dp,
                "layout.llm.pp": self.pp,
                "layout.llm.ep": self.ep,
                "layout.llm.vpp": self.vpp,
                "layout.domain": self.replicas,
                "layout.encoders.image.tp": self.encoder_tp,
                "placement.policy": self.placement,
                "placement.ranks": self.beside,
                "encoder_sp.policy": self.encoder_sp,
                "llm_sp.policy": self.llm_sp,
                "pipeline.policy": self.schedule,
                "boundary.policy": self.boundary,
                "model.llm.recompute": self.recompute,
                "model.encoders.image.recompute": self.recompute,
            }
            | (
                {f"model.llm.moe.{key}": size for key, size in EXPERTS.items()}
                if self.model == "experts"
                else {}
            )
            | {f"optim.components.{name}.frozen": steps for name, steps in self.frozen_steps.items()}
        )

    @property
    def frozen_steps(self) -> dict[str, list[list[int]]]:
        """The spans of steps in which components are frozen."""
        return {
            "none": {},
            "image": {"image": [[1, 9]]},
            "llm": {"llm": [[1, 9]]},
            "in_turn": {"image": [[1, 2]], "llm": [[2, 9]]},
        }[self.frozen]


AXES: Mapping[str, tuple[Any, ...]] = {f.name: f.metadata["values"] for f in fields(Case)}
LAYOUT_AXES = tuple(AXES)[:8]
FURTHER_AXES = tuple(AXES)[8:]


@cache
def _words() -> dict[str, dict[str, Any]]:
    """What each word of a name says of the axes."""
    words: dict[str, dict[str, Any]] = {Case().name: {}}
    for axis, values in AXES.items():
        for value in values[1:]:
            says = {"placement": "disaggregated", "beside": value} if axis == "beside" else {axis: value}
            if says != {"placement": "disaggregated"}:  # said by the ranks beside
                words[Case(**says).name] = says
    return words


def named(name: str) -> Case:
    """Return the case of a name."""
    says: dict[str, Any] = {}
    for word in name.split():
        says |= _words()[word]
    return Case(**says)


def listed() -> tuple[Case, ...]:
    """Return the cases that docs/parity.md lists, which are those of `covering_array`: to find them takes
    seconds, and every process that runs tests begins with them.
    """
    return tuple(map(named, re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)))


# A dynamic pool of four with dynamic encoders: the ranks of one replica, and those of two with two stages.
_DYNAMIC = Case(
    encoder_sp="dynamic",
    llm_sp="dynamic",
    schedule="one_f_one_b",
    recompute="full",
    boundary="two_level",
)
REQUIRED = (
    replace(_DYNAMIC, tp=2, cp=4, encoder_tp=2),
    replace(_DYNAMIC, cp=2, dp=2, pp=2, domain="dp", model="experts", ep=4),
)


def layouts() -> Iterator[Case]:
    """Yield every layout that is not refused, with first values on all other axes."""
    for values in product(*(AXES[axis] for axis in LAYOUT_AXES)):
        case = Case(*values)
        if case.world <= MOST_RANKS and is_arranged(case):
            yield case


def is_arranged(case: Case) -> bool:
    """Whether the platform accepts the layout."""
    try:
        case.arrangement()
    except LayoutError:
        return False
    return True


def _blocks(layout: Case) -> Iterator[tuple[tuple[Any, ...], ...]]:
    """Yield the values that each axis may have with a layout, for each domain it may have."""
    for domain in AXES["domain"] if layout.dp > 1 else ("1",):
        case = replace(layout, domain=domain)
        found = case.arrangement()
        num_tp_groups = len(found.tp_groups("image"))
        yield (
            *((getattr(case, axis),) for axis in LAYOUT_AXES),
            (domain,),
            AXES["model"] if case.ep == 1 else ("experts",),
            AXES["encoder_sp"] if num_tp_groups > 1 else ("none",),
            AXES["llm_sp"] if found.pool > 1 else ("uniform",),
            tuple(s for s in AXES["schedule"] if _schedules(case, s)),
            AXES["recompute"],
            AXES["boundary"] if found.domain_size > 1 else ("auto",),
            AXES["data"] if num_tp_groups * found.num_domains > 1 else ("mixed",),
            AXES["frozen"],
        )


def _schedules(case: Case, schedule: str) -> bool:
    """Whether a layout can have a schedule, and one that changes something."""
    if schedule == "disaggregated":
        return case.beside > 0
    return "interleaved" not in schedule or 2 * case.pp <= LAYERS


@dataclass(frozen=True)
class Space:
    """All cases, layout by layout: those of layout i are [starts[i], starts[i + 1]). `places` [cases, axes]
    says which value of each axis a case has, `pairs` [cases, pairs] numbers the pairs of values, of which
    there are `num_pairs`, one pair of axes after the other in memory.
    """

    places: np.ndarray
    starts: tuple[int, ...]
    pairs: np.ndarray
    num_pairs: int

    def case(self, number: int) -> Case:
        """Return a case by its number."""
        places = zip(AXES.values(), self.places[number], strict=True)
        return Case(*(values[place] for values, place in places))

    def number(self, case: Case) -> int:
        """Return the number of a case; AssertionError if it is none of them."""
        places = [values.index(getattr(case, axis)) for axis, values in AXES.items()]
        found = np.flatnonzero((self.places == places).all(1))
        assert len(found) == 1, case
        return int(found[0])


@cache
def space() -> Space:
    """Enumerate every combination, as numbers: so many objects would hold up the start of every test run."""
    axes = list(AXES)
    parts, starts = [], [0]
    for layout in layouts():
        for block in _blocks(layout):
            places = [[values.index(v) for v in of] for values, of in zip(AXES.values(), block, strict=True)]
            grid = np.stack(np.meshgrid(*places, indexing="ij"), -1).reshape(-1, len(axes)).astype(np.int16)
            # Sharing its only item would give every rank a part of it.
            shared = grid[:, axes.index("encoder_sp")] != AXES["encoder_sp"].index("none")
            parts.append(grid[~(shared & (grid[:, axes.index("data")] == AXES["data"].index("one")))])
        starts.append(sum(map(len, parts)))
    columns = np.concatenate(parts)
    sizes = [len(values) for values in AXES.values()]
    couples = list(combinations(range(len(axes)), 2))
    pairs, first = np.empty((len(couples), len(columns)), np.int16), 0
    for row, (a, b) in zip(pairs, couples, strict=True):
        row[:] = first + columns[:, a] * sizes[b] + columns[:, b]
        first += sizes[a] * sizes[b]
    return Space(columns, tuple(starts), pairs.T, first)


@cache
def covering_array() -> tuple[Case, ...]:
    """Return few cases that have every pair of values of any combination, the rarest pairs first.

    After the required ones, each case is the one whose pairs not yet had weigh most, where a pair weighs the
    more the fewer combinations have it; the first of equals. Cases whose pairs others have as well are left
    out in the end.
    """
    all_cases = space()
    columns = all_cases.pairs.T
    occurring = sum(np.bincount(column, minlength=all_cases.num_pairs) for column in columns)
    weights = np.where(occurring > 0, len(all_cases.places) // np.maximum(occurring, 1), 0)
    missing = weights > 0
    chosen = [all_cases.number(case) for case in REQUIRED]
    missing[all_cases.pairs[chosen]] = False
    open_weights = np.where(missing, weights, 0)
    gains = sum(open_weights[column] for column in columns)
    while missing.any():
        best = int(gains.argmax())
        chosen.append(best)
        for column, pair in enumerate(all_cases.pairs[best]):
            if missing[pair]:
                missing[pair] = False
                gains[all_cases.pairs[:, column] == pair] -= weights[pair]
    had = np.bincount(all_cases.pairs[chosen].ravel(), minlength=all_cases.num_pairs)
    for case in chosen[len(REQUIRED) :]:
        if (had[all_cases.pairs[case]] > 1).all():
            chosen.remove(case)
            had[all_cases.pairs[case]] -= 1
    return tuple(map(all_cases.case, chosen))


@cache
def full_list() -> tuple[Case, ...]:
    """Return every combination of the axes of a layout once, each with those values of the further axes whose
    pairs occurred least in the list so far.
    """
    all_cases = space()
    had = np.zeros(all_cases.num_pairs, np.int64)
    chosen = []
    for start, stop in zip(all_cases.starts, all_cases.starts[1:], strict=False):
        best = start + int(had[all_cases.pairs[start:stop]].sum(1).argmin())
        had[all_cases.pairs[best]] += 1
        chosen.append(all_cases.case(best))
    return tuple(chosen)
