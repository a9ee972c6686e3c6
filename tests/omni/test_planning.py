from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloader.format import DataError
from dataloader.stream import SourceSpec, Stream
from dataloader.tokens import ItemMeta, SampleMeta, length
from omni.training.planner import Budget, Planner, Policies
from parallel.costs import CostTable, WorkCost
from pipeline.builders import BUILDERS
from pipeline.plan import Kind, ReplicaPlan, StepPlan
from pipeline.policies import PLACEMENTS
from pipeline.verifier import verify

POLICIES = [
    Policies(balance, placement, schedule)
    for balance in ("none", "lpt")
    for placement in sorted(PLACEMENTS)
    for schedule in sorted(BUILDERS)
]
SOURCES = {"pairs": SourceSpec(40, 8, 2), "text": SourceSpec(25, 8, 1)}
COMPONENTS = ("ear", "eye", "llm")
BUDGET = Budget(microbatch_tokens=40, step_tokens=150, step_samples=None, on_long="error")


def meta_of(source: str, sample: int) -> SampleMeta:
    random = Random(f"{source}/{sample}")
    text = random.randint(0, 12)
    items = []
    if source == "pairs":
        for at in sorted(random.randint(0, text) for _ in range(random.randint(0, 3))):
            rows = random.randint(1, 5)
            items.append(ItemMeta(random.choice(("image", "audio")), 4 * rows, rows, at, ()))
    return SampleMeta(sample, source, text, tuple(items), 100)


def table(stages: int) -> CostTable:
    parts = {f"llm/{stage}": WorkCost(2_000_000, 1_000, 10) for stage in range(stages)}
    parts |= {"eye": WorkCost(1_000_000, 3_000, 10), "ear": WorkCost(500_000, 100, 10)}
    return CostTable(4, parts, 100, 1, 64)


def planner(replicas: int = 1, stages: int = 1, **changes: object) -> Planner:
    return replace(
        Planner(
            stream=Stream(SOURCES, seed=3),
            metas=meta_of,
            encoders={"image": "eye", "audio": "ear"},
            components=COMPONENTS,
            num_replicas=replicas,
            num_stages=stages,
            policies=Policies("lpt", "colocated", "encode_first"),
            budget=BUDGET,
            table=table(stages),
            frozen=lambda step: (),
        ),
        **changes,
    )


def trained_on(plan: StepPlan) -> Counter:
    """The samples that microbatches really contain."""
    return Counter(
        (plan.samples[i].source, plan.samples[i].id)
        for replica in plan.replicas
        for batch in replica.microbatches
        for i in batch.samples
    )


def kinds_of_ops(plan: StepPlan) -> set[Kind]:
    return {op.kind for replica in plan.replicas for ops in replica.ops for op in ops}


def packed_tokens(plan: StepPlan, replica: ReplicaPlan, microbatch: int, budget: Budget) -> list:
    """What stands at each position of a pack: (sample, item) on the rows of an item, else None."""
    out: list = []
    for i in replica.microbatches[microbatch].samples:
        meta = planner(budget=budget).meta(plan.samples[i].source, plan.samples[i].id)
        out.append(None)  # bos
        for text in range(meta.text_tokens + 1):
            for number, item in enumerate(meta.items):
                if item.at == text:
                    out += [(i, number)] * item.rows + [None]
            if text < meta.text_tokens:
                out.append(None)
    return out


settings_of_planners = st.builds(
    dict,
    replicas=st.integers(1, 4),
    stages=st.integers(1, 3),
    policies=st.sampled_from(POLICIES),
    single_queue=st.booleans(),
    budget=st.builds(
        Budget,
        microbatch_tokens=st.integers(36, 80),
        step_tokens=st.integers(1, 300),
        step_samples=st.none(),
        on_long=st.sampled_from(("drop", "truncate")),
    )
    | st.builds(
        Budget,
        microbatch_tokens=st.integers(8, 80),
        step_tokens=st.none(),
        step_samples=st.integers(1, 20),
        on_long=st.sampled_from(("drop", "truncate")),
    ),
)


