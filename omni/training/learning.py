"""The cost tables of a run: which of them times which step, and how measured ops make the next one.

    step n        every rank sums up what its ops took lately, and tells it
    step n + 1    at its end the sums of all ranks are there; each rank computes the same table of them
    step n + 5    is the first whose plan has not been begun by then: it is planned with that table

On a GPU, which mostly tells of a step when the next one is under way, each of these is a step later. So the
step from which on a table is in effect follows from the step that taught it, on every rank alike.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from omni.training.ahead import PLANS_AHEAD
from parallel.control_values import Op, Part
from parallel.costs import CostTable
from parallel.laws import Direction, Law, Laws
from parallel.learning import Sample, learn, sums_of
from pipeline.digest import digest_of

LATELY = 128  # passes through a part in one direction that a rank remembers


class CostTables:
    """The tables of a run by step, from the one that was `stated` on."""

    def __init__(self, stated: CostTable) -> None:
        self.stated = stated
        self.since: dict[int, CostTable] = {0: stated}  # by the first step that is planned with it
        self.lately: dict[tuple[str, Direction], deque[Sample]] = defaultdict(lambda: deque(maxlen=LATELY))
        self.warm = False

    def at(self, step: int) -> CostTable:
        """Return the table that a step is planned with, known before its plan is begun."""
        return self.since[max(first for first in self.since if first <= step)]

    @property
    def newest(self) -> CostTable:
        """The table that was computed last, in effect or not yet."""
        return self.since[max(self.since)]

    def tell(self, samples: Iterable[Sample]) -> dict[str, Part]:
        """Return what this rank tells of what ops took lately, of which `samples` are those of a step. Every
        rank tells of each step; those of the first are left out, in which much happens once.
        """
        if self.warm:
            for sample in samples:
                self.lately[sample.part, sample.direction].append(sample)
        self.warm = True
        own = (sample for of in self.lately.values() for sample in of)
        return {"costs": (Op.SUM, sums_of(own, self.newest))}

    def hear(self, step: int, found: Mapping[str, Sequence[int]]) -> None:
        """Let what all ranks told of `step` take effect, in the order of steps and before the plan of the
        first step that may heed it is begun.
        """
        if "costs" not in found:
            return
        table = learn(self.newest, found["costs"])
        if table is not self.newest:
            oldest = max(first for first in self.since if first <= step + 1)
            self.since = {first: of for first, of in self.since.items() if first >= oldest}
            self.since[step + PLANS_AHEAD + 2] = table

    # The checkpoint.

    def state(self, step: int) -> dict[str, Any]:
        """Return, as plain values, the tables that steps after `step` are planned with."""
        oldest = max(first for first in self.since if first <= step + 1)
        tables = [
            {
                "since": first,
                "number": table.number,
                "learnt": {name: _plain(of) for name, of in table.learnt},
            }
            for first, table in sorted(self.since.items())
            if first >= oldest
        ]
        return {"stated": _digest(self.stated), "tables": tables}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Continue with the tables of a checkpoint. Returns False, with nothing changed, if they correct what
        other statements say: those of another layout, model or cluster.
        """
        if state["stated"] != _digest(self.stated):
            return False
        self.since = {}
        for saved in state["tables"]:
            laws = {name: Laws(*(Law(*law) for law in of)) for name, of in saved["learnt"].items()}
            self.since[saved["since"]] = self.stated.with_laws(saved["number"], laws)
        return True


def _plain(laws: Laws) -> list[list[int]]:
    return [list(law.coefficients) for law in (laws.forward, laws.input, laws.weight)]


def _digest(stated: CostTable) -> int:
    return digest_of(tuple((name, cost.stated) for name, cost in stated.parts.items()))
