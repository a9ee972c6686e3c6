from dataclasses import replace
from random import Random

import pytest
from domain_plans import COMPONENTS, SCHEDULES, Shape, Work, make_plan, one, random_shape, random_work
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_ranks import RandomRanks
from work_costs import work_cost

from parallel.cluster import Link, Links
from parallel.costs import CostTable, Talk
from pipeline.builders.one_queue.serial import serialise
from pipeline.costs import simulate, spent_on
from pipeline.domain_plan import DomainPlan
from pipeline.drawing import rows_of
from pipeline.laps import WEIGHTS
from pipeline.ops import COMPUTE, POINT_TO_POINT, Kind, Op
from pipeline.plan import StepPlan
from pipeline.simulator import Timeline, run
from pipeline.verifier import verify, violations

TRAINING = tuple(name for name in SCHEDULES if name != "forward_only")


@st.composite
def plans(draw, schedules=SCHEDULES, max_stages=5, frozen=()) -> StepPlan:
    microbatches = draw(st.integers(0, 9))
    random = draw(st.randoms(use_true_random=False))
    shape = random_shape(random, max_stages)
    work = random_work(random, shape, microbatches)
    return make_plan(shape, microbatches, work, draw(st.sampled_from(schedules)), frozen, cuts=random)


FREE = Link(0, 1)


def of_kind(domain: DomainPlan, rank: int, kind: Kind) -> list[int]:
    return [op.index for op in domain.ops[rank] if op.kind is kind]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", range(1, 6))
def test_every_schedule_keeps_all_rules(stages, schedule):
    for microbatches in (0, 1, 2, 3, 4, 6, 9):
        for seed in range(8):
            random = Random(f"{seed}/{microbatches}")
            shape = Shape(stages) if seed % 4 == 0 else random_shape(random, stages)
            work = random_work(random, shape, microbatches)
            plan = make_plan(shape, microbatches, work, schedule, cuts=random)
            found = list(violations(plan, one))
            assert not found, (shape, microbatches, seed, found)


def test_random_plans_hold_every_kind_of_domain():
    seen = set()
    for seed in range(200):
        random = Random(seed)
        shape = random_shape(random, 4)
        plan = make_plan(shape, 4, random_work(random, shape, 4), "encode_first", cuts=random)
        domain = plan.domain
        seen.add(("stages with rows", len({domain.stage(r) for r in range(shape.llm) if domain.points(r)})))
        seen |= {
            ("stage size", shape.stage_size),
            ("collective group", shape.collective_group),
            ("beside", shape.beside > 0),
        }
        for encoder_batch in domain.encoder_batches:
            seen.add(("tp groups", encoder_batch.layout.num_cp_ranks, encoder_batch.tp))
            seen.add(
                ("stages of an encoder batch", len({domain.stage(rank) for rank in encoder_batch.ranks}))
            )
            seen |= {("shards", len(shards)) for shards in encoder_batch.layout.shards}
        seen |= {("pieces", len(s)) for batch in domain.microbatches for s in batch.layout.shards}
    assert seen >= {("stage size", n) for n in (1, 2, 3, 4)} | {("collective group", n) for n in (1, 2, 3, 4)}
    assert seen >= {
        ("beside", True),
        ("stages of an encoder batch", 2),
        ("stages of an encoder batch", 3),
        ("shards", 2),
    }
    assert seen >= {("pieces", n) for n in (1, 2, 3)} | {("stages with rows", n) for n in (1, 2)}
    assert seen >= {
        ("tp groups", num_tp_groups, tp)
        for num_tp_groups, tp in ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1))
    }


@settings(deadline=None, max_examples=80)
@given(plans(), st.integers(0, 1000))
def test_every_schedule_runs_on_ranks_that_interleave_at_random(plan, seed):
    ran = RandomRanks(plan, seed).run()
    for rank, ops in enumerate(plan.domain.ops):
        assert tuple(op for where, op in ran if where == rank) == ops


@settings(deadline=None, max_examples=80)
@given(plans(), st.integers(0, 1000))
def test_serialised_lists_run_on_random_ranks_with_a_single_queue(plan, seed):
    domain = plan.domain
    costs = Random(seed)
    lists = serialise(domain, lambda rank, op: costs.randint(0, 50), lambda op: costs.randint(0, 20))
    serial = replace(domain, ops=tuple(map(tuple, lists)))
    RandomRanks(replace(plan, domain=serial), seed, single_queue=True).run()


