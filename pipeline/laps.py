"""What a rank did in a measured step, lap by lap, and what its idle time is made of.

A rank idles while a lap goes on and it computes nothing. The cause is what it stands still for: the op that a
WAIT is for, the peers whose layers communicate, a reduction of gradients, or what the lap is called.
"""

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.domain_plan import DomainPlan
from pipeline.ops import COMPUTE, Kind, Op

# Laps beside ops: waiting for the step to be prepared, waiting for the plan of the next one, what else the
# host does before the first op, waiting for weights of the last update in front of the first pass that needs
# them, and what follows the last op until the step's totals are summed over all ranks.
DATA, PLAN, HOST, WEIGHTS, END = "data", "plan", "host", "weights", "end"
SAVE = "save"  # of the step before: no part of a step's time
PEERS = "peers"
CAUSES = (
    DATA,
    PLAN,
    HOST,
    WEIGHTS,
    *map(str, (Kind.SHIP, Kind.RETURN)),
    *map(str, (Kind.RECV_FORWARD, Kind.RECV_BACKWARD, Kind.SEND_FORWARD, Kind.SEND_BACKWARD)),
    PEERS,
    str(Kind.REDUCE),
    END,
)
"""Whatever a rank may idle for."""


class Lap(NamedTuple):
    """An op, or one of DATA, PLAN, SAVE, HOST, WEIGHTS and END, in nanoseconds since the step's start on this
    rank; `busy_ns` of it, at most the whole, the rank did not stand still.
    """

    what: Op | str
    start_ns: int
    end_ns: int
    busy_ns: int

    @property
    def idle_ns(self) -> int:
        """How long the rank stood still."""
        return self.end_ns - self.start_ns - self.busy_ns


def cause_of(what: Op | str, domain: DomainPlan, domain_rank: int) -> str:
    """Return what a domain rank stands still for in a lap: one of CAUSES."""
    if isinstance(what, str):
        return what
    if what.kind is Kind.WAIT:
        return str(what.on)
    if what.kind is Kind.REDUCE:
        return str(Kind.REDUCE)
    shared = what.kind in COMPUTE and len(domain.collective_group_of(what, domain_rank)) > 1
    return PEERS if shared else HOST


def idle_of(laps: Sequence[Lap], domain: DomainPlan, domain_rank: int) -> dict[str, int]:
    """Return the nanoseconds that a domain rank idled in a step, for each of CAUSES."""
    found = dict.fromkeys(CAUSES, 0)
    for lap in laps:
        if lap.what == SAVE:
            continue
        found[cause_of(lap.what, domain, domain_rank)] += lap.idle_ns
    return found


def whole_ns(laps: Sequence[Lap]) -> int:
    """Return the nanoseconds of a step, from its start on."""
    return laps[-1].end_ns - sum(lap.end_ns - lap.start_ns for lap in laps if lap.what == SAVE)
