from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from domain_plans import Shape, Work, make_plan, one, random_shape, random_work
from edits import (
    Lists,
    move_after,
    move_before,
    of_rank,
    problems,
    remove,
    rules,
    swap,
    wait_for,
    what_happens,
    with_domain,
    with_edits,
    with_lists,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from random_ranks import DataError, DeadlockError, RandomRanks

from parallel.boundary import Route
from parallel.sequence import SequenceLayout
from pipeline.domain_plan import ItemRows, Point
from pipeline.ops import COLLECTIVE, Kind, Op
from pipeline.plan import StepPlan
from pipeline.routes import outputs_of
from pipeline.verifier import PlanRefusedError, verify

STAGES = 2


def a_plan() -> StepPlan:
    """Four microbatches on two ranks that both encode for each; encoder batch 2·m + r is rank r's for m."""
    work = [Work("image", m, (rank,), (2, 1)) for m in range(4) for rank in range(STAGES)]
    return make_plan(STAGES, 4, work, "encode_first")


def edited(edit: Callable[[Lists], object]) -> StepPlan:
    return with_lists(a_plan(), edit)


def test_a_valid_plan_is_accepted():
    assert not problems(a_plan())
    verify(a_plan(), one)


# R1: one order of collectives.


def test_swapped_ships_on_one_rank_are_refused():
    plan = edited(lambda lists: swap(lists[1], Op(Kind.SHIP, 2), Op(Kind.SHIP, 3)))
    assert "R1" in rules(plan)
    assert any("domain rank 1 issues ship in order [0, 1, 3, 2]" in text for text in problems(plan))


def test_swapped_returns_on_one_rank_are_refused():
    plan = edited(lambda lists: swap(lists[1], Op(Kind.RETURN, 1), Op(Kind.RETURN, 2)))
    assert {"R1", "R7"} <= rules(plan)


def test_a_ship_that_one_rank_skips_is_refused():
    def edit(lists):
        remove(lists[1], Op(Kind.SHIP, 3))
        remove(lists[1], wait_for(Kind.SHIP, 3))

    assert {"R1", "R7"} <= rules(edited(edit))


def test_reduces_in_different_orders_on_two_ranks_are_refused():
    plan = edited(lambda lists: swap(lists[0], Op(Kind.REDUCE, 0), Op(Kind.REDUCE, 1)))
    assert rules(plan) == {"R1", "R7"}
    assert what_happens(plan, seed=0) is not None


@pytest.mark.parametrize("kind", [Kind.SEND_BACKWARD, Kind.RETURN])
def test_waiting_for_a_reduction_before_what_others_wait_for_is_refused(kind):
    """It holds this rank until all others come to it, and they wait for what the rank issues later."""
    plan = make_plan(3, 2, [Work("image", m, (1,), (2,)) for m in range(2)], "encode_first")
    lists = [list(ops) for ops in plan.domain.ops]
    move_after(lists[2], Op(kind, 1), wait_for(Kind.REDUCE, 0))
    for awaited in (Kind.SEND_BACKWARD, Kind.RETURN):
        move_after(lists[2], wait_for(awaited, 1), Op(kind, 1))
    plan = with_domain(plan, ops=tuple(map(tuple, lists)))
    for seed in range(3):
        with pytest.raises(DeadlockError):
            RandomRanks(plan, seed).run()
    (found,) = problems(plan, bound=3)
    assert found.startswith("R7: ")
    assert "domain rank 2 stands at op" in found
    assert "wait(reduce 0), waiting for domain rank" in found


def test_waiting_after_a_reduction_is_harmless():
    plan = edited(lambda lists: move_after(lists[1], wait_for(Kind.SEND_BACKWARD, 3), Op(Kind.REDUCE, 2)))
    assert not problems(plan)
    for seed in range(3):
        RandomRanks(plan, seed).run()


def test_domains_that_reduce_in_different_orders_have_different_digests_of_the_world():
    """Each of them alone is safe; together they hang, so a rank compares the order with all domains."""
    plan = a_plan()
    first, second, *others = plan.domain.reductions
    lists = [list(ops) for ops in plan.domain.ops]
    for ops in lists:
        swap(ops, Op(Kind.REDUCE, 0), Op(Kind.REDUCE, 1))
    changes = {"reductions": (second, first, *others), "ops": tuple(map(tuple, lists))}
    other = with_domain(plan, **changes)
    for seed in range(3):
        RandomRanks.together([plan, plan], seed)
        RandomRanks.together([other, other], seed)
        with pytest.raises((DeadlockError, DataError)):
            RandomRanks.together([plan, other], seed)
    assert not problems(plan)
    assert not problems(other)
    assert plan.digests[0] != other.digests[0]
    assert plan.digests[1] == other.digests[1]


def test_a_ship_of_a_microbatch_without_items_is_refused():
    plan = make_plan(2, 3, [Work("image", 0, (1,), (2,))], "encode_first")
    assert not problems(plan)
    added = (Op(Kind.SHIP, 2), wait_for(Kind.SHIP, 2))
    assert rules(with_domain(plan, ops=tuple(added + ops for ops in plan.domain.ops)))


# R2: sends meet receives.


def test_swapped_sends_are_refused():
    plan = edited(lambda lists: swap(lists[0], Op(Kind.SEND_FORWARD, 2), Op(Kind.SEND_FORWARD, 3)))
    assert "R2" in rules(plan)


@pytest.mark.parametrize("kind, rank", [(Kind.RECV_FORWARD, 1), (Kind.RECV_BACKWARD, 0)])
def test_swapped_receives_are_refused(kind, rank):
    plan = edited(lambda lists: swap(lists[rank], Op(kind, 1), Op(kind, 2)))
    assert "R2" in rules(plan)


def test_a_send_that_nobody_receives_is_refused():
    plan = edited(lambda lists: remove(lists[1], Op(Kind.RECV_FORWARD, 3)))
    assert {"R2", "R7"} <= rules(plan)


# R3: data order on a rank.


@pytest.mark.parametrize(
    "rank, early, late",
    [
        (1, Op(Kind.ENCODE, 7), Op(Kind.SHIP, 3)),
        (0, wait_for(Kind.SHIP, 2), Op(Kind.FORWARD, 2)),
        (1, wait_for(Kind.RECV_FORWARD, 2), Op(Kind.FORWARD, 2)),
        (0, Op(Kind.FORWARD, 2), Op(Kind.SEND_FORWARD, 2)),
        (1, Op(Kind.FORWARD, 2), Op(Kind.BACKWARD, 2)),
        (0, wait_for(Kind.RECV_BACKWARD, 2), Op(Kind.BACKWARD, 2)),
        (1, Op(Kind.BACKWARD, 2), Op(Kind.SEND_BACKWARD, 2)),
        (0, Op(Kind.BACKWARD, 2), Op(Kind.RETURN, 2)),
        (0, wait_for(Kind.RETURN, 2), Op(Kind.ENCODE_BACKWARD, 4)),
        (1, Op(Kind.ENCODE, 5), Op(Kind.ENCODE_BACKWARD, 5)),
        (1, Op(Kind.BACKWARD, 3), Op(Kind.REDUCE, 2)),
        (1, Op(Kind.ENCODE_BACKWARD, 7), Op(Kind.REDUCE, 1)),
    ],
    ids=str,
)
def test_an_op_before_what_it_uses_is_refused(rank, early, late):
    plan = edited(lambda lists: move_after(lists[rank], early, late))
    early, late = of_rank(a_plan(), rank, early), of_rank(a_plan(), rank, late)
    assert f"R3: domain rank {rank} must run {early} before {late}" in problems(plan)


def test_an_encoder_batch_encoded_on_another_rank_than_planned_is_refused():
    def edit(lists):
        for kind in (Kind.ENCODE, Kind.ENCODE_BACKWARD):
            remove(lists[1], Op(kind, 7))
            lists[0].insert(lists[0].index(Op(kind, 6)), Op(kind, 7))

    assert "R3" in rules(edited(edit))


# R4: one wait for each issue, after it.


def waits_of(plan: StepPlan) -> list[tuple[int, int]]:
    return [
        (rank, at)
        for rank, ops in enumerate(plan.domain.ops)
        for at, op in enumerate(ops)
        if op.kind is Kind.WAIT
    ]


@pytest.mark.parametrize("rank, at", waits_of(a_plan()))
def test_every_dropped_wait_is_refused(rank, at):
    assert "R4" in rules(edited(lambda lists: lists[rank].pop(at)))


@pytest.mark.parametrize("rank, at", waits_of(a_plan()))
def test_every_doubled_wait_is_refused(rank, at):
    assert "R4" in rules(edited(lambda lists: lists[rank].insert(at, lists[rank][at])))


@pytest.mark.parametrize("rank, at", waits_of(a_plan()))
def test_every_wait_before_its_issue_is_refused(rank, at):
    def edit(lists):
        wait = lists[rank].pop(at)
        lists[rank].insert(lists[rank].index(Op(wait.on, wait.index, virtual_stage=wait.virtual_stage)), wait)

    found = problems(edited(edit))
    assert any(text.startswith("R4") and "not in flight" in text for text in found)
    assert any(text.startswith("R7") and "never issued" in text for text in found)


# R5: everything once.


def test_a_dropped_encoder_backward_is_refused():
    assert rules(edited(lambda lists: remove(lists[1], Op(Kind.ENCODE_BACKWARD, 3)))) == {"R5"}


def test_an_encoder_backward_on_another_rank_is_refused():
    def edit(lists):
        remove(lists[1], Op(Kind.ENCODE_BACKWARD, 3))
        lists[0].insert(lists[0].index(Op(Kind.ENCODE_BACKWARD, 2)), Op(Kind.ENCODE_BACKWARD, 3))

    assert "R5" in rules(edited(edit))


def test_an_encoder_backward_that_runs_twice_is_refused():
    def edit(lists):
        lists[1].insert(lists[1].index(Op(Kind.REDUCE, 0)), Op(Kind.ENCODE_BACKWARD, 3))

    assert "R5" in rules(edited(edit))


def with_encoder_batch(number: int, **changes: object) -> StepPlan:
    """A plan with one changed encoder batch; what follows from its items follows them, where these are
    given.
    """
    plan = a_plan()
    domain = plan.domain
    encoder_batch = replace(domain.encoder_batches[number], **changes)
    if "items" in changes:
        items = [domain.items[i] for i in encoder_batch.items]
        encoder_batch = replace(
            encoder_batch, microbatches=tuple(sorted({item.microbatch for item in items}))
        )
        layout = SequenceLayout.whole([item.tokens for item in items], [0] * len(items), 1)
        outputs = outputs_of(encoder_batch.items, domain.items, layout, len(encoder_batch.ranks))
        encoder_batch = replace(encoder_batch, layout=layout, tiles=((),) * len(items), outputs=outputs)
    return with_domain(
        plan,
        encoder_batches=(
            *domain.encoder_batches[:number],
            encoder_batch,
            *domain.encoder_batches[number + 1 :],
        ),
    )


def test_an_item_of_two_encoder_batches_is_refused():
    encoder_batches = a_plan().domain.encoder_batches
    found = problems(with_encoder_batch(1, items=(*encoder_batches[1].items, encoder_batches[0].items[0])))
    assert "R5: item 0 is in 2 encoder batches" in found
    assert all(text.startswith("R5") for text in found)


def test_an_item_of_no_encoder_batch_is_refused():
    encoder_batch = a_plan().domain.encoder_batches[1]
    found = problems(with_encoder_batch(1, items=encoder_batch.items[:-1]))
    assert f"R5: item {encoder_batch.items[-1]} is in 0 encoder batches" in found
    assert all(text.startswith("R5") for text in found)


BLOCKS = (ItemRows(0, 0, 0, 2), ItemRows(1, 0, 0, 1))  # what encoder batch 0 puts out


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"items": (4,), "component": "audio"}, "another component"),
        ({"component": "audio"}, "another component"),
        ({"microbatches": (2,)}, "microbatches (2,), which"),
        ({"microbatches": (0, 1)}, "microbatches (0, 1), which"),
        ({"microbatches": ()}, "microbatches (), which"),
        ({"layout": SequenceLayout.whole([8, 5], [0, 0], 1)}, "(8, 5) tokens"),
        ({"layout": SequenceLayout.whole([8], [0], 1)}, "(8,) tokens"),
        ({"layout": SequenceLayout.whole([8, 4], [0, 0], 2)}, "rows, not those"),
        ({"outputs": (BLOCKS[:1],)}, "(2,) rows"),
        ({"outputs": ((*BLOCKS, ItemRows(0, 0, 2, 1)),)}, "(4,) rows"),
        ({"outputs": (BLOCKS[::-1],)}, "(3,) rows"),
        ({"outputs": ((ItemRows(2, 0, 0, 2), BLOCKS[1]),)}, "(3,) rows"),
        ({"outputs": (BLOCKS, ())}, "(3, 0) rows"),
        ({"ranks": (0, 1)}, "(3,) rows"),
        ({"ranks": (0, 1), "outputs": (BLOCKS, ())}, "(3, 0) rows"),
        ({"ranks": (1, 0), "outputs": (BLOCKS[:1], BLOCKS[1:])}, "are not neighbours"),
        ({"ranks": ()}, "are not neighbours"),
    ],
)
def test_an_encoder_batch_that_contradicts_its_items_is_refused(changes, words):
    (found,) = problems(with_encoder_batch(0, **changes))
    assert found.startswith("R5: encoder batch 0 ")
    assert words in found