@settings(deadline=None, max_examples=60)
@given(plans())
def test_the_simulated_order_is_the_order_of_the_lists(plan):
    domain = plan.domain
    timeline = run(domain, lambda rank, op: 5 + op.index, lambda op: 3)
    for events, ops in zip(timeline.events, domain.ops, strict=True):
        assert tuple(event.op for event in events) == ops
        clock = 0
        for event in events:
            assert event.start_ns == clock
            assert event.end_ns >= event.start_ns
            clock = event.end_ns


@settings(deadline=None, max_examples=60)
@given(plans())
def test_every_encoder_batch_and_every_microbatch_runs_once_where_it_belongs(plan):
    domain = plan.domain
    encoder_batches, microbatches = range(len(domain.encoder_batches)), range(len(domain.microbatches))
    for rank in range(domain.num_ranks):
        mine = [c for c in encoder_batches if rank in domain.encoder_batches[c].ranks]
        passes = list(microbatches) if domain.stage(rank) is not None else []
        assert sorted(of_kind(domain, rank, Kind.ENCODE)) == mine
        assert sorted(of_kind(domain, rank, Kind.ENCODE_BACKWARD)) == (mine if plan.train else [])
        assert of_kind(domain, rank, Kind.FORWARD) == passes
        backward = [op for op in domain.ops[rank] if op.kind is Kind.BACKWARD]
        for half in (
            [op.index for op in backward if op.makes_input],
            [op.index for op in backward if op.makes_weight],
        ):
            assert sorted(half) == (passes if plan.train else [])


@settings(deadline=None, max_examples=60)
@given(plans())
def test_microbatches_without_items_ship_and_return_nothing(plan):
    domain = plan.domain
    with_items = sorted({m for encoder_batch in domain.encoder_batches for m in encoder_batch.microbatches})
    for rank in range(domain.num_ranks):
        assert of_kind(domain, rank, Kind.SHIP) == with_items
        assert sorted(of_kind(domain, rank, Kind.RETURN)) == (with_items if plan.train else [])


@settings(deadline=None, max_examples=60)
@given(plans())
def test_domain_ranks_know_where_they_stand(plan):
    domain = plan.domain
    places = [(domain.stage(rank), domain.cp_rank(rank)) for rank in range(domain.num_ranks)]
    expected = [
        (stage, cp_rank)
        for stage in range(domain.num_stages)
        for cp_rank in range(domain.pool)
        for _ in range(domain.tp)
    ]
    assert places[: len(expected)] == expected
    assert [stage for stage, _ in places[len(expected) :]] == [None] * (domain.num_ranks - domain.llm_size)
    ranks = range(domain.num_ranks)
    assert sum(map(domain.is_first, ranks)) == sum(map(domain.is_last, ranks)) == domain.stage_size
    reporting = [rank for rank in ranks if domain.reports(rank)]
    assert [domain.cp_rank(rank) for rank in reporting] == list(range(domain.pool))
    assert all(domain.is_last(rank) for rank in reporting)


@pytest.mark.parametrize("schedule", ["encode_first", "one_f_one_b", "interleaved"])
@pytest.mark.parametrize("stages", range(1, 6))
def test_each_stage_holds_at_most_as_many_microbatches_as_stages_follow_it(stages, schedule):
    for microbatches in range(10):
        domain = make_plan(stages, microbatches, [], schedule).domain
        for stage, ops in enumerate(domain.ops):
            live, most = 0, 0
            for op in ops:
                live += (op.kind is Kind.FORWARD) - (op.kind is Kind.BACKWARD)
                most = max(most, live)
            assert live == 0
            assert most == min(stages - stage, microbatches)


def test_encode_first_encodes_before_the_pipeline_and_goes_back_after_it():
    work = [Work("image", m, (rank,), (2,)) for m in range(4) for rank in range(2)]
    for stage, ops in enumerate(make_plan(2, 4, work, "encode_first").domain.ops):
        kinds = [op.kind for op in ops if op.kind in (Kind.ENCODE, Kind.FORWARD, Kind.BACKWARD)]
        assert Kind.ENCODE not in kinds[kinds.index(Kind.FORWARD) :]
        after = ops[ops.index(Op(Kind.BACKWARD, 3, virtual_stage=stage)) :]
        assert sum(op.kind is Kind.ENCODE_BACKWARD for op in after) == 4


