"""What steps took lately beside what the cost table says of them: for joint_measured.py."""

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from parallel.costs import CostTable
from pipeline.channels import Transfer
from pipeline.ops import COLLECTIVE, ISSUED, Kind
from pipeline.simulator import Timeline
from pipeline.stopwatch import Timing

LATELY = 60  # turns
_HAD = COLLECTIVE | {Kind.RECV_FORWARD, Kind.RECV_BACKWARD}  # that whoever waits for has something to take in

Delay = tuple[bool, int]
"""Whether it is of a collective; nanoseconds from its issue by the last of those who do, until one who waited
for it from then on or before has taken it in.
"""


class Turn(NamedTuple):
    """What a turn took: compute ops by the clock over the CPU time of them; nanoseconds that an op which
    issues communication, or waits for it, kept its rank beside the wait, in the mean; the delays of what was
    waited for; seconds of the step before its first op and after the last that reduces nothing.
    """

    stretch: float
    issue_ns: float
    delays: Sequence[Delay]
    around_s: float


class Learnt:
    """What turns took lately, in the median of them."""

    def __init__(self) -> None:
        self.turns: deque[Turn] = deque(maxlen=LATELY)

    @property
    def stretch(self) -> float:
        """By how many times compute takes longer by the clock than of a core."""
        return statistics.median(turn.stretch for turn in self.turns) if self.turns else 1.0

    @property
    def around_s(self) -> float:
        """Seconds of a step that are around its ops."""
        return statistics.median(turn.around_s for turn in self.turns) if self.turns else 0.0

    def issue_ns(self, table: CostTable) -> int:
        """Nanoseconds that an op costs its rank which issues communication or waits for it."""
        issues = [turn.issue_ns for turn in self.turns]
        return round(statistics.median(issues)) if issues else table.issue_ns

    def delays_ns(self) -> dict[bool, int]:
        """Nanoseconds that collectives, and messages, take that are waited for."""
        found: dict[bool, list[int]] = defaultdict(list)
        for turn in self.turns:
            for collective, ns in turn.delays:
                found[collective].append(ns)
        return {collective: round(statistics.median(of)) for collective, of in found.items()}


def delays_of(timeline: Timeline, measured: Sequence[tuple[int, Sequence[Timing]]]) -> Iterable[Delay]:
    """Yield the delays of a measured step: for each rank when its clock began and its ops, in the order of
    those of `timeline`, of which only who takes part in which transfer is read.
    """
    issued: dict[Transfer, int] = {}
    waits: list[tuple[Kind, Transfer, int, int]] = []
    for (made_ns, timings), transfers in zip(measured, timeline.transfers, strict=True):
        for (op, start_s, end_s, _), transfer in zip(timings, transfers, strict=True):
            start, end = (made_ns + round(s * 1e9) for s in (start_s, end_s))
            if transfer is None or not transfer.teams:
                continue
            if op.kind in ISSUED:
                issued[transfer] = max(end, issued.get(transfer, 0))
            elif op.on in _HAD:
                waits.append((op.on, transfer, start, end))
    for kind, transfer, start, end in waits:
        if start < issued[transfer]:
            yield kind in COLLECTIVE, end - issued[transfer]