def test_an_encoder_batch_of_an_item_that_the_plan_does_not_have_is_refused():
    plan = a_plan()
    encoder_batches = plan.domain.encoder_batches
    (found,) = problems(
        with_domain(plan, encoder_batches=(replace(encoder_batches[0], items=(0, 99)), *encoder_batches[1:]))
    )
    assert found.startswith("R5: encoder batch 0 ")


def test_an_encoder_batch_that_is_encoded_twice_is_refused():
    assert "R5" in rules(edited(lambda lists: lists[0].insert(0, Op(Kind.ENCODE, 0))))


def test_a_backward_of_a_frozen_encoder_is_refused():
    assert rules(replace(a_plan(), frozen=("image",))) == {"R5"}


def test_a_backward_in_evaluation_is_refused():
    assert "R5" in rules(replace(a_plan(), train=False))


@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.BACKWARD])
def test_a_microbatch_that_a_stage_leaves_out_is_refused(kind):
    assert "R5" in rules(edited(lambda lists: remove(lists[1], Op(kind, 3))))


def route_with(plan: StepPlan, change: Callable[[list], list]) -> StepPlan:
    routes = list(plan.domain.routes)
    routes[1] = Route(STAGES, tuple(change(list(routes[1].segments))))
    return with_domain(plan, routes=tuple(routes))