def test_one_f_one_b_encodes_when_the_first_stage_needs_it_and_goes_back_when_it_is_done():
    stages, microbatches = 3, 7
    work = [Work("image", m, (rank,), (2,)) for m in range(microbatches) for rank in range(stages)]
    domain = make_plan(stages, microbatches, work, "one_f_one_b").domain
    for stage, ops in enumerate(domain.ops):
        forwards = backwards = 0
        for op in ops:
            forwards += op.kind is Kind.FORWARD
            backwards += op.kind is Kind.BACKWARD
            if op.kind is Kind.ENCODE:
                assert forwards == max(0, domain.encoder_batches[op.index].microbatches[0] - stage)
            if op.kind is Kind.ENCODE_BACKWARD:
                behind = domain.encoder_batches[op.index].microbatches[0] + stage
                assert backwards == min(microbatches, behind + 1)


def test_returns_are_issued_before_anything_waits_for_one():
    work = [Work("image", m, (rank,), (2,)) for m in range(4) for rank in range(2)]
    for ops in make_plan(2, 4, work, "encode_first").domain.ops:
        first_wait = ops.index(Op(Kind.WAIT, 0, Kind.RETURN))
        assert all(ops.index(Op(Kind.RETURN, m)) < first_wait for m in range(4))


# Frozen encoders.


@settings(deadline=None, max_examples=60)
@given(plans(schedules=TRAINING, frozen=("audio", "image")))
def test_frozen_encoders_run_no_backward_and_return_nothing(plan):
    verify(plan, one)
    domain = plan.domain
    for rank, ops in enumerate(domain.ops):
        kinds = {op.kind for op in ops} | {op.on for op in ops}
        assert not kinds & {Kind.ENCODE_BACKWARD, Kind.RETURN}
        assert of_kind(domain, rank, Kind.REDUCE) == ([] if domain.stage(rank) is None else [2])


@settings(deadline=None, max_examples=60)
@given(plans(schedules=TRAINING, frozen=("image",)), st.integers(0, 1000))
def test_one_frozen_encoder_leaves_the_others_backward_alone(plan, seed):
    verify(plan, one)
    domain = plan.domain
    ranks = range(domain.num_ranks)
    trained = [
        c for c, encoder_batch in enumerate(domain.encoder_batches) if encoder_batch.component == "audio"
    ]
    for rank in ranks:
        ran = sorted(of_kind(domain, rank, Kind.ENCODE_BACKWARD))
        assert ran == [c for c in trained if rank in domain.encoder_batches[c].ranks]
    returned = [of_kind(domain, rank, Kind.RETURN) for rank in ranks]
    assert sorted(returned[0]) == sorted({m for c in trained for m in domain.encoder_batches[c].microbatches})
    assert all(of_rank == returned[0] for of_rank in returned)
    RandomRanks(plan, seed).run()


# Simulated times.


def table(stages: int, forward_ns: int, encode_ns: int, message_ns: int = 0) -> CostTable:
    parts = {f"llm/{stage}": work_cost(0, 0, forward_ns) for stage in range(stages)}
    parts |= {name: work_cost(0, 0, encode_ns) for name in ("audio", "image")}
    return CostTable(0, parts, Links(FREE, Link(message_ns, 1)), 0, COMPONENTS)


@pytest.mark.parametrize("stages", range(1, 6))
@pytest.mark.parametrize("microbatches", [1, 4, 9])
def test_one_f_one_b_takes_the_time_of_the_closed_form(stages, microbatches):
    domain = make_plan(stages, microbatches, [], "one_f_one_b").domain
    timeline = simulate(domain, table(stages, forward_ns=10, encode_ns=0))
    assert timeline.makespan_ns == (microbatches + stages - 1) * (10 + 20)
    assert timeline.waited_ns(0) == (stages - 1) * (10 + 20)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "encode_first", "zero_bubble_h1"])
@pytest.mark.parametrize("stages", [1, 3])
def test_the_backward_of_a_frozen_llm_takes_what_gradients_of_its_inputs_do(stages, schedule):
    domain = make_plan(stages, 5, [], schedule, frozen=("llm",)).domain
    timeline = simulate(domain, table(stages, forward_ns=10, encode_ns=0))
    assert timeline.makespan_ns == (5 + stages - 1) * (10 + 10)


