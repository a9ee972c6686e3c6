"""Encode-first: all ranks encode before the pipeline starts, and go back through the encoders after it.

The three phases of LongCat-Flash-Omni (report, section 5), among others, with 1F1B in the middle.
"""

from pipeline.builders.one_f_one_b import one_f_one_b_passes
from pipeline.builders.schedule import Facts, Order, SchedulePolicy, encoders_around
from pipeline.domain_plan import DomainPlan


def build_encode_first(domain: DomainPlan, facts: Facts) -> Order:
    """All encoder forwards, then 1F1B, then all encoder backwards."""
    return encoders_around(one_f_one_b_passes, domain)


ENCODE_FIRST = SchedulePolicy("encode_first", build_encode_first)
