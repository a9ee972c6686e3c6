"""GPipe: all microbatches forward, then all back, the last one first (Huang et al., 2019, section 2.3).

Its bubble is that of 1F1B, and it holds the activations of all microbatches: the baseline for memory.
"""

from pipeline.builders.schedule import Facts, Order, SchedulePolicy, encoders_around
from pipeline.domain_plan import DomainPlan
from pipeline.ops import Kind, Op


def gpipe_passes(stages: int, parts: int, microbatches: int, stage: int) -> list[Op]:
    """Order the passes of one stage; with several parts a rank, all microbatches pass one after the other."""
    own = range(stage, stages * parts, stages)
    forward = [(m, part) for part in own for m in range(microbatches)]
    return [Op(Kind.FORWARD, m, part=part) for m, part in forward] + [
        Op(Kind.BACKWARD, m, part=part) for m, part in reversed(forward)
    ]


def build_gpipe(domain: DomainPlan, facts: Facts) -> Order:
    """All encoder forwards, GPipe, all encoder backwards."""
    return encoders_around(gpipe_passes, domain)


def _all(domain: DomainPlan, part: int) -> int:
    return len(domain.microbatches)


GPIPE = SchedulePolicy("gpipe", build_gpipe, in_flight=_all, parts=None)
