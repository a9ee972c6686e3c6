"""Encoder work inserted evenly: an equal share of encoder work before each forward, whatever items
microbatches have.
"""

from dataclasses import replace

import pytest
from domain_plans import Shape, Work, make_plan

from pipeline.builders import JOINT_UNIFORM, Facts
from pipeline.costs import Costs
from pipeline.domain_plan import DomainPlan
from pipeline.ops import COMPUTE, Kind, Op
from pipeline.simulator import run

STAGES, MICROBATCHES, FORWARD, ENCODING = 4, 12, 600, 300


def even_costs(rank: int, op: Op) -> int:
    """Even stages and encoder batches; backwards take twice as long as forwards."""
    if op.kind is Kind.REDUCE:
        return 0
    ns = ENCODING if op.kind in (Kind.ENCODE, Kind.ENCODE_BACKWARD) else FORWARD
    return ns * (2 if op.kind in (Kind.BACKWARD, Kind.ENCODE_BACKWARD) else 1)


COSTS: Costs = (even_costs, lambda op: 0)


def domain_of(schedule, encoder_batches_of: list[int], frozen=()) -> DomainPlan:
    """So many encoder batches of each microbatch as are given, a rank each."""
    work = [
        Work("image", m, (n % STAGES,), (1,))
        for m, count in enumerate(encoder_batches_of)
        for n in range(count)
    ]
    return make_plan(Shape(STAGES), len(encoder_batches_of), work, schedule, frozen, costs=COSTS).domain


def makespan(domain: DomainPlan) -> int:
    return run(domain, *COSTS).makespan_ns


def compute_of(domain: DomainPlan, stage: int, *kinds: Kind) -> list[Op]:
    return [op for op in domain.ops[stage] if op.kind in kinds]


@pytest.mark.parametrize(
    "encoder_batches", [[4] * 12, [0, 8] * 6, [8, 0] * 6, [16, 0, 0, 0] * 3, [1, 7, 4] * 4, [0] * 6 + [8] * 6]
)
def test_every_slot_has_an_encoder_batch_whatever_microbatches_have(encoder_batches):
    domain = domain_of("joint_uniform", encoder_batches)
    for stage in range(STAGES):
        ops = compute_of(domain, stage, Kind.ENCODE, Kind.FORWARD)
        encoded = [0]
        for op in ops:
            if op.kind is Kind.ENCODE:
                encoded[-1] += 1
            else:
                encoded.append(0)
        assert sum(encoded) == MICROBATCHES, "work is dealt evenly"
        needed = [sum(encoder_batches[: m + stage + 1]) / STAGES for m in range(MICROBATCHES)]
        for m in range(MICROBATCHES):  # an encoder batch a slot, or what the first stage needs
            so_far = sum(encoded[: m + 1])
            assert max(min(m + stage + 1, MICROBATCHES), needed[m]) - 1 <= so_far
            assert so_far <= max(min(m + stage + 1, MICROBATCHES), needed[m]) + 1


def test_a_step_takes_no_more_than_slots_of_passes_and_encoder_batches():
    """(M + S - 1) slots of a forward, a backward and an encoder batch both ways; less by what fills the
    warm-up.
    """
    taken = makespan(domain_of("joint_uniform", [STAGES] * MICROBATCHES))
    assert taken <= (MICROBATCHES + STAGES - 1) * 3 * (FORWARD + ENCODING)
    assert taken < makespan(domain_of("encode_first", [STAGES] * MICROBATCHES))
    assert taken >= (MICROBATCHES + STAGES - 1) * 3 * FORWARD + MICROBATCHES * 3 * ENCODING // 2


def test_what_microbatches_differ_by_does_not_enter_the_pipeline():
    even, uneven = [4] * 12, [2, 9, 1, 14, 0, 3, 5, 1, 7, 2, 4, 0]
    alike = makespan(domain_of("joint_uniform", even))
    assert makespan(domain_of("one_f_one_b", even)) == alike
    assert makespan(domain_of("joint_uniform", uneven)) <= 1.02 * alike
    assert makespan(domain_of("one_f_one_b", uneven)) > 1.08 * alike, "a slot has its own microbatch's work"


def test_gradients_are_there_before_encoders_go_back():
    domain = domain_of("joint_uniform", [8, 0] * 6)
    for stage in range(STAGES):
        done = -1
        for op in compute_of(domain, stage, Kind.BACKWARD, Kind.ENCODE_BACKWARD):
            if op.kind is Kind.BACKWARD:
                done = op.index
            else:
                m = domain.encoder_batches[op.index].microbatches[-1]
                assert m <= done - stage or done == MICROBATCHES - 1


def test_what_fits_no_slot_comes_before_the_passes_and_goes_back_after_them():
    encoder_batches, long = [4] * 12, 22
    work = [
        Work("image", m, (n % STAGES,), (1,)) for m, count in enumerate(encoder_batches) for n in range(count)
    ]
    work.append(Work("image", 7, tuple(range(STAGES)), (8,), STAGES))  # that all stages share

    def costs(rank: int, op: Op) -> int:
        encodes = op.kind in (Kind.ENCODE, Kind.ENCODE_BACKWARD)
        return even_costs(rank, op) * (5 if encodes and op.index == long else 1)

    domain = make_plan(Shape(STAGES), 12, work, "joint_uniform", costs=(costs, lambda op: 0)).domain
    (shared,) = (n for n, batch in enumerate(domain.encoder_batches) if batch.layout.num_cp_ranks > 1)
    for stage in range(STAGES):
        fits_none = {shared, *([long] if domain.encoder_batches[long].ranks == (stage,) else [])}
        ops = compute_of(domain, stage, *COMPUTE)
        first = next(at for at, op in enumerate(ops) if op.kind is Kind.FORWARD)
        last = max(at for at, op in enumerate(ops) if op.kind is Kind.BACKWARD)
        assert fits_none <= {op.index for op in ops[:first]}
        assert fits_none <= {op.index for op in ops[last:] if op.kind is Kind.ENCODE_BACKWARD}


def test_what_is_bounded_is_just_in_time():
    free = domain_of("joint_uniform", [0] * 6 + [8] * 6)
    base = replace(free, routes=(), ops=(), bounds=(*free.bounds, ("image", 3)))
    tp_groups = {"image": [(rank,) for rank in range(STAGES)]}
    order = JOINT_UNIFORM(base, Facts(COSTS, lambda rank, op: 1, tp_groups))
    for stage, ops in enumerate(order):
        ahead = next(op.index for op in ops if op.kind is Kind.FORWARD)
        for op in ops:
            ahead = max(ahead, op.index) if op.kind is Kind.FORWARD else ahead
            if op.kind is Kind.ENCODE:
                assert base.encoder_batches[op.index].microbatches[0] <= ahead + 1 + stage


def test_frozen_encoders_do_not_go_back():
    domain = domain_of("joint_uniform", [4] * 12, frozen=("image",))
    assert not any(op.kind in (Kind.ENCODE_BACKWARD, Kind.RETURN) for ops in domain.ops for op in ops)
    slots = MICROBATCHES + STAGES - 1
    assert makespan(domain) <= slots * (3 * FORWARD + ENCODING) * 1.01
