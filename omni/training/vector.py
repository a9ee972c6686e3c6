"""What a rank tells all others in a step's vector of a coming plan and of items that it lost, and what all
hear of that. When vectors are told, and what else is in them, is written in telling.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dataloader.loader import Failure
from omni.planning.loads import Largest
from parallel.consensus import diverging
from parallel.control_values import Op, Part
from pipeline.plan import StepPlan

_PLACES = 20  # bits of a sample's number in its domain, and of a domain's
_MOST = 2**_PLACES - 1
_HALF = 32  # bits

Found = Mapping[str, tuple[int, ...]]
Lost = tuple[StepPlan, Sequence[Failure] | None]  # None: not known yet


@dataclass(frozen=True)
class OfPlan:
    """What all ranks told of their plans of a step: the widest level at which these differ, if they do, the
    largest loads of the world, and the sums of `planned_sums` over all ranks.
    """

    divergence: int | None
    largest: Largest
    planned: tuple[float, ...]


def tell_lost(coming: Sequence[Lost]) -> dict[str, Part]:
    """Return what a rank tells of the items that it lost: `coming` are the next step's plan and its failures,
    and those of the step after it, None if these are not known yet.
    """
    lost = [
        (ahead << _PLACES | plan.number) << _PLACES | sample
        for ahead, (plan, failures) in enumerate(coming)
        for sample in lost_of(plan, failures or ())
    ]
    unloaded = any(failures is None for _, failures in coming)
    return {"lost": (Op.UNION, lost), "unloaded": (Op.MAX, [unloaded])}


def hear_lost(number: int, found: Found) -> dict[int, set[tuple[int, int]]]:
    """Return by step which samples lost an item on any rank, as (domain, number in its plan), as far as that
    is known by vector `number`.
    """
    lost: dict[int, set[tuple[int, int]]] = {number + 1: set(), number + 2: set()}
    for of in found["lost"]:
        lost[number + 1 + (of >> 2 * _PLACES)].add((of >> _PLACES & _MOST, of & _MOST))
    return lost


def lost_of(plan: StepPlan, failures: Iterable[Failure]) -> list[int]:
    """The samples of a domain's plan that have one of the failures, by their numbers in it."""
    bad = {(failure.source, failure.sample) for failure in failures}
    samples = plan.domain.samples if bad else ()
    return [number for number, of in enumerate(samples) if (of.source, of.id) in bad]


def tell_plan(weighed: Sequence[int], largest: Largest, planned: Sequence[float]) -> dict[str, Part]:
    """Return what a rank tells of its plan of a step, of which all ranks' sums may take more than 64 bits."""
    return {
        "digests": (Op.SUM, weighed),
        "largest": (Op.MAX, largest.packed()),
        "planned": (Op.SUM, [half for of in planned for half in divmod(round(of), 2**_HALF)]),
    }


def hear_plan(found: Found) -> OfPlan:
    """Return what all ranks told."""
    halves = found["planned"]
    planned = tuple(float((high << _HALF) + low) for high, low in zip(halves[::2], halves[1::2], strict=True))
    return OfPlan(diverging(found["digests"]), Largest.unpacked(found["largest"]), planned)
