"""Do all ranks hold the same plan? Digests are compared before a plan runs; divergence has a name.

A plan has levels: what the whole world shares, what a group of domains shares, what the ranks of a domain do
together. Each level is compared among its own ranks, all of them in one number a level, whatever the world's
size: of those that share a level each weighs its digest, and the weights of all of them sum up to 0. So the
digests' sum over the world is 0 if they are equal wherever a level is shared. If they are not it is another
number, but for one case in 2^64.

With three ranks of weights 5, 7 and -12: digests 3, 3, 3 give 0, and 3, 4, 3 give 7.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

from parallel.control import Control

_BITS = 64
_MASK = 2**_BITS - 1
_PLACES = 20  # bits of a rank's number
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64 (Steele et al., 2014)
_STRIDE = 0x9E3779B97F4A7C15


class DivergenceError(RuntimeError):
    """Ranks computed different plans for one step."""


class Among(NamedTuple):
    """The ranks that share a level of a plan: the number of what they share, this one's place among them, and
    how many they are.
    """

    number: int
    place: int
    size: int


def weighed(digests: Sequence[int], among: Sequence[Among]) -> list[int]:
    """Return what a rank tells of its digests: a number a level, in int64, to be summed over all ranks."""
    return [
        _signed(digest * _weight(*of) & _MASK) if of.size > 1 else 0
        for digest, of in zip(digests, among, strict=True)
    ]


def diverging(sums: Sequence[int]) -> int | None:
    """Return the widest level at which ranks differ, by its place among levels; `sums` are of `weighed`."""
    return next((level for level, of in enumerate(sums) if of), None)


@cache
def _weight(number: int, place: int, size: int) -> int:
    first = number << _PLACES  # so that what two domains differ in does not cancel
    if place:
        return _mixed(first + place)
    return -sum(_mixed(first + other) for other in range(1, size)) & _MASK


def _mixed(number: int) -> int:
    """An odd number of 64 bits that has no pattern (splitmix64)."""
    mixed = number * _STRIDE & _MASK
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        mixed = (mixed ^ mixed >> shift) * factor & _MASK
    return mixed ^ mixed >> 31 | 1


def _signed(number: int) -> int:
    return number - 2**_BITS if number >> _BITS - 1 else number


class Plan(Protocol):
    """What has levels that can be compared by numbers."""

    @property
    def step(self) -> int:
        """The step that is planned."""

    @property
    def levels(self) -> Sequence[tuple[str, int, int, Any]]:
        """Name, number, digest and content of each level, from the widest on."""


def explain(
    plan: Plan,
    level: int,
    diff: Callable[[Any, Any, str], list[str]],
    control: Control,
    behind: Callable[[str], Sequence[str]] = lambda difference: (),
) -> str:
    """Say which ranks of a level have the plan that the first of them has, and where another one differs: in
    the first number of that level of which they do. `behind` tells the policies that decide what a difference
    is about.

    Every rank calls it. Two plans of that level travel, however many ranks and plans there are.
    """
    name, number, digest, content = plan.levels[level]
    found = control.gather("digests", [number, digest])
    held: dict[int, set[int]] = defaultdict(set)
    for of, other_digest in found:
        held[of].add(other_digest)
    number = min(of for of, several in held.items() if len(several) > 1)
    ranks = [rank for rank, (of, _) in enumerate(found) if of == number]
    digests = [found[rank][1] for rank in ranks]
    first = ranks[0]
    other = next(rank for rank, of in zip(ranks, digests, strict=True) if of != digests[0])
    own = {str(control.rank): plain(content)} if control.rank in (first, other) else {}
    contents = control.share("plans", own)
    differences = diff(contents[str(first)], contents[str(other)], f"plan.{name}")
    where = "the world" if name == "world" else f"{name} {number}"
    check = "Check that all ranks read the same data, configuration and code"
    if policies := behind(differences[0]) if differences else ():
        check += (
            f", and that no policy that decides this is random or asks which rank it is on: "
            f"{', '.join(policies)}"
        )
    lines = [
        f"ranks planned step {plan.step} differently; nothing of it has run.",
        f"  It is the plan of {where}: {digests.count(digests[0])} of {len(ranks)} ranks have that of rank "
        f"{first}, {digests.count(found[other][1])} that of rank {other}; there are {len(set(digests))} "
        "plans.",
        *(f"  rank {first} against rank {other}: {line}" for line in differences[:10]),
        f"{check}.",
    ]
    return "\n".join(lines)


def plain(value: Any) -> Any:
    """Return a plan, or a part of one, as JSON has it: dataclasses as objects, sequences as lists."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple | list):
        return [plain(of) for of in value]
    return value if isinstance(value, str | int | float | None) else repr(value)