def test_forward_only_takes_the_time_of_the_closed_form():
    domain = make_plan(3, 5, [], "forward_only").domain
    timeline = simulate(domain, table(3, forward_ns=10, encode_ns=0, message_ns=1))
    assert timeline.makespan_ns == (5 + 3 - 1) * 10 + 2 * 1


def test_encoding_on_all_ranks_hides_half_of_the_work_on_two():
    spread = [Work("image", m, (m % 2,), (2,)) for m in range(4)]
    stage0 = [Work("image", m, (0,), (2,)) for m in range(4)]
    spread_ns, stage0_ns = (
        simulate(make_plan(2, 4, work, "encode_first").domain, table(2, 10, 100)).makespan_ns
        for work in (spread, stage0)
    )
    assert (spread_ns, stage0_ns) == (2 * 300 + 5 * 30, 4 * 300 + 5 * 30)


def test_a_route_that_never_leaves_its_rank_makes_no_other_rank_wait():
    work = [Work("image", m, (0,), (2,)) for m in range(2)]
    domain = make_plan(2, 2, work, "encode_first").domain
    assert all(route.is_local for route in domain.routes)
    uneven = {"llm/0": work_cost(0, 0, 100), "llm/1": work_cost(0, 0, 1), "image": work_cost(0, 0, 10)}
    uneven["audio"] = work_cost(0, 0, 0)
    timeline = simulate(domain, CostTable(0, uneven, Links(FREE, FREE), 0, COMPONENTS))
    waits = [event for event in timeline.events[1] if event.op.on in (Kind.SHIP, Kind.RETURN)]
    assert len(waits) == 4
    assert [event.end_ns - event.start_ns for event in waits] == [0, 0, 0, 0]


# Ranks that work together.


def ends_of(timeline: Timeline, rank: int, kind: Kind) -> list[int]:
    return [event.end_ns for event in timeline.events[rank] if event.op.kind is kind]


@pytest.mark.parametrize("collective_group, fast", [(1, 1), (2, 10)])
def test_a_collective_group_begins_together_and_takes_the_time_of_its_slowest_rank(collective_group, fast):
    domain = make_plan(
        Shape(stages=1, pool=2, collective_group=collective_group), 4, [], "forward_only"
    ).domain
    timeline = run(domain, lambda rank, op: 10 if rank == op.index % 2 else 1, lambda op: 0)
    # Each rank is slow in every other microbatch: alone they take turns to be late, together they never gain.
    assert timeline.makespan_ns == (4 * 10 if collective_group == 2 else 2 * 10 + 2 * 1)
    assert ends_of(timeline, 0, Kind.FORWARD)[1] == 10 + fast


def test_ranks_that_encode_together_wait_for_each_other():
    work = [Work("image", 0, (0,), (2,)), Work("image", 0, (0, 1), (2,)), Work("image", 0, (1, 2), (2,))]
    domain = make_plan(Shape(stages=1, pool=3), 1, work, "forward_only").domain
    timeline = run(domain, lambda rank, op: 7, lambda op: 0)
    assert [ends_of(timeline, rank, Kind.ENCODE) for rank in range(3)] == [[7, 14], [14, 21], [21]]


@settings(deadline=None, max_examples=60)
@given(plans(), st.integers(0, 1000))
def test_ranks_of_a_collective_group_end_every_op_at_the_same_time(plan, seed):
    domain = plan.domain
    costs = Random(seed)
    timeline = run(domain, lambda rank, op: costs.randint(1, 50), lambda op: 3)
    ends = {(rank, event.op): event.end_ns for rank, events in enumerate(timeline.events) for event in events}
    for (rank, op), end in ends.items():
        if op.kind in COMPUTE:
            assert [ends[other, op] for other in domain.collective_group_of(op, rank)] == [end] * len(
                domain.collective_group_of(op, rank)
            )


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2), (1, 2), (1, 2, 3)])
@pytest.mark.parametrize("microbatches", range(1, 9))
def test_ranks_of_several_stages_that_encode_together_keep_one_order(microbatches, ranks):
    # Each by the time of its own stage, they would wait for one another in a circle from three microbatches.
    work = [Work("image", m, ranks, (2,)) for m in range(microbatches)]
    work += [Work("audio", m, (rank,), (1,)) for m in range(microbatches) for rank in range(4)]
    plan = make_plan(4, microbatches, work, "one_f_one_b")
    domain = plan.domain
    assert not list(violations(plan, one))
    RandomRanks(plan, seed=microbatches).run()
    for rank in ranks:
        for m in range(microbatches):
            before = domain.ops[rank][: domain.ops[rank].index(Op(Kind.ENCODE_BACKWARD, m))]
            # The latest of these stages is the first to have gradients without waiting.
            done = sum(op.kind is Kind.BACKWARD for op in before)
            assert done == min(microbatches, m + ranks[-1] + 1)


