"""What a rank holds of a part in every step: weights, gradients and the state of the optimizer."""

from collections import Counter
from collections.abc import Iterator

from omni.models.llm import NAME as LLM
from omni.models.llm_statement import VirtualStage
from omni.planning.workload import Workload
from parallel.axes import group_of
from parallel.buckets import REPLICAS, Buckets, by_replicas, laid_out
from parallel.work import FP32, Part

OF_PARAMETER = 2 * 8 + 4 + 4
"""Bytes that an update has of a parameter: where it begins and ends, its decay, a count of updates."""


def state_of(spec: Workload, name: str, part: Part, rank: int, *, learns: bool) -> Counter[tuple[str, str]]:
    """Return the bytes that `rank` holds of a part in every step: its weights, and gradients and optimizer
    state, with moments if it `learns` or has learnt.
    """
    held: Counter[tuple[str, str]] = Counter()
    kept = kept_of_a_weight(spec.element, spec.of_moments, learns=learns)
    held["weights", name] += part.whole_bytes if isinstance(part, VirtualStage) else 0
    frozen = sum(weight.elements for weight in part.weights() if weight.frozen)
    held["weights", name] += frozen * spec.element
    for laid, number, replicas in laid_on(spec, name, part, rank):
        held["weights", name] += laid.total * spec.element
        held["gradients", name] += laid.total * FP32
        held["optimizer", name] += laid.total // replicas * kept
        held["optimizer", name] += laid.updated(number, replicas) * OF_PARAMETER
    return held


def laid_on(spec: Workload, name: str, part: Part, rank: int) -> Iterator[tuple[Buckets, int, int]]:
    """Yield the buckets that the parameters of a part lie in which learn, with the number of `rank` among the
    replicas that share them, and how many these are.
    """
    weights = part.weights()
    groups = {
        axis: group_of(spec.arrangement, None if name == LLM else name, axis, rank)
        for axis in (REPLICAS, *by_replicas(weights))
    }
    for axis, laid in laid_out(weights, {axis: len(ranks) for axis, ranks in groups.items()}).items():
        yield laid, groups[axis].index(rank), len(groups[axis])


def kept_of_a_weight(element: int, of_moments: int, *, learns: bool) -> int:
    """Bytes that AdamW keeps of a weight of `element` bytes: one in fp32, where that is less, and two
    moments, if it `learns` or has learnt.
    """
    return (element < FP32) * FP32 + 2 * learns * of_moments
