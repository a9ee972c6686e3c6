from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_ranks import RandomRanks
from replica_plans import SCHEDULES, Work, make_plan, random_work

from parallel.costs import CostTable, WorkCost
from pipeline.plan import Kind, Op, ReplicaPlan, StepPlan
from pipeline.serial import serialise
from pipeline.simulator import run, simulate
from pipeline.verifier import verify, violations

TRAINING = tuple(name for name in SCHEDULES if name != "forward_only")


@st.composite
def plans(draw, schedules=SCHEDULES, max_stages=5, frozen=()) -> StepPlan:
    stages = draw(st.integers(1, max_stages))
    microbatches = draw(st.integers(0, 9))
    random = draw(st.randoms(use_true_random=False))
    work = random_work(random, stages, microbatches)
    return make_plan(stages, microbatches, work, draw(st.sampled_from(schedules)), frozen)


def of_kind(replica: ReplicaPlan, rank: int, kind: Kind) -> list[int]:
    return [op.index for op in replica.ops[rank] if op.kind is kind]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", range(1, 6))
def test_every_schedule_keeps_all_rules(stages, schedule):
    for microbatches in range(10):
        for seed in range(6):
            work = random_work(Random(f"{seed}/{microbatches}"), stages, microbatches)
            plan = make_plan(stages, microbatches, work, schedule)
            found = list(violations(plan.replicas[0], plan, max_in_flight=stages))
            assert not found, (microbatches, seed, found)


@settings(deadline=None, max_examples=60)
@given(plans(), st.integers(0, 1000))
def test_every_schedule_runs_on_ranks_that_interleave_at_random(plan, seed):
    ran = RandomRanks(plan.replicas[0], plan, seed).run()
    for rank, ops in enumerate(plan.replicas[0].ops):
        assert tuple(op for where, op in ran if where == rank) == ops


@settings(deadline=None, max_examples=60)
@given(plans(), st.integers(0, 1000))
def test_serialised_lists_run_on_random_ranks_with_a_single_queue(plan, seed):
    replica = plan.replicas[0]
    costs = Random(seed)
    lists = serialise(
        replica.ops, replica.routes, lambda rank, op: costs.randint(0, 50), lambda op: costs.randint(0, 20)
    )
    serial = replace(replica, ops=tuple(map(tuple, lists)))
    RandomRanks(serial, plan, seed, single_queue=True).run()


@settings(deadline=None, max_examples=60)
@given(plans())
def test_the_simulated_order_is_the_order_of_the_lists(plan):
    replica = plan.replicas[0]
    timeline = run(replica.ops, replica.routes, lambda rank, op: 5 + op.index, lambda op: 3)
    for events, ops in zip(timeline.events, replica.ops, strict=True):
        assert tuple(event.op for event in events) == ops
        clock = 0
        for event in events:
            assert event.start_ns == clock
            assert event.end_ns >= event.start_ns
            clock = event.end_ns


@settings(deadline=None, max_examples=60)
@given(plans())
def test_every_chunk_and_every_microbatch_runs_once_where_it_belongs(plan):
    replica = plan.replicas[0]
    chunks, microbatches = range(len(replica.chunks)), range(len(replica.microbatches))
    for rank in range(replica.num_stages):
        mine = [c for c in chunks if replica.chunks[c].rank == rank]
        assert sorted(of_kind(replica, rank, Kind.ENCODE)) == mine
        assert sorted(of_kind(replica, rank, Kind.ENCODE_BACKWARD)) == (mine if plan.train else [])
        assert of_kind(replica, rank, Kind.FORWARD) == list(microbatches)
        assert of_kind(replica, rank, Kind.BACKWARD) == (list(microbatches) if plan.train else [])


@settings(deadline=None, max_examples=60)
@given(plans())
def test_microbatches_without_items_ship_and_return_nothing(plan):
    replica = plan.replicas[0]
    with_items = sorted({chunk.microbatch for chunk in replica.chunks})
    for rank in range(replica.num_stages):
        assert of_kind(replica, rank, Kind.SHIP) == with_items
        assert of_kind(replica, rank, Kind.RETURN) == (with_items if plan.train else [])


@pytest.mark.parametrize("schedule", TRAINING)
@pytest.mark.parametrize("stages", range(1, 6))
def test_each_stage_holds_at_most_as_many_microbatches_as_stages_follow_it(stages, schedule):
    for microbatches in range(10):
        replica = make_plan(stages, microbatches, [], schedule).replicas[0]
        for stage, ops in enumerate(replica.ops):
            live, most = 0, 0
            for op in ops:
                live += (op.kind is Kind.FORWARD) - (op.kind is Kind.BACKWARD)
                most = max(most, live)
            assert live == 0
            assert most == min(stages - stage, microbatches)


def test_encode_first_encodes_before_the_pipeline_and_goes_back_after_it():
    work = [Work("image", m, rank, (2,)) for m in range(4) for rank in range(2)]
    for ops in make_plan(2, 4, work, "encode_first").replicas[0].ops:
        kinds = [op.kind for op in ops if op.kind in (Kind.ENCODE, Kind.FORWARD, Kind.BACKWARD)]
        assert Kind.ENCODE not in kinds[kinds.index(Kind.FORWARD) :]
        after = ops[ops.index(Op(Kind.BACKWARD, 3)) :]
        assert sum(op.kind is Kind.ENCODE_BACKWARD for op in after) == 4


