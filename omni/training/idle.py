"""What each step tells of all ranks: what their time went into while nothing was computed, and what memory
they have held.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from parallel.control_values import Op, Part
from pipeline.laps import CAUSES

_KIB = 1024
_MOST_RANKS = 2**20


class OfAllRanks(NamedTuple):
    """The share of all ranks' steps that went into each cause; the most bytes that the fullest rank has held,
    which one that is, and those of the emptiest and of all.
    """

    idle: dict[str, float]
    most_bytes: int
    fullest: int
    least_bytes: int
    sum_bytes: int


def tell_idle(rank: int, idle_ns: Mapping[str, int], whole_ns: int, peak_bytes: int) -> dict[str, Part]:
    """Return what a rank tells of a step: the nanoseconds that it idled for each cause, those of its whole
    step and the most bytes that it has held.
    """
    assert rank < _MOST_RANKS
    kib = peak_bytes // _KIB
    return {
        "idle": (Op.SUM, [*(idle_ns[cause] for cause in CAUSES), whole_ns]),
        "held": (Op.SUM, [kib]),
        "held/ends": (Op.MAX, [kib * _MOST_RANKS + rank, -kib]),
    }


def hear_idle(found: Mapping[str, Sequence[int]]) -> OfAllRanks:
    """Return what all ranks told."""
    *idle, whole = found["idle"]
    (fullest, least), (total,) = found["held/ends"], found["held"]
    shares = {cause: ns / whole for cause, ns in zip(CAUSES, idle, strict=True)}
    most, rank = divmod(fullest, _MOST_RANKS)
    return OfAllRanks(shares, most * _KIB, rank, -least * _KIB, total * _KIB)