def test_encoder_batches_of_one_stage_go_back_as_soon_as_without_partners():
    alone = [Work("image", m, (stage,), (2,)) for m in range(6) for stage in range(3)]
    paired = [Work("image", m, (2 * s, 2 * s + 1), (2,), num_tp_groups=2) for m in range(6) for s in range(3)]
    one = make_plan(3, 6, alone, "one_f_one_b").domain
    two = make_plan(Shape(stages=3, pool=2), 6, paired, "one_f_one_b").domain
    for stage in range(3):
        assert two.ops[2 * stage] == two.ops[2 * stage + 1] == one.ops[stage]


def test_encoder_batches_may_stand_in_any_order_in_the_plan():
    work = [Work("image", m, (0, 1), (2,)) for m in (3, 1, 0, 2, 1)]
    for schedule in TRAINING:
        domain = make_plan(2, 4, work, schedule).domain
        for ops in domain.ops:
            encoded = [
                domain.encoder_batches[op.index].microbatches[0] for op in ops if op.kind is Kind.ENCODE
            ]
            assert encoded == sorted(encoded)


@settings(deadline=None, max_examples=60)
# The one left out bounds what ranks beside the LLM hold.
@given(plans(schedules=tuple(name for name in TRAINING if name != "disaggregated")))
def test_ranks_beside_the_llm_encode_all_then_go_back(plan):
    domain = plan.domain
    # Encoders live on ranks of the LLM or beside it: no placement has one on both.
    homes = (home for number, home in enumerate(domain.homes) if number != domain.llm)
    assume(not any(first < domain.llm_size < stop for first, stop in homes))
    for rank in range(domain.llm_size, domain.num_ranks):
        kinds = [op.kind for op in domain.ops[rank] if op.kind in COMPUTE]
        assert kinds == sorted(kinds, key=[Kind.ENCODE, Kind.ENCODE_BACKWARD].index)
        assert not {op.kind for op in domain.ops[rank]} & POINT_TO_POINT


def test_a_pass_begins_when_its_weights_have_arrived():
    work = [Work("image", m, (0,), (2,)) for m in range(2)]
    domain = make_plan(2, 2, work, "encode_first").domain
    gathered = {"image": 30, "audio": 0, "llm/0": 250, "llm/1": 500}
    parts = {name: work_cost(0, 0, 100, gather_ns=ns) for name, ns in gathered.items()}
    table_ = CostTable(0, parts, Links(FREE, FREE), 0, COMPONENTS)
    timeline = simulate(domain, table_)
    # Encoders' first. The first rank encodes from 30 to 230, and its virtual stage is there at 280; the
    # second has the first's output at 380 and its own weights at 530.
    firsts = [next(event for event in events if event.op.kind is Kind.FORWARD) for events in timeline.events]
    assert [event.end_ns for event in firsts] == [380, 630]
    assert [sum(waited.values()) for waited in timeline.weights_ns] == [30 + 50, 150]
    for rank, track in enumerate(rows_of(timeline, ["first", "second"])):
        spent = spent_on(timeline, table_, rank)
        waits = [bar for bar in track.spans if bar.cause == WEIGHTS]
        assert spent.weights_ns == sum(bar.end_ns - bar.start_ns for bar in waits) == [80, 150][rank]
        assert sum(vars(spent).values()) == timeline.makespan_ns