def test_a_route_that_loses_rows_is_refused():
    assert rules(route_with(a_plan(), lambda segments: segments[:-1])) == {"R5"}


def test_a_route_that_sends_one_row_twice_and_loses_another_is_refused():
    def change(segments):
        assert segments[0].length == segments[2].length
        return [segments[0], segments[1], segments[0], segments[3]]

    assert rules(route_with(a_plan(), change))


def test_a_route_from_a_rank_that_did_not_encode_is_refused():
    assert rules(route_with(a_plan(), lambda segments: [replace(s, source=0) for s in segments]))


def test_a_route_that_exchanges_the_rows_of_two_items_is_refused():
    def change(segments):
        first, other = segments[0], segments[2]
        assert first.length == other.length
        segments[0] = replace(first, destination_start=other.destination_start)
        segments[2] = replace(other, destination_start=first.destination_start)
        return segments

    assert rules(route_with(a_plan(), change)) == {"R5"}


def test_a_route_into_the_tail_of_a_pack_is_refused():
    def change(segments):
        return [*segments[:-1], replace(segments[-1], destination_start=10**6)]

    assert rules(route_with(a_plan(), change)) == {"R5"}


def test_a_missing_route_and_a_needless_one_are_refused():
    plan = a_plan()
    assert "R5" in rules(with_domain(plan, routes=(None, *plan.domain.routes[1:])))
    empty = make_plan(2, 2, [], "encode_first")
    assert "R5" in rules(with_domain(empty, routes=(Route(2, ()), None)))


