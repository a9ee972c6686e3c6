from dataclasses import replace
from random import Random

import replica_plans
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.plan import ISSUED, Kind, Op
from pipeline.serial import serialise
from pipeline.simulator import run
from pipeline.verifier import violations


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 5), st.integers(0, 9), st.sampled_from(replica_plans.SCHEDULES))
def test_serialised_lists_run_with_a_single_queue(
    seed: int, stages: int, microbatches: int, schedule: str
) -> None:
    random = Random(seed)
    work = replica_plans.random_work(random, stages, microbatches)
    plan = replica_plans.make_plan(stages, microbatches, work, schedule)
    replica = plan.replicas[0]
    costs: dict[tuple[int, Op], int] = {}

    def compute(rank: int, op: Op) -> int:
        return costs.setdefault((rank, op), random.randint(1, 50))

    lists = serialise(replica.ops, replica.routes, compute, lambda op: 1 + (seed + op.index) % 9)
    serial = replace(replica, ops=tuple(map(tuple, lists)))
    assert list(violations(serial, plan, max(1, stages), single_fifo=True)) == []
    for before, after in zip(replica.ops, serial.ops, strict=True):
        assert sorted(map(str, before)) == sorted(map(str, after))
        assert [o for o in before if o.kind not in ISSUED] == [o for o in after if o.kind not in ISSUED]


def test_lists_with_a_queue_for_each_communicator_are_not_safe_with_one() -> None:
    plan = replica_plans.make_plan(3, 6, [], "one_f_one_b")
    found = list(violations(plan.replicas[0], plan, 3, single_fifo=True))
    assert len(found) == 1
    assert "single queue" in found[0]


def test_one_queue_costs_little_time() -> None:
    plan = replica_plans.make_plan(4, 16, [], "one_f_one_b")
    replica = plan.replicas[0]

    def compute(rank: int, op: Op) -> int:
        return 2000 if op.kind is Kind.BACKWARD else 1000

    relaxed = run(replica.ops, replica.routes, compute, lambda op: 100)
    lists = serialise(replica.ops, replica.routes, compute, lambda op: 100)
    single = run(lists, replica.routes, compute, lambda op: 100, single_fifo=True)
    assert single.makespan_ns <= 1.02 * relaxed.makespan_ns
