"""How ops of ranks vary from turn to turn: what joint_measured.py has the simulator predict with."""

import random
import statistics
from collections import defaultdict, deque
from collections.abc import Callable

from parallel.work import Grad
from pipeline.ops import Kind, Op

LATELY = 60  # turns

Factors = dict[tuple[int, Op], float]
_Kind = tuple[int, Kind, Grad]


class Spread:
    """By which factors ops of ranks differed lately from what the table says, turn by turn, and how long one
    kept its rank that issues communication or waits for it.
    """

    def __init__(self, seed: int) -> None:
        self.turns: deque[Factors] = deque(maxlen=LATELY)
        self.issues: deque[float] = deque(maxlen=LATELY)
        self.random = random.Random(seed)

    def note(self, factors: Factors, issue_ns: float) -> None:
        """Take note of a turn."""
        self.turns.append(factors)
        self.issues.append(issue_ns)

    @property
    def issue_ns(self) -> int:
        """What issuing communication and taking it in cost, an op on average."""
        return round(statistics.mean(self.issues)) if self.issues else 0

    def drawing(self) -> Callable[[], Callable[[int, Op], float]]:
        """Return what draws a turn, and for that what gives the factor of an op.

        Factors are of mean 1 over all turns for each kind on a rank. As where costs are learnt, ops that took
        more than twice as long as the median are left out. An op that the turn does not have is given that of
        another of its kind, or 1.
        """
        every: dict[_Kind, list[float]] = defaultdict(list)
        for turn in self.turns:
            for (rank, op), factor in turn.items():
                every[_kind(rank, op)].append(factor)
        most = {kind: 2 * statistics.median(factors) for kind, factors in every.items()}
        mean = {
            kind: statistics.mean(factor for factor in factors if factor <= most[kind])
            for kind, factors in every.items()
        }

        def draw_turn() -> Callable[[int, Op], float]:
            found, others = dict[tuple[int, Op], float](), defaultdict[_Kind, list[float]](list)
            for (rank, op), factor in (self.random.choice(self.turns) if self.turns else {}).items():
                kind = _kind(rank, op)
                if factor <= most[kind]:
                    found[rank, op] = factor / mean[kind]
                    others[kind].append(factor / mean[kind])

            def factor_of(rank: int, op: Op) -> float:
                if (rank, op) in found:
                    return found[rank, op]
                return self.random.choice(others[_kind(rank, op)] or [1.0])

            return factor_of

        return draw_turn


def _kind(rank: int, op: Op) -> _Kind:
    return rank, op.kind, op.grad