# R6: the cap.


def test_an_extra_forward_in_flight_is_refused():
    def edit(lists):
        move_before(lists[0], Op(Kind.FORWARD, 2), Op(Kind.BACKWARD, 0))
        move_before(lists[0], wait_for(Kind.SHIP, 2), Op(Kind.FORWARD, 2))

    assert rules(edited(edit)) == {"R6"}
    assert not problems(edited(edit), bound=3)


def test_a_lower_cap_refuses_a_valid_plan():
    assert rules(a_plan(), bound=1) == {"R6"}


def test_evaluation_holds_no_activations():
    assert not rules(make_plan(2, 9, [], "forward_only"), bound=1)


# R7: the machine runs to the end.


def a_return_awaited_before_the_gradient_is_sent() -> StepPlan:
    def edit(lists):
        move_before(lists[1], wait_for(Kind.SHIP, 1), Op(Kind.SEND_BACKWARD, 1))
        move_before(lists[1], Op(Kind.RETURN, 1), Op(Kind.SEND_BACKWARD, 1))
        move_before(lists[1], wait_for(Kind.RETURN, 1), Op(Kind.SEND_BACKWARD, 1))

    return edited(edit)


def test_a_return_awaited_before_the_gradient_is_sent_is_refused_and_explained():
    plan = a_return_awaited_before_the_gradient_is_sent()
    found = problems(plan)
    assert [text.split(":")[0] for text in found] == ["R7"]
    assert "wait(return 1), waiting for domain rank 0 to take part" in found[0]
    assert "wait(recv_backward 1), waiting for domain rank 1 to take part" in found[0]


