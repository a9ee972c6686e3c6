"""How far steps have come from what the run's policies and sizes were chosen for.

A step is planned to take so many times what even work would, `choice/over_even`. Where the mixture of samples
moves, this grows, and other keys may bring it down again; nothing but the samples changes it, so it tells a
choice that is out of date from slow ranks or links. It bounds what another choice can gain, and needs no
simulation but that of the step itself.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

OVER, AT_START, COSTS = "choice/over_even", "choice/at_start", "choice/costs"
FIRST = 20  # steps whose median is what the keys were chosen for
WINDOW = 50  # steps whose median is compared with it


class ChoiceWatch:
    """Compares the last steps with the first ones after keys were chosen.

    `earlier` are the records of steps before, of which those after step `since`, when keys were chosen,
    count.
    """

    def __init__(self, earlier: Sequence[Mapping[str, float]], since: int) -> None:
        mine = [record for record in earlier if record["progress/step"] > since]
        self._at_start = next((record[AT_START] for record in reversed(mine) if AT_START in record), None)
        self._last = deque([record[OVER] for record in mine if OVER in record], WINDOW)

    def step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return what is known after a step: the median of the first steps, and how much above it, as a share
        of it, that of the last ones is.
        """
        if OVER not in metrics:
            return {}
        self._last.append(metrics[OVER])
        if self._at_start is None:
            if len(self._last) < FIRST:
                return {}
            self._at_start = median(self._last)
        return {AT_START: self._at_start, COSTS: median(self._last) / self._at_start - 1}
