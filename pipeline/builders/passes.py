"""Orders of the LLM's passes, and the schedules that put all encoder work around them.

An order is `passes(stages, vpp, microbatches, stage)`, from the numbers of stages, of virtual stages on each
and of microbatches, and a stage, to that stage's ops. Four stages, `0` to `3`, and four microbatches under
1F1B, a digit for a forward and a letter for a backward (`a` goes back through microbatch 0):

    stage 0   0 1 2 3 . . . a . b . c . d        3 ahead of the last stage: holds 4 microbatches
    stage 1   . 0 1 2 . . a 3 b . c . d .
    stage 2   . . 0 1 . a 2 b 3 c . d . .
    stage 3   . . . 0 a 1 b 2 c 3 d . . .        (here a backward takes as long as a forward)
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial

from parallel.work import Grad
from pipeline.builders.schedule import Facts, Order, SchedulePolicy, encoder_batches_by_team
from pipeline.domain_plan import DomainPlan
from pipeline.ops import Kind, Op

Passes = Callable[[int, int, int, int], list[Op]]


def one_f_one_b_passes(stages: int, vpp: int, microbatches: int, stage: int) -> list[Op]:
    """1F1B: one forward, one backward in turn (PipeDream-Flush; Narayanan et al., 2021, section 2).

    At most `stages - stage` microbatches of one virtual stage are in flight.
    """
    assert vpp == 1, f"{vpp} virtual stages on a rank, and this schedule orders one"
    warmup = min(stages - stage - 1, microbatches)
    ops = [Op(Kind.FORWARD, m, virtual_stage=stage) for m in range(warmup)]
    for m in range(microbatches - warmup):
        ops += [Op(Kind.FORWARD, warmup + m, virtual_stage=stage), Op(Kind.BACKWARD, m, virtual_stage=stage)]
    return ops + [
        Op(Kind.BACKWARD, m, virtual_stage=stage) for m in range(microbatches - warmup, microbatches)
    ]


def interleaved_passes(stages: int, vpp: int, microbatches: int, stage: int) -> list[Op]:
    """Interleaved 1F1B: microbatches in groups of `stages`, each group through one virtual stage after the
    other (Narayanan et al., 2021, section 2.2).

    With v virtual stages on each of p ranks, each takes 1/v of a stage's time, and so does the bubble:
    (p - 1)/v times a forward and a backward of a stage. Messages between stages are v times as many. A last
    group that is not full is ordered as if it were, and what it lacks is left out on all ranks: the order of
    the others stays one that cannot hang.
    """
    groups = range(0, microbatches, stages)
    own = range(stage, stages * vpp, stages)
    forward, backward = (
        [
            Op(kind, m, virtual_stage=virtual_stage)
            for first in groups
            for virtual_stage in order
            for m in range(first, first + stages)
        ]
        for kind, order in ((Kind.FORWARD, own), (Kind.BACKWARD, own[::-1]))
    )
    ahead = min((stages - stage - 1) * (2 if vpp > 1 else 1) + (vpp - 1) * stages, len(forward))
    ops = forward[:ahead]
    for after, back in zip(forward[ahead:], backward, strict=False):
        ops += [after, back]
    ops += backward[len(forward) - ahead :]
    return [op for op in ops if op.index < microbatches]


def zero_bubble_passes(halves: int, stages: int, vpp: int, microbatches: int, stage: int) -> list[Op]:
    """Zero bubble: gradients of weights fill the bubbles of 1F1B (Qi et al., 2024, section 2): ZB-H1 where
    each stage is two `halves` of a forward ahead of the next one, ZB-H2 where it is four.

    With a forward of f, a backward for inputs of b and one for weights of w on each of p stages, the bubble
    of 1F1B is (p - 1)(f + b + w). Gradients of inputs go on to the next stage without waiting for those of
    weights, which stage s puts off: ZB-H1 those of s microbatches, so that all stages hold the activations of
    p microbatches at most, as the first one does under 1F1B. Its bubble is (p - 1)(f + b - w).

    ZB-H2 puts off twice as much: it holds 2p - 1 microbatches, and needs as many. No stage idles more than
    (p - 1)(f + b - 2w) between its first pass and its last one. But stage s begins s forwards late, and all
    stages end a step together, since one norm clips all gradients: a step has a bubble of
    (p - 1) max(f, f + b - 2w), where b <= f + w. In the paper, updates do not wait for the norm.

    With three halves, ZB-H1.5, all stages hold p + (p - 1) / 2 microbatches at most, rounded down.
    """
    assert vpp == 1, f"{vpp} virtual stages on a rank, and this schedule orders one"
    ahead = halves * (stages - stage - 1) // 2
    first, behind = min(ahead, microbatches), halves * (stages - 1) // 2 - ahead
    ops = [Op(Kind.FORWARD, m, virtual_stage=stage) for m in range(first)]
    for m in range(microbatches):
        if first + m < microbatches:
            ops.append(Op(Kind.FORWARD, first + m, virtual_stage=stage))
        ops.append(Op(Kind.BACKWARD, m, virtual_stage=stage, grad=Grad.INPUT))
        if m >= behind:
            ops.append(Op(Kind.BACKWARD, m - behind, virtual_stage=stage, grad=Grad.WEIGHT))
    left = range(max(0, microbatches - behind), microbatches)
    return ops + [Op(Kind.BACKWARD, m, virtual_stage=stage, grad=Grad.WEIGHT) for m in left]


zb_h1_passes, zb_h1_5_passes, zb_h2_passes = (partial(zero_bubble_passes, halves) for halves in (2, 3, 4))


def most_in_flight(passes: Passes, domain: DomainPlan, virtual_stage: int) -> int:
    """Return the most microbatches whose activations a virtual stage holds in such an order of passes."""
    stages = domain.num_stages
    vpp, stage = domain.num_virtual_stages // stages, virtual_stage % stages
    return _most(passes, stages, vpp, len(domain.microbatches), stage)[virtual_stage]


@cache
def _most(passes: Passes, stages: int, vpp: int, microbatches: int, stage: int) -> Counter[int]:
    return held_at_most(passes(stages, vpp, microbatches, stage))


def held_at_most(ops: Iterable[Op]) -> Counter[int]:
    """Count what microbatches each virtual stage holds at most, from a forward to all of its backward."""
    held: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for op in ops:
        if op.kind is Kind.FORWARD:
            held[op.virtual_stage] += 1
            most[op.virtual_stage] = max(most[op.virtual_stage], held[op.virtual_stage])
        elif op.kind is Kind.BACKWARD and op.makes_weight:
            held[op.virtual_stage] -= 1
    return most


def split_where_kept(ops: Sequence[Op], domain: DomainPlan) -> list[Op]:
    """Passes whose layers are all computed anew go back whole: what is made anew, all that a pass keeps
    otherwise, would stay until the gradients of weights.
    """
    anew = {m for m, batch in enumerate(domain.microbatches) if batch.anew}
    if not anew:
        return list(ops)
    return [
        replace(op, grad=Grad.BOTH) if op.index in anew and op.kind is Kind.BACKWARD else op
        for op in ops
        if op.index not in anew or op.grad is not Grad.WEIGHT
    ]


def encoders_around(passes: Passes, domain: DomainPlan, facts: Facts) -> Order:
    """All encoder forwards, then the passes of the LLM, then all encoder backwards."""
    order = []
    vpp = domain.num_virtual_stages // domain.num_stages
    for team, mine in enumerate(encoder_batches_by_team(domain)):
        stage = domain.stage(team * domain.team)
        count = len(domain.microbatches)
        own = [] if stage is None else passes(domain.num_stages, vpp, count, stage)
        between = split_where_kept(own, domain)
        order.append(
            [Op(Kind.ENCODE, c) for c, *_ in mine] + between + [Op(Kind.ENCODE_BACKWARD, c) for c, *_ in mine]
        )
    return order


def _around(name: str, passes: Passes, vpp: int | None = 1) -> SchedulePolicy:
    """The schedule of encoder work around an order of passes."""
    build, in_flight = partial(encoders_around, passes), partial(most_in_flight, passes)
    return SchedulePolicy(name, build, in_flight, vpp, at_once=True)


# The three phases of LongCat-Flash-Omni (report, section 5), among others, with 1F1B in the middle.
ENCODE_FIRST = SchedulePolicy("encode_first", partial(encoders_around, one_f_one_b_passes), at_once=True)
INTERLEAVED = _around("interleaved", interleaved_passes, vpp=None)
ZERO_BUBBLE_H1 = _around("zero_bubble_h1", zb_h1_passes)
ZERO_BUBBLE_H1_5 = replace(_around("zero_bubble_h1_5", zb_h1_5_passes), deep=True)
ZERO_BUBBLE_H2 = replace(_around("zero_bubble_h2", zb_h2_passes), deep=True, shallower=ZERO_BUBBLE_H1_5)