def test_what_the_machine_refuses_hangs_on_random_ranks():
    plan = a_return_awaited_before_the_gradient_is_sent()
    for seed in range(5):
        with pytest.raises(DeadlockError):
            RandomRanks(plan, seed).run()


def test_a_single_queue_a_rank_is_stricter():
    found = problems(a_plan(), single_fifo=True)
    assert found
    assert all(text.startswith("R7 with a single queue a rank") for text in found)
    assert not problems(make_plan(1, 3, [Work("image", 1, (0,), (2,))], "encode_first"), single_fifo=True)


# Ranks that work together.


def a_shared_plan(schedule: str = "encode_first") -> StepPlan:
    """Two stages of two cp ranks with two ranks each, and two ranks of audio beside them.

    Encoder batches 0 to 3 are images on ranks 0 and 1, on 2 and 3, on both as two tp groups, and across the
    stages; encoder batch 4 is audio on ranks 8 and 9.
    """
    work = [
        Work("image", 0, (0, 1), (2,)),
        Work("image", 0, (2, 3), (2,)),
        Work("image", 1, (0, 1, 2, 3), (2, 4), num_tp_groups=2),
        Work("image", 2, (3, 4), (3,)),
        Work("audio", 1, (8, 9), (4,)),
    ]
    shape = Shape(stages=2, pool=2, tp=2, collective_group=2, beside=2, homes=((8, 10), (0, 8)))
    return make_plan(shape, 3, work, schedule, cuts=Random(2))


def shared(edit: Callable[[Lists], object], schedule: str = "encode_first") -> StepPlan:
    return with_lists(a_shared_plan(schedule), edit)


def refused_only_by_r7(plan: StepPlan, *words: str) -> None:
    (found,) = problems(plan)
    assert found.startswith("R7: ")
    assert [word for word in words if word not in found] == [], found
    for seed in range(4):
        assert what_happens(plan, seed) is not None


@pytest.mark.parametrize("schedule", ["encode_first", "one_f_one_b", "forward_only"])
def test_a_valid_plan_of_ranks_that_work_together_is_accepted(schedule):
    assert not problems(a_shared_plan(schedule))


def test_two_ranks_of_a_tp_group_that_encode_in_opposite_orders_are_refused():
    plan = shared(lambda lists: swap(lists[1], Op(Kind.ENCODE, 0), Op(Kind.ENCODE, 2)))
    # Rank 1 may not ship microbatch 0 before it has encoded for it.
    plan = with_domain(plan, ops=tuple(_ships_last(ops) for ops in plan.domain.ops))
    refused_only_by_r7(
        plan, "domain rank 0 stands at op", "encode(0), waiting for domain rank 1 to take part"
    )


