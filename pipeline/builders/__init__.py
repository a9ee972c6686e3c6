"""Schedules, one a file, and the policy that each is."""

from pipeline.builders.auto import AUTO
from pipeline.builders.disaggregated import DISAGGREGATED
from pipeline.builders.encode_first import ENCODE_FIRST
from pipeline.builders.interleaved import INTERLEAVED
from pipeline.builders.joint import (
    JOINT,
    JOINT_INTERLEAVED,
    JOINT_ZERO_BUBBLE_H1,
    JOINT_ZERO_BUBBLE_H2,
)
from pipeline.builders.one_f_one_b import ONE_F_ONE_B
from pipeline.builders.schedule import (
    Builder,
    Facts,
    Order,
    SchedulePolicy,
    as_ordered,
    build_forward_only,
    chunks_by_team,
    without_frozen,
)
from pipeline.builders.zero_bubble import ZERO_BUBBLE_H1, ZERO_BUBBLE_H2

__all__ = [
    "AUTO",
    "DISAGGREGATED",
    "ENCODE_FIRST",
    "INTERLEAVED",
    "JOINT",
    "JOINT_INTERLEAVED",
    "JOINT_ZERO_BUBBLE_H1",
    "JOINT_ZERO_BUBBLE_H2",
    "ONE_F_ONE_B",
    "ZERO_BUBBLE_H1",
    "ZERO_BUBBLE_H2",
    "Builder",
    "Facts",
    "Order",
    "SchedulePolicy",
    "as_ordered",
    "build_forward_only",
    "chunks_by_team",
    "without_frozen",
]
