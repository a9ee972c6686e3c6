"""ZB-H1: gradients of weights fill the bubbles of 1F1B, in its memory (Qi et al., 2024, section 2.2).

With a forward of f, a backward for inputs of b and one for weights of w on each of p stages, the bubble of
1F1B is (p - 1)(f + b + w), and this one's (p - 1)(f + b - w): gradients of inputs go on to the next stage
without waiting for those of weights. Stage s puts off those of s microbatches, so all stages hold the
activations of p microbatches at most, as the first one does under 1F1B.
"""

from functools import partial

from parallel.work import Grad
from pipeline.builders.schedule import Facts, Order, SchedulePolicy, encoders_around, most_in_flight
from pipeline.domain_plan import DomainPlan
from pipeline.ops import Kind, Op


def zb_h1_passes(stages: int, parts: int, microbatches: int, stage: int) -> list[Op]:
    """Order the passes of one stage, of one part."""
    assert parts == 1, f"{parts} parts on a rank, and this schedule orders one"
    ahead = min(stages - stage - 1, microbatches)
    ops = [Op(Kind.FORWARD, m, part=stage) for m in range(ahead)]
    for m in range(microbatches):
        if ahead + m < microbatches:
            ops.append(Op(Kind.FORWARD, ahead + m, part=stage))
        ops.append(Op(Kind.BACKWARD, m, part=stage, grad=Grad.INPUT))
        if m >= stage:
            ops.append(Op(Kind.BACKWARD, m - stage, part=stage, grad=Grad.WEIGHT))
    left = range(max(0, microbatches - stage), microbatches)
    return ops + [Op(Kind.BACKWARD, m, part=stage, grad=Grad.WEIGHT) for m in left]


def build_zero_bubble_h1(domain: DomainPlan, facts: Facts) -> Order:
    """All encoder forwards, ZB-H1, all encoder backwards."""
    return encoders_around(zb_h1_passes, domain)


ZERO_BUBBLE_H1 = SchedulePolicy(
    "zero_bubble_h1", build_zero_bubble_h1, in_flight=partial(most_in_flight, zb_h1_passes)
)
