"""Which rank takes longer than its peers for the same ops.

    step n        ends a window: each rank has added up, part by part, what its ops took and what the cost
                  table gives them, and tells it
    step n + 1    is done, and each rank knows the sums of all, compares itself with its peers and tells that
    step n + 2    is done, and all ranks know which rank is the slowest of the window, and by how much

A rank's peers are the others that ran the same part of the model; where there are none, those that ran
another part of the same component. It is measured against their mean, itself left out, so that the table need
not be right: what it says wrongly of a part, it says of all who run it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import NamedTuple

from parallel.control_values import Op, Part
from parallel.costs import CostTable
from parallel.learning import Sample

WINDOW = 5  # steps
SLOW = 1.5  # times its peers' time, in each of ROUNDS windows in a row, that a rank is called slow for
ROUNDS = 2
_UNIT = 1000  # of a ratio, where the largest is found
_MOST = 2**30


class Spent(NamedTuple):
    """Nanoseconds that passes through a part took, and that the cost table gives them."""

    taken: int
    given: int


@dataclass(frozen=True)
class Slowest:
    """The slowest rank of a window: its time by that of its peers, and for how many windows in a row it has
    been slow.
    """

    rank: int
    ratio: float
    rounds: int

    @property
    def is_slow(self) -> bool:
        """Whether it has just been slow for long enough to be called so."""
        return self.rounds == ROUNDS

    def __str__(self) -> str:
        steps = self.rounds * WINDOW
        return (
            f"rank {self.rank} took {self.ratio:.1f} times as long for its ops as its peers, in {steps} steps"
        )

    def metrics(self) -> dict[str, float]:
        """Its metrics, by name."""
        return {"health/slowest": self.ratio, "health/slowest_rank": self.rank}


def ratio_to_peers(own: Mapping[str, Spent], everyone: Mapping[str, Spent]) -> float:
    """Return by how much a rank was slower than its peers: 1 is as fast as they, 0 if it had none.

    `everyone` is the sum over all ranks, this one included, by part.
    """
    taken = expected = 0.0
    for part, (own_taken, own_given) in own.items():
        peers = _others([part], own, everyone)
        if not peers.given:
            component = part.partition("/")[0]
            peers = _others([p for p in everyone if p.partition("/")[0] == component], own, everyone)
        if peers.given and peers.taken:
            taken += own_taken
            expected += own_given * peers.taken / peers.given
    return taken / expected if expected else 0.0


def _others(parts: Sequence[str], own: Mapping[str, Spent], everyone: Mapping[str, Spent]) -> Spent:
    of = [(everyone[part], own.get(part, Spent(0, 0))) for part in parts]
    return Spent(sum(a.taken - b.taken for a, b in of), sum(a.given - b.given for a, b in of))


class SlowRanks:
    """Finds the slowest rank, beside what ranks do. Every rank tells of each step, and hears what all told in
    the order of steps; `parts` are the names of all parts of the model, in the same order everywhere.
    """

    def __init__(self, parts: Iterable[str], rank: int, world: int) -> None:
        self.parts = tuple(parts)
        self.rank = rank
        self.world = world
        self.steps = -1  # of this window; the first step of a run is left out: much happens once in it
        self.taken = Counter[str]()
        self.given = Counter[str]()
        self.own: dict[str, Spent] = {}
        self.ratio: int | None = None
        self.slowest: Slowest | None = None

    def tell(self, passes: Iterable[Sample], table: CostTable) -> dict[str, Part]:
        """Take in this rank's passes of a step that was planned with `table`, and return what it tells."""
        if self.world == 1:
            return {}
        told: dict[str, Part] = {}
        if self.ratio is not None:
            told["slowest"] = Op.MAX, [self.ratio << 32 | self.rank]
            self.ratio = None
        self.steps += 1
        if self.steps == 0:
            return told
        for part, direction, tokens, squares, ns in passes:
            self.taken[part] += ns
            self.given[part] += table.parts[part].compute_ns(tokens, squares, direction)
        if self.steps == WINDOW:
            pairs = [(self.taken[part], self.given[part]) for part in self.parts]
            self.own = {part: Spent(*pair) for part, pair in zip(self.parts, pairs, strict=True) if any(pair)}
            told["spent"] = Op.SUM, [ns for pair in pairs for ns in pair]
            self.taken.clear()
            self.given.clear()
            self.steps = 0
        return told

    def hear(self, found: Mapping[str, Sequence[int]]) -> Slowest | None:
        """Learn what all ranks told of a step. Returns the slowest rank of a window in the step in which that
        is known, if any rank has peers.
        """
        if "spent" in found:
            pairs = zip(found["spent"][::2], found["spent"][1::2], strict=True)
            everyone = dict(zip(self.parts, starmap(Spent, pairs), strict=True))
            self.ratio = min(round(ratio_to_peers(self.own, everyone) * _UNIT), _MOST)
        if "slowest" in found:
            ratio, rank = found["slowest"][0] >> 32, found["slowest"][0] & (2**32 - 1)
            return self._follow(rank, ratio / _UNIT) if ratio else None
        return None

    def _follow(self, rank: int, ratio: float) -> Slowest:
        before = self.slowest.rounds if self.slowest is not None and self.slowest.rank == rank else 0
        self.slowest = Slowest(rank, ratio, before + 1 if ratio >= SLOW else 0)
        return self.slowest