@settings(deadline=None, max_examples=60)
@given(settings_of_planners, st.integers(0, 500))
def test_every_sample_of_the_step_is_in_exactly_one_microbatch(chosen, cursor):
    plan = planner(**chosen).next_step(5, cursor)
    places = Counter(i for replica in plan.replicas for batch in replica.microbatches for i in batch.samples)
    assert places == Counter(range(len(plan.samples)))
    assert len(plan.replicas) == chosen["replicas"]
    assert (plan.step, plan.cursor, plan.cost_table) == (5, cursor, 4)


@settings(deadline=None, max_examples=60)
@given(settings_of_planners, st.integers(0, 500))
def test_no_microbatch_exceeds_its_budget(chosen, cursor):
    plan = planner(**chosen).next_step(5, cursor)
    for replica in plan.replicas:
        for batch in replica.microbatches:
            assert 0 < batch.tokens <= chosen["budget"].microbatch_tokens
            assert batch.layout.lengths == tuple(plan.samples[i].length for i in batch.samples)
            assert batch.squares == sum(plan.samples[i].length ** 2 for i in batch.samples)


@settings(deadline=None, max_examples=60)
@given(settings_of_planners, st.integers(0, 500))
def test_items_start_where_their_rows_stand(chosen, cursor):
    plan = planner(**chosen).next_step(5, cursor)
    for replica in plan.replicas:
        for m, batch in enumerate(replica.microbatches):
            tokens = packed_tokens(plan, replica, m, chosen["budget"])
            assert len(tokens) == batch.tokens
            items = [item for item in replica.items if item.microbatch == m]
            for item in items:
                rows = tokens[item.start : item.start + item.rows]
                assert rows == [(item.sample, item.index)] * item.rows
            assert sum(item.rows for item in items) == sum(token is not None for token in tokens)


@settings(deadline=None, max_examples=60)
@given(settings_of_planners, st.integers(0, 500))
def test_chunks_hold_every_item_once_and_add_up(chosen, cursor):
    plan = planner(**chosen).next_step(5, cursor)
    for replica in plan.replicas:
        items = replica.items
        held = [number for chunk in replica.chunks for number in chunk.items]
        assert sorted(held) == list(range(len(items)))
        for chunk in replica.chunks:
            assert {(items[i].component, items[i].microbatch) for i in chunk.items} == {
                (chunk.component, chunk.microbatch)
            }
            assert chunk.tokens == sum(items[i].tokens for i in chunk.items)
            assert chunk.squares == sum(items[i].tokens ** 2 for i in chunk.items)
            assert chunk.rows == sum(items[i].rows for i in chunk.items)
            assert 0 <= chunk.rank < chosen["stages"]
        used = {chunk.rank for chunk in replica.chunks}
        assert chosen["policies"].placement != "stage0" or used <= {0}


@settings(deadline=None, max_examples=60)
@given(settings_of_planners, st.integers(0, 500))
def test_routes_take_each_row_from_its_encoder_to_its_position(chosen, cursor):
    plan = planner(**chosen).next_step(5, cursor)
    for replica in plan.replicas:
        for m in range(len(replica.microbatches)):
            # The rows of a rank lie chunk by chunk, item by item; the first stage holds the whole pack.
            wanted, filled = set(), Counter()
            for chunk in replica.chunks:
                for number in chunk.items if chunk.microbatch == m else ():
                    for i in range(replica.items[number].rows):
                        wanted.add((chunk.rank, filled[chunk.rank], 0, replica.items[number].start + i))
                        filled[chunk.rank] += 1
            route = replica.routes[m]
            assert (route is None) == (not wanted)
            if route is not None:
                moves = [
                    (s.source, s.source_start + i, s.destination, s.destination_start + i)
                    for s in route.segments
                    for i in range(s.length)
                ]
                assert len(moves) == len(wanted)
                assert set(moves) == wanted


@settings(deadline=None, max_examples=40)
@given(settings_of_planners, st.integers(0, 500))
def test_every_plan_passes_the_verifier(chosen, cursor):
    plan = planner(**chosen).next_step(5, cursor)
    verify(plan, max_in_flight=chosen["stages"], single_fifo=chosen["single_queue"])


