"""Schedules, in three rooms: who orders compute, and how.

- here: what a schedule is (`schedule`), orders of the LLM's passes with encoders around them (`passes`) or
  just in time (`just_in_time`) or evenly between them (`uniform`), and the choice among schedules (`auto`);
- `joint`: encoder work in the gaps of such an order of passes;
- `one_queue`: lists for ranks whose communication stands in one queue, whatever ordered their compute.
"""

from pipeline.builders.auto import AUTO
from pipeline.builders.joint.order import (
    JOINT,
    JOINT_INTERLEAVED,
    JOINT_ZERO_BUBBLE_H1,
    JOINT_ZERO_BUBBLE_H1_5,
    JOINT_ZERO_BUBBLE_H2,
)
from pipeline.builders.just_in_time import DISAGGREGATED, ONE_F_ONE_B
from pipeline.builders.passes import (
    ENCODE_FIRST,
    INTERLEAVED,
    ZERO_BUBBLE_H1,
    ZERO_BUBBLE_H1_5,
    ZERO_BUBBLE_H2,
)
from pipeline.builders.schedule import (
    Builder,
    Facts,
    Order,
    SchedulePolicy,
    as_ordered,
    build_forward_only,
    encoder_batches_by_team,
    without_frozen,
)
from pipeline.builders.uniform import JOINT_UNIFORM

__all__ = [
    "AUTO",
    "DISAGGREGATED",
    "ENCODE_FIRST",
    "INTERLEAVED",
    "JOINT",
    "JOINT_INTERLEAVED",
    "JOINT_UNIFORM",
    "JOINT_ZERO_BUBBLE_H1",
    "JOINT_ZERO_BUBBLE_H1_5",
    "JOINT_ZERO_BUBBLE_H2",
    "ONE_F_ONE_B",
    "ZERO_BUBBLE_H1",
    "ZERO_BUBBLE_H1_5",
    "ZERO_BUBBLE_H2",
    "Builder",
    "Facts",
    "Order",
    "SchedulePolicy",
    "as_ordered",
    "build_forward_only",
    "encoder_batches_by_team",
    "without_frozen",
]