def _ships_last(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Issue all ships, and returns that go with them, after the last encode of this rank."""
    last = max((at for at, op in enumerate(ops) if op.kind is Kind.ENCODE), default=-1)
    first = ops[: last + 1]
    later = [op for op in first if op.kind in COLLECTIVE]
    return (*(op for op in first if op not in later), *later, *ops[last + 1 :])


def test_opposite_orders_of_backward_are_refused():
    plan = shared(lambda lists: swap(lists[3], Op(Kind.ENCODE_BACKWARD, 1), Op(Kind.ENCODE_BACKWARD, 2)))
    found = problems(plan)
    assert found
    assert all(text.startswith(("R3", "R7")) for text in found)
    plan = shared(
        lambda lists: move_after(lists[3], Op(Kind.ENCODE_BACKWARD, 1), Op(Kind.ENCODE_BACKWARD, 2))
    )
    refused_only_by_r7(
        plan, "domain rank 2 stands at op", "encode_backward(1), waiting for domain rank 3 to take part"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_of_a_collective_group_that_pass_microbatches_in_opposite_orders_are_refused(rank):
    plan = make_plan(Shape(stages=1, tp=2, collective_group=2), 2, [], "forward_only")
    lists = [list(ops) for ops in plan.domain.ops]
    lists[rank].reverse()
    plan = with_domain(plan, ops=tuple(map(tuple, lists)))
    refused_only_by_r7(plan, "forward(0), waiting for domain rank", "forward(1), waiting for domain rank")
    alone = with_domain(plan, collective_group=1)
    assert not problems(alone)
    RandomRanks(alone, seed=0).run()


def test_a_pass_and_an_encoder_batch_in_opposite_orders_are_refused():
    work = [Work("image", 1, (0, 1), (2,))]
    plan = make_plan(Shape(stages=1, tp=2, collective_group=2), 2, work, "forward_only")
    lists = [list(ops) for ops in plan.domain.ops]
    assert lists[1].index(Op(Kind.FORWARD, 0)) < lists[1].index(Op(Kind.ENCODE, 0))
    move_before(lists[1], Op(Kind.ENCODE, 0), Op(Kind.FORWARD, 0))
    refused_only_by_r7(
        with_domain(plan, ops=tuple(map(tuple, lists))),
        "domain rank 0 stands at op 0, forward(0), waiting for domain rank 1",
        "encode(0), waiting for domain rank 0",
    )


@pytest.mark.parametrize(
    "op, rank", [(Op(Kind.ENCODE, 2), 2), (Op(Kind.ENCODE, 3), 4), (Op(Kind.ENCODE, 4), 9)]
)
def test_an_encoder_batch_that_a_rank_of_its_tp_groups_leaves_out_is_refused(op, rank):
    found = problems(shared(lambda lists: lists[rank].remove(op)))
    ranks = a_shared_plan().domain.encoder_batches[op.index].ranks
    assert (
        f"R5: domain rank {rank} runs {op} 0 times, not 1: an encoder batch of domain ranks {ranks}" in found
    )
    assert any(
        text.startswith("R7: ") and f"{op}, waiting for domain rank {rank} to take part" in text
        for text in found
    )


def test_a_rank_that_helps_uninvited_is_refused():
    found = problems(shared(lambda lists: lists[5].insert(0, Op(Kind.ENCODE, 3))))
    assert "R5: domain rank 5 runs encode(3) 1 times, not 0: an encoder batch of domain ranks (3, 4)" in found


def test_a_pass_of_a_rank_beside_the_llm_is_refused():
    found = problems(shared(lambda lists: lists[8].insert(0, Op(Kind.FORWARD, 0))))
    assert "R5: domain rank 8 runs forward(0), which is not in the plan" in found


# Homes: which ranks hold a component.


def with_homes(plan: StepPlan, *homes: tuple[int, int]) -> StepPlan:
    return with_domain(plan, homes=(*homes, plan.domain.homes[len(homes)]))


def test_an_encoder_batch_outside_the_home_of_its_component_is_refused():
    found = problems(with_homes(a_shared_plan(), (8, 10), (0, 4)))
    assert "R5: encoder batch 3 is on domain ranks (3, 4), which do not all hold image" in found
    assert not any("encoder batch 2" in text for text in found)


def leave_out(ops, component):
    """Take a reduction and the wait for it out of a list."""
    remove(ops, Op(Kind.REDUCE, component))
    remove(ops, wait_for(Kind.REDUCE, component))


def test_every_rank_of_a_home_reduces_and_no_other():
    plan = a_shared_plan()
    assert [rank for rank, ops in enumerate(plan.domain.ops) if Op(Kind.REDUCE, 0) in ops] == [8, 9]
    found = problems(shared(lambda lists: leave_out(lists[7], 1)))
    assert found[0] == "R5: domain rank 7 runs reduce(1) 0 times, not 1: image"
    assert [text[:2] for text in found[1:]] == ["R7"]
    found = problems(shared(lambda lists: lists[7].extend((Op(Kind.REDUCE, 0), wait_for(Kind.REDUCE, 0)))))
    assert "R5: domain rank 7 runs reduce(0) 1 times, not 0: audio" in found
    assert "R1: domain rank 7 reduces in order [(1, 0), (2, 1), (0, 0)], not that of the plan" in found
    found = problems(with_homes(plan, (8, 9), (0, 8)))
    assert "R5: domain rank 9 runs reduce(0) 1 times, not 0: audio" in found
    assert "R5: encoder batch 4 is on domain ranks (8, 9), which do not all hold audio" in found


def test_a_reduction_that_one_rank_of_a_home_leaves_out_hangs_the_others():
    plan = shared(lambda lists: leave_out(lists[9], 0))
    with pytest.raises(DeadlockError):
        RandomRanks(plan, seed=0).run()
    found = problems(plan)
    assert found[0] == "R5: domain rank 9 runs reduce(0) 0 times, not 1: audio"
    assert "wait(reduce 0), waiting for domain rank 9 to take part" in found[1]
    assert "behind a reduction that other domains make first" in found[1]


# Stages of several ranks.


def test_each_rank_of_a_stage_sends_to_its_own_neighbour():
    plan = shared(lambda lists: swap(lists[2], Op(Kind.SEND_FORWARD, 0), Op(Kind.SEND_FORWARD, 1)))
    found = [text for text in problems(plan) if text.startswith("R2")]
    assert found == ["R2: domain rank 2 sends send_forward [1, 0, 2], domain rank 6 receives [0, 1, 2]"]


def test_a_route_to_another_rank_of_the_first_stage_is_refused():
    plan = a_shared_plan()
    routes = list(plan.domain.routes)
    first, *others = routes[1].segments
    moved = replace(first, destination=(first.destination + 1) % 4)
    routes[1] = replace(routes[1], segments=(moved, *others))
    found = problems(with_domain(plan, routes=tuple(routes)))
    assert "R5: the route of microbatch 1 does not bring each row to the place of its item" in found


def test_a_plan_of_another_cp_rank_for_a_sequence_is_refused():
    plan = a_shared_plan()
    batch = plan.domain.microbatches[0]
    pieces = [[replace(s, cp_rank=1 - s.cp_rank) for s in shards] for shards in batch.layout.shards]
    moved = replace(batch, layout=SequenceLayout(2, tuple(map(tuple, pieces))))
    found = problems(with_domain(plan, microbatches=(moved, *plan.domain.microbatches[1:])))
    assert found == ["R5: the route of microbatch 0 does not bring each row to the place of its item"]


# Rows that enter at a later stage.


def tapped(edit: Callable[[Lists], object]) -> StepPlan:
    shape = Shape(stages=3, taps=(Point("llm.layers.1", 0, 1), Point("llm.layers.5", 2, 0)))
    plan = make_plan(shape, 2, [Work("image", m, (m,), (3,)) for m in range(2)], "encode_first")
    return with_lists(plan, edit)


def test_rows_go_to_every_attach_point():
    domain = tapped(lambda lists: None).domain
    assert not problems(tapped(lambda lists: None), bound=3)
    assert [encoder_batch.rows for encoder_batch in domain.encoder_batches] == [(9,), (9,)]
    segments = [(s.destination, s.length) for s in domain.routes[0].segments]
    assert sorted(segments) == [(0, 3), (0, 3), (2, 3)]


@pytest.mark.parametrize(
    "early, late",
    [
        (wait_for(Kind.SHIP, 1), Op(Kind.FORWARD, 1)),
        (wait_for(Kind.RECV_FORWARD, 1), Op(Kind.FORWARD, 1)),
        (Op(Kind.BACKWARD, 1), Op(Kind.RETURN, 1)),
    ],
    ids=str,
)
def test_a_later_stage_waits_for_its_rows_and_returns_their_gradients_after_its_pass(early, late):
    plan = tapped(lambda lists: move_after(lists[2], early, late))
    early, late = of_rank(plan, 2, early), of_rank(plan, 2, late)
    assert f"R3: domain rank 2 must run {early} before {late}" in problems(plan, bound=3)
    assert what_happens(plan, seed=0) is not None


def test_rows_for_an_attach_point_that_the_route_leaves_out_are_refused():
    plan = tapped(lambda lists: None)
    route = plan.domain.routes[1]
    kept = tuple(s for s in route.segments if s.destination != 2)
    broken = with_domain(plan, routes=(plan.domain.routes[0], replace(route, segments=kept)))
    assert problems(broken, bound=3) == [
        "R5: the route of microbatch 1 does not bring each row to the place of its item"
    ]


# What the user sees.


def test_the_refusal_names_step_domain_and_rule():
    plan = a_plan()
    broken = with_domain(plan, ops=tuple(ops[1:] for ops in plan.domain.ops))
    with pytest.raises(PlanRefusedError, match="step 17 is refused") as refusal:
        verify(replace(broken, step=17, number=3), one)
    assert "domain 3: R2" in str(refusal.value)
    assert "are ranks" not in str(refusal.value)
    with pytest.raises(
        PlanRefusedError, match=r"domain ranks 0 to 4 of domain 3 are ranks 6 to 7, 22, 24 to 25$"
    ):
        verify(replace(broken, step=17, number=3), one, ranks=(6, 7, 22, 24, 25))


# Any change that the verifier lets pass must be harmless.


def mutated(random: Random) -> StepPlan:
    shape, microbatches = random_shape(random, 4), random.randint(1, 5)
    schedule = random.choice(("encode_first", "one_f_one_b", "forward_only"))
    frozen = random.choice(((), ("image",), ("audio", "image")))
    work = random_work(random, shape, microbatches)
    plan = make_plan(shape, microbatches, work, schedule, frozen, cuts=random)
    return with_edits(plan, random)


@pytest.mark.parametrize("part", range(4))
def test_random_changes_that_are_accepted_still_run_on_random_ranks(part):
    accepted, refused_hangs = 0, 0
    for number in range(300):
        random = Random(f"{part}/{number}")
        plan = mutated(random)
        if problems(plan, bound=5):
            refused_hangs += what_happens(plan, number) is not None
            continue
        accepted += 1
        for seed in range(4):
            assert what_happens(plan, seed) is None, number
    # Both kinds must come up, or this test asks nothing.
    assert accepted > 20
    assert refused_hangs > 100


@settings(deadline=None, max_examples=80)
@given(st.randoms(use_true_random=False), st.integers(0, 1000))
def test_whatever_hangs_random_ranks_with_a_single_queue_is_refused(random, seed):
    plan = mutated(random)
    try:
        RandomRanks(plan, seed, single_queue=True).run()
    except DeadlockError:
        assert problems(plan, bound=5, single_fifo=True)
    except DataError:
        assert problems(plan, bound=5)


@settings(deadline=None, max_examples=80)
@given(st.randoms(use_true_random=False), st.integers(0, 1000))
def test_whatever_fails_on_random_ranks_is_refused(random, seed):
    plan = mutated(random)
    if what_happens(plan, seed) is not None:
        assert problems(plan, bound=5)


def test_a_reduction_that_nobody_makes_is_refused():
    def edit(lists):
        for ops in lists:
            ops.remove(Op(Kind.REDUCE, 1))

    assert "R5" in rules(edited(edit))


def test_ops_of_what_the_plan_does_not_have_are_refused():
    for op in (Op(Kind.FORWARD, 99), Op(Kind.ENCODE, 99), Op(Kind.REDUCE, 99), Op(Kind.SHIP, -1)):
        plan = edited(lambda lists, op=op: lists[1].append(op))
        assert any("which is not in the plan" in text for text in problems(plan))