# The same samples, whoever computes them.


@pytest.mark.parametrize("on_long", ["drop", "truncate"])
def test_samples_of_a_step_do_not_depend_on_layout_or_policies(on_long):
    budget = replace(BUDGET, microbatch_tokens=20, on_long=on_long)
    cursor = 0
    for step in range(1, 6):
        plans = [
            planner(replicas, stages, policies=policies, budget=budget, single_queue=single).next_step(
                step, cursor
            )
            for replicas in (1, 2, 3)
            for stages in (1, 2)
            for policies in POLICIES
            for single in (False, True)
        ]
        assert len({tuple(sorted(trained_on(plan).items())) for plan in plans}) == 1
        assert len({(plan.samples, plan.skipped, plan.next_cursor) for plan in plans}) == 1
        cursor = plans[0].next_cursor


def test_steps_continue_where_the_last_one_ended_and_lose_nothing():
    budget = replace(BUDGET, microbatch_tokens=20, on_long="drop")
    planning = planner(2, budget=budget)
    cursor, seen = 0, []
    for step in range(1, 12):
        plan = planning.next_step(step, cursor)
        assert plan.cursor == cursor
        assert plan.next_cursor == cursor + len(plan.samples) + len(plan.skipped)
        passed = {(sample.source, sample.id) for sample in plan.samples} | set(plan.skipped)
        at = [planning.stream.at(position)[:2] for position in range(cursor, plan.next_cursor)]
        assert passed == set(at)
        seen += at
        cursor = plan.next_cursor
    assert seen == [planning.stream.at(position)[:2] for position in range(cursor)]


def test_a_step_takes_as_many_tokens_as_fit():
    planning = planner()
    cursor = 0
    for step in range(1, 10):
        plan = planning.next_step(step, cursor)
        assert sum(sample.length for sample in plan.samples) <= 150
        following = length(meta_of(*planning.stream.at(plan.next_cursor)[:2]))
        assert sum(sample.length for sample in plan.samples) + following > 150
        cursor = plan.next_cursor


def test_a_step_takes_at_least_one_sample_however_small_its_budget():
    plan = planner(budget=replace(BUDGET, step_tokens=1)).next_step(1, 0)
    assert len(plan.samples) == 1


def test_a_step_of_a_number_of_samples_takes_that_number():
    budget = Budget(microbatch_tokens=20, step_tokens=None, step_samples=7, on_long="drop")
    plan = planner(3, budget=budget).next_step(1, 0)
    assert len(plan.samples) == 7
    assert plan.next_cursor == 7 + len(plan.skipped)


# Long samples.


def takes_long(on_long: str) -> StepPlan:
    budget = Budget(microbatch_tokens=16, step_tokens=None, step_samples=20, on_long=on_long)
    return planner(2, budget=budget).next_step(1, 0)


def test_long_samples_are_dropped_and_named():
    plan = takes_long("drop")
    assert plan.skipped
    assert all(length(meta_of(*skipped)) > 16 for skipped in plan.skipped)
    for sample in plan.samples:
        assert sample.length == length(meta_of(sample.source, sample.id)) <= 16


def test_long_samples_are_truncated_and_their_cut_items_left_out():
    plan = takes_long("truncate")
    cut = [s for s in plan.samples if s.length < length(meta_of(s.source, s.id))]
    assert cut
    assert all(sample.length <= 16 for sample in plan.samples)
    planned = Counter(item.sample for replica in plan.replicas for item in replica.items)
    kept = [meta_of(s.source, s.id) for s in plan.samples]
    assert all(planned[i] <= len(meta.items) for i, meta in enumerate(kept))
    assert sum(planned.values()) < sum(len(meta.items) for meta in kept)


def test_a_long_sample_is_an_error_where_that_is_the_policy():
    with pytest.raises(DataError, match="the budget is 16"):
        takes_long("error")


# Freezing, small steps, digests, evaluation.


