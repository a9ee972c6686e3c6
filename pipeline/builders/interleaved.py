"""Interleaved 1F1B: several parts of the LLM on a rank (Narayanan et al., 2021, section 2.2).

With v parts on each of p ranks, a part takes 1/v of a stage's time, and so does the bubble of (p - 1)/v times
a forward and a backward of a stage. Messages between stages are v times as many.
"""

from functools import partial

from pipeline.builders.schedule import Facts, Order, SchedulePolicy, encoders_around, most_in_flight
from pipeline.domain_plan import DomainPlan
from pipeline.ops import Kind, Op


def interleaved_passes(stages: int, parts: int, microbatches: int, stage: int) -> list[Op]:
    """Order the passes of one stage: microbatches in groups of `stages`, each group through part after part.

    A last group that is not full is ordered as if it were, and what it lacks is left out on all ranks: the
    order of the others stays one that cannot hang.
    """
    groups = range(0, microbatches, stages)
    own = range(stage, stages * parts, stages)
    forward, backward = (
        [Op(kind, m, part=part) for first in groups for part in order for m in range(first, first + stages)]
        for kind, order in ((Kind.FORWARD, own), (Kind.BACKWARD, own[::-1]))
    )
    ahead = min((stages - stage - 1) * (2 if parts > 1 else 1) + (parts - 1) * stages, len(forward))
    ops = forward[:ahead]
    for after, back in zip(forward[ahead:], backward, strict=False):
        ops += [after, back]
    ops += backward[len(forward) - ahead :]
    return [op for op in ops if op.index < microbatches]


def build_interleaved(domain: DomainPlan, facts: Facts) -> Order:
    """All encoder forwards, interleaved 1F1B, all encoder backwards."""
    return encoders_around(interleaved_passes, domain)


INTERLEAVED = SchedulePolicy(
    "interleaved", build_interleaved, in_flight=partial(most_in_flight, interleaved_passes), parts=None
)