def test_one_f_one_b_encodes_when_the_first_stage_needs_it_and_goes_back_when_it_is_done():
    stages, microbatches = 3, 7
    work = [Work("image", m, rank, (2,)) for m in range(microbatches) for rank in range(stages)]
    replica = make_plan(stages, microbatches, work, "one_f_one_b").replicas[0]
    for stage, ops in enumerate(replica.ops):
        forwards = backwards = 0
        for op in ops:
            forwards += op.kind is Kind.FORWARD
            backwards += op.kind is Kind.BACKWARD
            if op.kind is Kind.ENCODE:
                assert forwards == max(0, replica.chunks[op.index].microbatch - stage)
            if op.kind is Kind.ENCODE_BACKWARD:
                behind = replica.chunks[op.index].microbatch + stage
                assert backwards == min(microbatches, behind + 1)


def test_returns_are_issued_before_anything_waits_for_one():
    work = [Work("image", m, rank, (2,)) for m in range(4) for rank in range(2)]
    for ops in make_plan(2, 4, work, "encode_first").replicas[0].ops:
        first_wait = ops.index(Op(Kind.WAIT, 0, Kind.RETURN))
        assert all(ops.index(Op(Kind.RETURN, m)) < first_wait for m in range(4))


# Frozen encoders.


@settings(deadline=None, max_examples=60)
@given(plans(schedules=TRAINING, frozen=("audio", "image")))
def test_frozen_encoders_run_no_backward_and_return_nothing(plan):
    verify(plan, max_in_flight=5)
    for ops in plan.replicas[0].ops:
        kinds = {op.kind for op in ops} | {op.on for op in ops}
        assert not kinds & {Kind.ENCODE_BACKWARD, Kind.RETURN}
        assert [op.index for op in ops if op.kind is Kind.REDUCE] == [2]


@settings(deadline=None, max_examples=60)
@given(plans(schedules=TRAINING, frozen=("image",)), st.integers(0, 1000))
def test_one_frozen_encoder_leaves_the_others_backward_alone(plan, seed):
    verify(plan, max_in_flight=5)
    replica = plan.replicas[0]
    ranks = range(replica.num_stages)
    trained = [c for c, chunk in enumerate(replica.chunks) if chunk.component == "audio"]
    ran = sorted(c for rank in ranks for c in of_kind(replica, rank, Kind.ENCODE_BACKWARD))
    assert ran == trained
    for rank in ranks:
        returned = of_kind(replica, rank, Kind.RETURN)
        assert returned == sorted({replica.chunks[c].microbatch for c in trained})
    RandomRanks(replica, plan, seed).run()


# Simulated times.


def table(stages: int, forward_ns: int, encode_ns: int, message_ns: int = 0) -> CostTable:
    parts = {f"llm/{stage}": WorkCost(0, 0, forward_ns) for stage in range(stages)}
    parts |= {name: WorkCost(0, 0, encode_ns) for name in ("audio", "image")}
    return CostTable(0, parts, message_ns, 0, 0)


@pytest.mark.parametrize("stages", range(1, 6))
@pytest.mark.parametrize("microbatches", [1, 4, 9])
def test_one_f_one_b_takes_the_time_of_the_closed_form(stages, microbatches):
    replica = make_plan(stages, microbatches, [], "one_f_one_b").replicas[0]
    timeline = simulate(replica, table(stages, forward_ns=10, encode_ns=0))
    assert timeline.makespan_ns == (microbatches + stages - 1) * (10 + 20)
    assert timeline.waited_ns(0) == (stages - 1) * (10 + 20)


def test_forward_only_takes_the_time_of_the_closed_form():
    replica = make_plan(3, 5, [], "forward_only").replicas[0]
    timeline = simulate(replica, table(3, forward_ns=10, encode_ns=0, message_ns=1))
    assert timeline.makespan_ns == (5 + 3 - 1) * 10 + 2 * 1


def test_encoding_on_all_ranks_hides_half_of_the_work_on_two():
    spread = [Work("image", m, m % 2, (2,)) for m in range(4)]
    stage0 = [Work("image", m, 0, (2,)) for m in range(4)]
    spread_ns, stage0_ns = (
        simulate(make_plan(2, 4, work, "encode_first").replicas[0], table(2, 10, 100)).makespan_ns
        for work in (spread, stage0)
    )
    assert (spread_ns, stage0_ns) == (2 * 300 + 5 * 30, 4 * 300 + 5 * 30)


def test_a_route_that_never_leaves_its_rank_makes_no_other_rank_wait():
    work = [Work("image", m, 0, (2,)) for m in range(2)]
    replica = make_plan(2, 2, work, "encode_first").replicas[0]
    assert all(route.is_local for route in replica.routes)
    uneven = {"llm/0": WorkCost(0, 0, 100), "llm/1": WorkCost(0, 0, 1), "image": WorkCost(0, 0, 10)}
    timeline = simulate(replica, CostTable(0, uneven, 0, 0, 0))
    waits = [event for event in timeline.events[1] if event.op.on in (Kind.SHIP, Kind.RETURN)]
    assert len(waits) == 4
    assert [event.end_ns - event.start_ns for event in waits] == [0, 0, 0, 0]
