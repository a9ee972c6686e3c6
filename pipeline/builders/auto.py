"""Auto: the schedule among several that takes the least simulated time, step by step.

Which one that is depends on the step: with a few very long items, encoding before the pipeline balances best;
with many, filling the pipeline's bubbles does. Where encoders are small and devices have room, ZB-H2 leaves
hardly a bubble. Where none of these fits, a step has several rounds (`rounds.py`), so that encoders go back
in time for what they hold to have room; where that is not enough, they encode just in time.
"""

from pipeline.builders.joint.order import (
    JOINT,
    JOINT_INTERLEAVED,
    JOINT_ZERO_BUBBLE_H1,
    JOINT_ZERO_BUBBLE_H2,
)
from pipeline.builders.just_in_time import ONE_F_ONE_B
from pipeline.builders.passes import ENCODE_FIRST, INTERLEAVED, ZERO_BUBBLE_H1, ZERO_BUBBLE_H2
from pipeline.builders.schedule import Facts, Order, SchedulePolicy
from pipeline.domain_plan import DomainPlan


def _by_its_candidates(domain: DomainPlan, facts: Facts) -> Order:
    raise AssertionError("auto is planned by its candidates")


AUTO = SchedulePolicy(
    "auto",
    _by_its_candidates,
    vpp=None,
    candidates=(
        JOINT_ZERO_BUBBLE_H1,  # the first of equals is kept: split backwards bear costs that are off
        JOINT,
        ZERO_BUBBLE_H1,
        ENCODE_FIRST,
        JOINT_ZERO_BUBBLE_H2,  # holds twice as much as those before
        ZERO_BUBBLE_H2,
        JOINT_INTERLEAVED,
        INTERLEAVED,
    ),
    lean=(ONE_F_ONE_B,),
)