@pytest.mark.parametrize("shape", [Shape(1), Shape(1, pool=2, collective_group=2)])
@pytest.mark.parametrize("single_fifo", [False, True])
def test_a_reduction_behind_the_last_backward_leaves_its_last_pieces(shape, single_fifo):
    def step(reduce_ns: int, pieces: int, frozen: tuple[str, ...]) -> int:
        domain = make_plan(shape, 3, [Work("image", 2, (0,), (2,))], "encode_first", frozen).domain
        cost = work_cost(0, 0, 100, reduce_ns=reduce_ns, pieces=pieces, forward_talk=Talk(fixed_ns=7))
        parts = {"llm/0": cost, "image": work_cost(0, 0, 0), "audio": work_cost(0, 0, 0)}
        table_ = CostTable(0, parts, Links(FREE, FREE), 0, COMPONENTS)
        return simulate(domain, table_, single_fifo).makespan_ns

    encoders = ("audio", "image")
    free = step(0, 10, encoders)
    # Two of ten pieces, or what a backward of 200 does not hide of eight; of one piece or two all.
    assert step(50, 10, encoders) == free + 10
    assert step(1000, 10, encoders) == free + 1000 - 160
    assert step(50, 2, encoders) == step(50, 1, encoders) == free + 50
    # Rows on their way back stand between the two: nothing is hidden.
    assert step(50, 10, ()) == free + 50


@pytest.mark.parametrize("shape", [Shape(1), Shape(1, tp=2, collective_group=2)])
@pytest.mark.parametrize("single_fifo", [False, True])
def test_an_encoder_is_reduced_behind_its_own_last_backward(shape, single_fifo):
    def step(reduce_ns: int, pieces: int, last: str = "image") -> int:
        work = [Work(name, 2, (0,), (2,)) for name in ("audio", "image")]
        domain = make_plan(shape, 3, work, "encode_first", (*{"audio", "image"} - {last},)).domain
        costs = {
            last: work_cost(0, 0, 100, reduce_ns=reduce_ns, pieces=pieces, forward_talk=Talk(fixed_ns=7))
        }
        parts = {name: work_cost(0, 0, 100) for name in ("llm/0", "audio", "image")} | costs
        table_ = CostTable(0, parts, Links(FREE, FREE), 0, COMPONENTS)
        return simulate(domain, table_, single_fifo).makespan_ns

    free = step(0, 10)
    assert step(50, 10) == free + 10
    assert step(1000, 10) == free + 1000 - 160
    assert step(50, 1) == free + 50
    assert step(50, 10, "audio") == step(0, 10, "audio") + 10


@pytest.mark.parametrize("issue_ns", [0, 3])
def test_the_time_of_a_step_is_compute_what_layers_say_reduction_and_waiting(issue_ns):
    work = [Work("image", m, (0, 1), (2,)) for m in range(3)]
    domain = make_plan(Shape(stages=2, tp=2, collective_group=2), 3, work, "encode_first").domain
    talk = Talk(fixed_ns=7)
    cost = work_cost(
        0, 0, 100, forward_talk=talk, input_talk=talk, weight_talk=Talk(fixed_ns=2), reduce_ns=50
    )
    parts = dict.fromkeys(("llm/0", "llm/1", "image", "audio"), cost)
    table_ = CostTable(0, parts, Links(FREE, Link(10, 1)), 0, COMPONENTS, None, issue_ns)
    timeline = simulate(domain, table_)
    for rank in range(4):
        spent = spent_on(timeline, table_, rank)
        assert spent.issuing_ns == issue_ns * sum(op.kind not in COMPUTE for op in domain.ops_of(rank))
        passes = 3 + (3 if rank < 2 else 0)  # microbatches, and encoder batches of the first two ranks
        assert spent.compute_ns == passes * (100 + 200)
        assert spent.layers_ns == passes * (7 + 7 + 2)
        reducing = 50 * sum(op.kind is Kind.REDUCE for op in domain.ops[rank])
        # Less, if reductions go on while the rank issues others and takes them in.
        assert reducing - 6 * issue_ns <= spent.reducing_ns <= reducing
        # A message takes 10 ns, its ends too, and rows no time. No wait is shorter for it than it is long.
        waits = {op.on: 0 for op in domain.ops_of(rank) if op.kind is Kind.WAIT}
        for event in timeline.events[rank // domain.team]:
            if event.op.kind is Kind.WAIT:
                waits[event.op.on] += min(10 - 2 * issue_ns, event.end_ns - event.start_ns - issue_ns)
        assert spent.messages_ns == sum(ns for on, ns in waits.items() if on in POINT_TO_POINT)
        assert spent.messages_ns > 0
        assert spent.boundary_ns == 0
        assert spent.idle_ns >= 0
        assert sum(vars(spent).values()) == timeline.makespan_ns
