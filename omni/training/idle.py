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


def tell_idle(rank: int, steps: Sequence[tuple[Mapping[str, int], int]], peak_bytes: int) -> dict[str, Part]:
    """Return what a rank tells of steps: the nanoseconds that it idled in each for each cause, those of the
    whole step, and the most bytes that it has held.
    """
    assert rank < _MOST_RANKS
    kib = peak_bytes // _KIB
    return {
        "idle": (Op.SUM, [ns for idle, whole in steps for ns in (*(idle[of] for of in CAUSES), whole)]),
        "held": (Op.SUM, [kib]),
        "held/ends": (Op.MAX, [kib * _MOST_RANKS + rank, -kib]),
    }


def hear_idle(found: Mapping[str, Sequence[int]]) -> list[OfAllRanks]:
    """Return what all ranks told of each step, in order; of none if there was none."""
    if "idle" not in found:
        return []
    (fullest, least), (total,) = found["held/ends"], found["held"]
    most, rank = divmod(fullest, _MOST_RANKS)
    held = most * _KIB, rank, -least * _KIB, total * _KIB
    size, told = len(CAUSES) + 1, found["idle"]
    steps = (told[start : start + size] for start in range(0, len(told), size))
    shares = ({cause: ns / whole for cause, ns in zip(CAUSES, idle, strict=True)} for *idle, whole in steps)
    return [OfAllRanks(share, *held) for share in shares]
