"""Zero bubble: gradients of weights fill the bubbles of 1F1B (ZB-H1 and ZB-H2: Qi et al., 2024, section 2).

With a forward of f, a backward for inputs of b and one for weights of w on each of p stages, the bubble of
1F1B is (p - 1)(f + b + w). Gradients of inputs go on to the next stage without waiting for those of weights,
which stage s puts off: ZB-H1 those of s microbatches, so that all stages hold the activations of p
microbatches at most, as the first one does under 1F1B. Its bubble is (p - 1)(f + b - w).

ZB-H2 has each stage run twice as far ahead of the next one and puts off twice as much: it holds 2p - 1
microbatches, and needs as many. No stage idles more than (p - 1)(f + b - 2w) between its first pass and its
last one. But stage s begins s forwards late, and all stages end a step together, since one norm clips all
gradients: a step has a bubble of (p - 1) max(f, f + b - 2w), where b <= f + w. In the paper, updates do not
wait for the norm.
"""

from functools import partial

from parallel.work import Grad
from pipeline.builders.schedule import Facts, Order, SchedulePolicy, encoders_around, most_in_flight
from pipeline.domain_plan import DomainPlan
from pipeline.ops import Kind, Op


def zb_h1_passes(stages: int, parts: int, microbatches: int, stage: int) -> list[Op]:
    """Order the passes of one stage, of one part, in the memory of 1F1B."""
    return _passes(stages, parts, microbatches, stage, ahead=1)


def zb_h2_passes(stages: int, parts: int, microbatches: int, stage: int) -> list[Op]:
    """Order the passes of one stage, of one part, in nearly twice the memory of 1F1B."""
    return _passes(stages, parts, microbatches, stage, ahead=2)


def _passes(stages: int, parts: int, microbatches: int, stage: int, ahead: int) -> list[Op]:
    """Each stage is `ahead` forwards ahead of the next one, and as many more gradients of weights behind."""
    assert parts == 1, f"{parts} parts on a rank, and this schedule orders one"
    first, behind = min(ahead * (stages - stage - 1), microbatches), ahead * stage
    ops = [Op(Kind.FORWARD, m, part=stage) for m in range(first)]
    for m in range(microbatches):
        if first + m < microbatches:
            ops.append(Op(Kind.FORWARD, first + m, part=stage))
        ops.append(Op(Kind.BACKWARD, m, part=stage, grad=Grad.INPUT))
        if m >= behind:
            ops.append(Op(Kind.BACKWARD, m - behind, part=stage, grad=Grad.WEIGHT))
    left = range(max(0, microbatches - behind), microbatches)
    return ops + [Op(Kind.BACKWARD, m, part=stage, grad=Grad.WEIGHT) for m in left]


def build_zero_bubble_h1(domain: DomainPlan, facts: Facts) -> Order:
    """All encoder forwards, ZB-H1, all encoder backwards."""
    return encoders_around(zb_h1_passes, domain)


def build_zero_bubble_h2(domain: DomainPlan, facts: Facts) -> Order:
    """All encoder forwards, ZB-H2, all encoder backwards."""
    return encoders_around(zb_h2_passes, domain)


ZERO_BUBBLE_H1 = SchedulePolicy(
    "zero_bubble_h1", build_zero_bubble_h1, in_flight=partial(most_in_flight, zb_h1_passes)
)
ZERO_BUBBLE_H2 = SchedulePolicy(
    "zero_bubble_h2", build_zero_bubble_h2, in_flight=partial(most_in_flight, zb_h2_passes)
)
