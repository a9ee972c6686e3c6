from dataclasses import replace
from random import Random

import pytest
from domain_plans import SCHEDULES, Shape, Work, make_plan, one, random_shape, random_work
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.builders.one_queue.serial import serialise
from pipeline.ops import ISSUED, Kind, Op
from pipeline.simulator import run
from pipeline.verifier import violations


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**9),
    st.integers(1, 5),
    st.integers(0, 9),
    st.sampled_from(SCHEDULES),
    st.sampled_from([(0, 0), (0, 1), (1, 50)]),
)
def test_serialised_lists_run_with_a_single_queue(
    seed: int, stages: int, microbatches: int, schedule: str, times: tuple[int, int]
) -> None:
    random = Random(seed)
    shape = random_shape(random, stages)
    work = random_work(random, shape, microbatches)
    plan = make_plan(shape, microbatches, work, schedule, cuts=random)
    domain = plan.domain
    costs: dict[tuple[int, Op], int] = {}

    def compute(rank: int, op: Op) -> int:
        return costs.setdefault((rank, op), random.randint(*times))

    lists = serialise(domain, compute, lambda op: (seed + op.index) % 9)
    serial = replace(domain, ops=tuple(map(tuple, lists)))
    assert list(violations(replace(plan, domain=serial), one, single_fifo=True)) == []
    for before, after in zip(domain.ops, serial.ops, strict=True):
        assert sorted(map(str, before)) == sorted(str(replace(op, within=0)) for op in after)
        assert [o for o in before if o.kind not in ISSUED] == [o for o in after if o.kind not in ISSUED]


def test_lists_with_a_queue_for_each_communicator_are_not_safe_with_one() -> None:
    plan = make_plan(3, 6, [], "one_f_one_b")
    found = list(violations(plan, one, single_fifo=True))
    assert len(found) == 1
    assert "single queue" in found[0]


@pytest.mark.parametrize("message_ns, queue_share", [(10, 1.01), (100, 1.06)])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(4),
        Shape(4, tp=2, collective_group=2),
        Shape(4, tp=2, collective_group=2, team=2),
        Shape(4, pool=2, tp=2, collective_group=4),
    ],
    ids=["alone", "tp", "a team", "tp and pool"],
)
def test_lists_for_one_queue_cost_little_time(shape: Shape, message_ns: int, queue_share: float) -> None:
    """Where compute stands in the queue, no message goes while its ends compute: in steady state a stage in
    the middle is kept for four messages a microbatch, its cycle 3000 + 4 · 100. With a queue for each
    communicator only the six of a round trip are waited for, of four microbatches: 3000 + 6 · 100 / 4. So
    messages of a tenth of a forward cost up to 1.079, of a step with a bubble somewhat less.
    """
    domain = make_plan(shape, 16, [], "one_f_one_b").domain

    def compute(rank: int, op: Op) -> int:
        return 2000 if op.kind is Kind.BACKWARD else 1000

    relaxed = run(domain, compute, lambda op: message_ns)
    serial = replace(domain, ops=tuple(map(tuple, serialise(domain, compute, lambda op: message_ns))))
    queue_share = queue_share if shape.collective_group > 1 else 1
    assert run(serial, compute, lambda op: message_ns).makespan_ns <= queue_share * relaxed.makespan_ns
    single = run(serial, compute, lambda op: message_ns, single_fifo=True)
    assert single.makespan_ns <= queue_share * relaxed.makespan_ns
    if shape.collective_group > 1:
        assert single.makespan_ns > relaxed.makespan_ns


def test_what_ranks_do_together_can_block_a_single_queue() -> None:
    """Both ranks of a tp group send and receive in their own order, and meet in between."""
    work = [Work("image", m, (0, 1), (2,)) for m in range(4)]
    plan = make_plan(2, 4, work, "one_f_one_b")
    domain = plan.domain
    found = list(violations(plan, one, single_fifo=True))
    assert found
    assert all(text.startswith("R7 with a single queue a rank") for text in found)
    lists = serialise(domain, lambda rank, op: 10, lambda op: 1)
    serial = replace(domain, ops=tuple(map(tuple, lists)))
    assert list(violations(replace(plan, domain=serial), one, single_fifo=True)) == []
