"""What other frameworks hide of their communication behind compute: for simulating them, never for planning
ours.

Ours hides what its op lists let run beside compute, and the simulator finds that by itself. A framework that
splits a layer's products and sends each piece while the next one is computed hides messages *inside* an op,
and one that reduces buckets of gradients as they become complete hides them behind the op that makes them.
Each is hidden only as far as there is compute to hide it behind, and the first piece or the last never is.
"""

from dataclasses import dataclass, replace

from parallel.costs import Axes, Talk, WorkCost, collectives_ns, talks_by_axis
from parallel.laws import Law
from parallel.work import FP32, Collective, Part

_WHOLE = 1000


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How a framework overlaps, in passes over `pass_tokens` tokens of a rank.

    Of messages of tensor parallelism at least `tensor` thousandths are waited for, and what takes longer than
    the layer's compute; of those between experts `expert` thousandths. Of gradients, of `gradient_bytes` an
    element, and of weights, what the last backward and the first forward of a step do not hide, and at least
    `bucket` thousandths. Where weights are `sharded` (FSDP; Zhao et al., 2023), every forward and every
    backward gathers them, and every backward reduces. Exchanges of shared sequences go round a ring behind
    attention.
    """

    pass_tokens: int
    tensor: int = _WHOLE
    expert: int = _WHOLE
    bucket: int = _WHOLE
    gradient_bytes: int = FP32
    sharded: bool = False


def overlapped(cost: WorkCost, part: Part, axes: Axes, overlap: Overlap) -> WorkCost:
    """Return the cost of a part, `cost` if nothing is hidden, under a framework that overlaps."""
    again = None if cost.anew is None else _overlapped(cost.anew, part, axes, overlap, anew=True)
    return replace(_overlapped(cost, part, axes, overlap), anew=again)


def _overlapped(cost: WorkCost, part: Part, axes: Axes, overlap: Overlap, anew: bool = False) -> WorkCost:
    laws = cost.laws
    forward, input_, weight = (
        _visible(talks, law, overlap)
        for talks, law in zip(
            talks_by_axis(part, axes, anew), (laws.forward, laws.input, laws.weight), strict=True
        )
    )
    sizes = {name: axis.ranks for name, axis in axes.items()}
    reduced, gathered, other = 0, 0, 0
    for one in part.reduction(sizes):
        ns = collectives_ns([_of_bytes(one, overlap)], axes)
        reduced += ns * (one.kind == "reduce_scatter")
        gathered += ns * (one.kind == "all_gather")
        other += ns * (one.kind not in ("reduce_scatter", "all_gather"))
    first_ns = laws.ns(overlap.pass_tokens, 0, None)
    last_ns = laws.input.ns(overlap.pass_tokens, 0) + laws.weight.ns(overlap.pass_tokens, 0)
    before, behind = _beyond(gathered, first_ns, overlap), _beyond(reduced, last_ns, overlap)
    if overlap.sharded:
        forward = _later(forward, before)
        input_ = _later(input_, _beyond(gathered + reduced, last_ns, overlap))
        before = behind = 0
    return replace(
        cost,
        exchanges=0,
        back_exchanges=0,
        forward_talk=forward,
        input_talk=input_,
        weight_talk=weight,
        reduce_ns=other + behind,
        gather_ns=before,
        pieces=1,
        followed=1,
    )


def _visible(talks: dict[str, Talk], law: Law, overlap: Overlap) -> Talk:
    """What is waited for of messages by axis, in passes whose compute follows a law."""
    token_fs = fixed_ns = 0
    for axis, talk in talks.items():
        share = {"tp": overlap.tensor, "ep": overlap.expert}.get(axis, _WHOLE)
        least_fs = talk.token_fs * share // _WHOLE
        beyond_fs = talk.token_fs - law.token_fs if axis == "tp" and share < _WHOLE else 0
        token_fs += max(least_fs, beyond_fs)
        fixed_ns += talk.fixed_ns * share // _WHOLE
    return Talk(token_fs, fixed_ns)


def _of_bytes(one: Collective, overlap: Overlap) -> Collective:
    """A collective of gradients in fp32, as it is in the framework's format."""
    if one.kind != "reduce_scatter":
        return one
    return replace(one, bytes=one.bytes * overlap.gradient_bytes // FP32)


def _beyond(ns: int, hiding_ns: int, overlap: Overlap) -> int:
    """What is waited for of a collective that compute hides, as long as that takes."""
    return max(ns * overlap.bucket // _WHOLE, ns - hiding_ns if overlap.bucket < _WHOLE else ns)


def _later(talk: Talk, ns: int) -> Talk:
    return replace(talk, fixed_ns=talk.fixed_ns + ns)