def test_a_frozen_component_runs_no_backward_and_reduces_nothing():
    freezing = planner(2, 2, frozen=lambda step: ("ear", "eye") if step < 3 else ())
    early, late = freezing.next_step(2, 0), freezing.next_step(3, 0)
    kinds = [
        {op.kind for replica in plan.replicas for ops in replica.ops for op in ops} for plan in (early, late)
    ]
    assert Kind.ENCODE in kinds[0]
    assert not kinds[0] & {Kind.ENCODE_BACKWARD, Kind.RETURN}
    assert kinds[1] >= {Kind.ENCODE_BACKWARD, Kind.RETURN}
    assert (early.frozen, late.frozen) == (("ear", "eye"), ())
    for plan, reduced in ((early, [2]), (late, [0, 1, 2])):
        for replica in plan.replicas:
            for ops in replica.ops:
                assert [op.index for op in ops if op.kind is Kind.REDUCE] == reduced
        verify(plan, max_in_flight=2)


@pytest.mark.parametrize("balance", ["none", "lpt"])
def test_replicas_without_samples_still_reduce(balance):
    budget = Budget(microbatch_tokens=40, step_tokens=None, step_samples=2, on_long="error")
    plan = planner(5, 2, budget=budget, policies=Policies(balance, "colocated", "encode_first")).next_step(
        1, 0
    )
    assert len(plan.samples) == 2
    empty = [replica for replica in plan.replicas if not replica.microbatches]
    assert len(empty) == 3
    for replica in empty:
        assert replica.items == replica.chunks == replica.routes == ()
        assert all([op.kind for op in ops] == [Kind.REDUCE] * 3 for ops in replica.ops)
    verify(plan, max_in_flight=2)


def test_two_planners_plan_alike():
    one, other = planner(3, 2), planner(3, 2)
    assert one is not other
    for cursor in (0, 17, 400):
        assert one.next_step(2, cursor).digest == other.next_step(2, cursor).digest
    assert one.next_step(2, 0).digest != one.next_step(3, 0).digest
    assert one.next_step(2, 0).digest != one.next_step(2, 1).digest


def test_the_digest_does_not_depend_on_the_order_of_mappings():
    parts = table(2).parts
    backwards = planner(
        2,
        2,
        stream=Stream(dict(reversed(SOURCES.items())), seed=3),
        encoders={"audio": "ear", "image": "eye"},
        table=replace(table(2), parts=dict(reversed(parts.items()))),
    )
    assert backwards.next_step(1, 0) == planner(2, 2).next_step(1, 0)
    assert backwards.next_step(1, 0).digest == planner(2, 2).next_step(1, 0).digest


def test_another_cost_table_is_another_plan():
    renumbered = planner(2, 2, table=replace(table(2), number=5))
    assert renumbered.next_step(1, 0).digest != planner(2, 2).next_step(1, 0).digest


@pytest.mark.parametrize("replicas", [1, 3])
def test_evaluation_runs_forward_only_over_the_given_samples(replicas):
    metas = [meta_of("pairs", i) for i in range(10)]
    plan = planner(2, 2, frozen=lambda step: ("eye",)).evaluation(7, metas, replicas)
    assert trained_on(plan) == Counter(("pairs", i) for i in range(10))
    assert len(plan.replicas) == replicas
    assert not plan.train
    assert not kinds_of_ops(plan) & {
        Kind.BACKWARD,
        Kind.ENCODE_BACKWARD,
        Kind.RETURN,
        Kind.REDUCE,
        Kind.SEND_BACKWARD,
    }
    verify(plan, max_in_flight=2)


def test_costly_samples_are_spread_over_replicas():
    def meta(source, sample):
        return SampleMeta(sample, source, 30 if sample % 2 else 1, (), 0)

    budget = Budget(microbatch_tokens=40, step_tokens=None, step_samples=16, on_long="error")
    spread = []
    for balance in ("none", "lpt"):
        policies = Policies(balance, "colocated", "encode_first")
        stream = Stream({"text": SourceSpec(16, 4, 1)}, seed=0)
        plan = planner(2, metas=meta, budget=budget, policies=policies, stream=stream).next_step(1, 0)
        loads = [sum(batch.tokens for batch in replica.microbatches) for replica in plan.replicas]
        spread.append(max(loads) - min(loads))
    assert spread[1] == 0 <= spread[0]
