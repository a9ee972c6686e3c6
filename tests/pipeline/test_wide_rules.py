"""Each rule that plans with virtual stages, teams, encoder batches and split backwards bring: one broken plan
for each.
"""

from dataclasses import replace

import pytest
from domain_plans import Shape, Work, make_plan
from edits import Lists, problems, what_happens, with_domain, with_lists
from wide_plans import build_in_turn, with_split_backwards

from parallel.sequence import SequenceLayout
from parallel.work import Grad
from pipeline.builders import INTERLEAVED, Facts
from pipeline.domain_plan import DomainPlan, Point
from pipeline.ops import Kind, Op
from pipeline.plan import StepPlan
from pipeline.routes import outputs_of

F, B, LLM = Kind.FORWARD, Kind.BACKWARD, 2
INPUT, WEIGHT = Grad.INPUT, Grad.WEIGHT


def a_plan(split: float = 1, frozen: tuple[str, ...] = ()) -> StepPlan:
    """Four microbatches on two ranks of two virtual stages each; encoder batch 2·m + r is rank r's for m."""
    work = [Work("image", m, (rank,), (2, 1)) for m in range(4) for rank in range(2)]
    return make_plan(Shape(2, vpp=2), 4, work, with_split_backwards(INTERLEAVED, 0, split), frozen)


def move(ops: list[Op], op: Op, to: Op, after: bool = False) -> None:
    ops.remove(op)
    ops.insert(ops.index(to) + after, op)


def refused(plan: StepPlan, *texts: str) -> None:
    """The plan is refused in these words, and it fails on random ranks too."""
    found = problems(plan, bound=100)
    for text in texts:
        assert any(text in line for line in found), (text, found)
    assert all(what_happens(plan, seed) is not None for seed in range(3))


def test_the_plan_itself_is_safe():
    for split in (0, 1):
        plan = a_plan(split)
        assert problems(plan, bound=100) == []
        assert what_happens(plan) is None


# Split backwards.

HALVES = pytest.mark.parametrize(
    "whole", [Op(B, 1, virtual_stage=2), Op(Kind.ENCODE_BACKWARD, 2)], ids=["a pass", "an encoder"]
)


def halves_of(whole: Op) -> tuple[Op, Op]:
    return replace(whole, grad=INPUT), replace(whole, grad=WEIGHT)


@HALVES
def test_a_weight_gradient_that_never_runs_is_refused(whole):
    plan = with_lists(a_plan(), lambda lists: lists[0].remove(halves_of(whole)[1]))
    refused(
        plan, f"R5: domain rank 0 runs {whole} 0 times whole, 1 times for inputs and 0 for weights, not 1"
    )


@HALVES
def test_a_weight_gradient_that_runs_twice_is_refused(whole):
    weight = halves_of(whole)[1]
    plan = with_lists(a_plan(), lambda lists: lists[0].insert(lists[0].index(weight), weight))
    refused(
        plan, f"R5: domain rank 0 runs {whole} 0 times whole, 1 times for inputs and 2 for weights, not 1"
    )


@HALVES
def test_an_input_gradient_that_never_runs_is_refused(whole):
    first, weight = halves_of(whole)
    plan = with_lists(a_plan(), lambda lists: lists[0].remove(first))
    refused(
        plan, "0 times for inputs and 1 for weights", f"R3: domain rank 0 must run {first} before {weight}"
    )


@HALVES
def test_a_weight_gradient_before_its_input_gradient_is_refused(whole):
    first, weight = halves_of(whole)
    plan = with_lists(a_plan(), lambda lists: move(lists[0], weight, first))
    refused(plan, f"R3: domain rank 0 must run {first} before {weight}")


@HALVES
def test_a_whole_backward_beside_a_split_one_is_refused(whole):
    weight = halves_of(whole)[1]
    plan = with_lists(a_plan(), lambda lists: lists[0].insert(lists[0].index(weight), whole))
    refused(
        plan, f"R5: domain rank 0 runs {whole} 1 times whole, 1 times for inputs and 1 for weights, not 1"
    )


def test_a_weight_gradient_of_a_frozen_llm_is_refused():
    """It would add to gradients that nobody reduces or clears."""
    safe = a_plan(frozen=("llm",))
    assert not problems(safe, bound=100)
    assert Op(B, 1, virtual_stage=2, grad=INPUT) in safe.domain.ops[0]
    plan = with_lists(safe, lambda lists: lists[0].append(Op(B, 1, virtual_stage=2, grad=WEIGHT)))
    refused(
        plan,
        "R5: domain rank 0 runs backward(1, virtual stage 2) 0 times whole, 1 times for inputs and 1 for "
        "weights",
    )


def test_a_forward_has_no_halves():
    plan = with_lists(a_plan(), lambda lists: lists[0].append(Op(F, 1, grad=INPUT)))
    refused(plan, "R5: domain rank 0 runs forward(1, input), which is not in the plan")


# Reductions.


@pytest.mark.parametrize("split", [0, 1])
def test_a_reduction_before_the_last_gradient_of_its_virtual_stage_is_refused(split):
    plan = a_plan(split, frozen=("audio", "image"))
    ops, reduction = plan.domain.ops[0], Op(Kind.REDUCE, LLM, virtual_stage=0)
    last = [op for op in ops if op.kind is B and op.virtual_stage == 0 and op.makes_weight][-1]
    before = with_lists(plan, lambda lists: move(lists[0], reduction, last))
    refused(before, f"R3: domain rank 0 must run {last} before {reduction}")
    assert "adds to gradients that were reduced before" in str(what_happens(before))
    after = with_lists(plan, lambda lists: move(lists[0], reduction, last, after=True))
    assert not problems(after, bound=100)
    assert what_happens(after) is None


def test_a_reduction_before_anything_of_its_virtual_stage_is_refused():
    plan = a_plan(frozen=("audio", "image"))
    reduction = Op(Kind.REDUCE, LLM, virtual_stage=0)
    plan = with_lists(plan, lambda lists: (lists[0].remove(reduction), lists[0].insert(0, reduction)))
    refused(plan, "R3: domain rank 0 must run backward(0, weight) before reduce(2)")


def test_the_first_virtual_stage_is_reduced_after_the_gradients_of_an_output_that_may_be_tied_to_it():
    plan = make_plan(Shape(1, vpp=2), 2, [], with_split_backwards(build_in_turn, 0, 1))
    assert problems(plan, bound=100) == []
    last, reduction = Op(B, 1, virtual_stage=1, grad=WEIGHT), Op(Kind.REDUCE, LLM, virtual_stage=0)
    plan = with_lists(plan, lambda lists: move(lists[0], last, reduction, after=True))
    assert problems(plan, bound=100) == [f"R3: domain rank 0 must run {last} before {reduction}"]


def test_two_virtual_stages_that_one_rank_reduces_in_the_wrong_order_are_refused():
    first, second = Op(Kind.REDUCE, LLM, virtual_stage=0), Op(Kind.REDUCE, LLM, virtual_stage=2)
    plan = with_lists(a_plan(), lambda lists: move(lists[0], first, second, after=True))
    refused(plan, "R1: domain rank 0 reduces in order [(0, 0), (1, 0), (2, 2), (2, 0)], not that of the plan")


def test_the_reduction_of_a_virtual_stage_that_a_rank_does_not_hold_is_refused():
    plan = with_lists(a_plan(), lambda lists: lists[0].append(Op(Kind.REDUCE, LLM, virtual_stage=1)))
    found = problems(plan)
    assert found == ["R5: domain rank 0 runs reduce(2, virtual stage 1), which is not in the plan"]


# Virtual stages.


def test_a_message_to_the_wrong_virtual_stage_is_refused():
    """The ranks are the same, so only the virtual stage tells one message from the other."""

    def edit(lists: Lists) -> None:
        at = [n for n, op in enumerate(lists[0]) if op.kind is Kind.SEND_FORWARD and op.virtual_stage == 0][1]
        wait = lists[0].index(Op(Kind.WAIT, lists[0][at].index, Kind.SEND_FORWARD))
        lists[0][at] = replace(lists[0][at], virtual_stage=2)
        lists[0][wait] = replace(lists[0][wait], virtual_stage=2)

    refused(
        with_lists(a_plan(), edit),
        "R2: domain rank 0 sends send_forward [(0, 1), (1, 3), (0, 3), (1, 3)",
        "R3: domain rank 0 must run forward(1, virtual stage 2) before send_forward(1, virtual stage 2)",
        "R4: domain rank 0 issues send_forward(1, virtual stage 2) twice",
    )


def test_messages_of_two_virtual_stages_in_the_wrong_order_are_refused():
    def edit(lists: Lists) -> None:
        i, j = (lists[0].index(Op(Kind.SEND_FORWARD, m, virtual_stage=p)) for m, p in ((1, 2), (2, 0)))
        lists[0][i], lists[0][j] = lists[0][j], lists[0][i]

    refused(with_lists(a_plan(), edit), "R2: domain rank 0 sends send_forward")


def test_a_virtual_stage_before_the_one_that_it_continues_is_refused():
    """Virtual stage 2, of rank 0, needs what rank 1 makes of 0, of rank 0."""

    def edit(lists: Lists) -> None:
        move(lists[0], Op(F, 0), Op(F, 0, virtual_stage=2), after=True)
        move(lists[0], Op(Kind.SEND_FORWARD, 0), Op(F, 0), after=True)

    plan = with_lists(a_plan(), edit)
    refused(plan, "R7: domain rank 0 stands at op")


def folded(edit) -> StepPlan:
    return with_lists(make_plan(Shape(2, vpp=2, fold=True), 2, [], build_in_turn), edit)


@pytest.mark.parametrize(
    "early, late",
    [
        (Op(F, 1, virtual_stage=1), Op(F, 1, virtual_stage=2)),
        (Op(B, 1, virtual_stage=2), Op(B, 1, virtual_stage=1)),
    ],
    ids=str,
)
def test_a_virtual_stage_that_hands_on_within_its_rank_comes_first(early, late):
    assert not problems(folded(lambda lists: None))
    plan = folded(lambda lists: move(lists[1], early, late, after=True))
    refused(plan, f"R3: domain rank 1 must run {early} before {late}")


def test_a_message_within_a_rank_is_refused():
    """No rank sends to itself: the next virtual stage finds what it needs."""
    added = [Op(Kind.SEND_FORWARD, 1, virtual_stage=1), Op(Kind.RECV_FORWARD, 1, virtual_stage=2)]
    plan = folded(lambda lists: lists[1].extend(added))
    assert problems(plan) == [f"R5: domain rank 1 runs {op}, which is not in the plan" for op in added]


@pytest.mark.parametrize(
    "op",
    [
        Op(F, 0, virtual_stage=1),
        Op(B, 0, virtual_stage=4),
        Op(Kind.SEND_BACKWARD, 0),
        Op(Kind.RECV_FORWARD, 0),
        Op(Kind.SHIP, 0, virtual_stage=2),
        Op(Kind.ENCODE, 0, virtual_stage=2),
        Op(Kind.WAIT, 0),
        Op(Kind.WAIT, 0, F),
        Op(Kind.WAIT, 0, Kind.SHIP, grad=INPUT),
        Op(F, 0, Kind.SHIP),
    ],
    ids=str,
)
def test_an_op_that_a_rank_of_these_virtual_stages_cannot_run_is_refused(op):
    plan = with_lists(a_plan(), lambda lists: lists[0].append(op))
    assert problems(plan) == [f"R5: domain rank 0 runs {op}, which is not in the plan"]


@pytest.mark.parametrize(
    "holds, words",
    [
        (((0, 2), (1, 3, 3)), "{0: 1, 1: 1, 2: 1, 3: 2}"),
        (((0, 2), (1, 4)), "{0: 1, 1: 1, 2: 1, 4: 1}"),
        (((0, 2), (0, 2), (1, 3)), "{0: 2, 1: 1, 2: 2, 3: 1}"),
        (((0, 2), (), (1, 3)), "stand before some"),
        (((0, 2), (1, 3), ()), "2 op lists for 3 teams"),
    ],
)
def test_a_table_that_holds_a_virtual_stage_on_too_few_or_too_many_teams_is_refused(holds, words):
    """A message to a virtual stage goes to the team at the same place among its holders: it must have one."""
    found = problems(with_domain(a_plan(), holds=holds))
    (text,) = found
    assert text.startswith("R5: ")
    assert words in text


@pytest.mark.parametrize("holds", [((0, 2), (1,)), ((0, 1, 2, 3), ())])
def test_a_table_without_the_virtual_stages_of_the_ops_is_refused(holds):
    found = problems(with_domain(a_plan(), holds=holds))
    assert found
    assert all(text.startswith("R5: domain rank") and "not in the plan" in text for text in found)


def test_teams_of_a_stage_that_hold_different_virtual_stages_are_refused():
    """Each virtual stage is on two teams, but the ranks of a stage share its layers."""
    plan = make_plan(Shape(2, pool=2, vpp=2), 2, [], build_in_turn)
    assert not problems(plan)
    (text,) = problems(with_domain(plan, holds=((0, 2), (1, 3), (0, 2), (1, 3))))
    assert "R5: teams of one stage hold different virtual stages" in text


# Teams.


def team_plan() -> StepPlan:
    """Two stages of four ranks in teams of two; encoder batch 0 on one team, encoder batch 1 on two teams as
    two tp groups.
    """
    work = [Work("image", 0, (0, 1), (2,)), Work("image", 1, (0, 1, 2, 3), (2, 3), num_tp_groups=2)]
    return make_plan(Shape(2, pool=2, tp=2, collective_group=2, team=2), 2, work, "encode_first")


def with_encoder_batch(
    plan: StepPlan, number: int, ranks: tuple[int, ...], num_tp_groups: int = 1
) -> StepPlan:
    """One encoder batch on other ranks, with the rows that these put out."""
    encoder_batches = list(plan.domain.encoder_batches)
    lengths = encoder_batches[number].layout.lengths
    layout = SequenceLayout.whole(lengths, [0] * len(lengths), num_tp_groups)
    outputs = outputs_of(
        encoder_batches[number].items, plan.domain.items, layout, len(ranks) // num_tp_groups
    )
    encoder_batches[number] = replace(encoder_batches[number], ranks=ranks, layout=layout, outputs=outputs)
    return with_domain(plan, encoder_batches=tuple(encoder_batches))


@pytest.mark.parametrize(
    "ranks, num_tp_groups", [((0,), 1), ((1, 2), 1), ((0, 1, 2), 1), ((0, 1), 2), ((0, 1, 2, 3), 4)]
)
def test_an_encoder_batch_that_is_not_of_whole_teams_is_refused(ranks, num_tp_groups):
    """A team has one list, so that all of its ranks would encode it, and the same items."""
    assert not problems(team_plan())
    (text,) = problems(with_encoder_batch(team_plan(), 0, ranks, num_tp_groups))
    assert (
        text == f"R5: encoder batch 0 is on {num_tp_groups} tp groups of domain ranks {ranks}, which are not "
        "whole teams of 2"
    )


def test_homes_that_are_not_of_whole_teams_are_refused():
    plan = team_plan()
    (text,) = problems(with_domain(plan, homes=((0, 8), (0, 3), (0, 8))))
    assert "are not all whole teams of 2" in text


def test_what_a_team_does_wrong_names_its_ranks():
    plan = with_lists(team_plan(), lambda lists: lists[2].clear())
    found = problems(plan)
    why = "a microbatch passes every virtual stage"
    assert (
        f"R5: the team of domain ranks 4 to 5 runs forward(0, virtual stage 1) 0 times, not 1: {why}" in found
    )
    assert found[-1].startswith("R7: domain rank 0 stands at op")
    assert "waiting for domain rank 4 to take part" in found[-1]


# Messages that are issued twice.


@pytest.mark.parametrize("kind, rank, other", [(Kind.SEND_FORWARD, 0, 1), (Kind.SEND_BACKWARD, 1, 0)])
def test_a_message_that_both_ends_exchange_twice_is_refused(kind, rank, other):
    """Both ends agree and wait for both, but nobody made the second one."""
    plan = make_plan(2, 2, [], "one_f_one_b")
    receive = Kind.RECV_FORWARD if kind is Kind.SEND_FORWARD else Kind.RECV_BACKWARD

    def edit(lists: Lists) -> None:
        for ops, end, virtual_stage in ((lists[rank], kind, rank), (lists[other], receive, other)):
            at = ops.index(next(op for op in ops if op.kind is Kind.REDUCE))
            ops[at:at] = [Op(end, 1, virtual_stage=virtual_stage), Op(Kind.WAIT, 1, end, virtual_stage)]

    refused(with_lists(plan, edit), f"R4: domain rank {rank} issues {Op(kind, 1, virtual_stage=rank)} twice")


@pytest.mark.parametrize("kind", [Kind.SHIP, Kind.RETURN])
def test_a_collective_that_all_ranks_issue_twice_is_refused(kind):
    def edit(lists: Lists) -> None:
        for ops in lists:
            at = ops.index(next(op for op in ops if op.kind is Kind.REDUCE))
            ops[at:at] = [Op(kind, 3), Op(Kind.WAIT, 3, kind)]

    refused(with_lists(a_plan(), edit), f"R4: domain rank 0 issues {kind}(3) twice")


# Bytes.


def kept(rank: int, op: Op) -> int:
    """A pass keeps more of a later microbatch, an encoder batch as much as its number says."""
    return 10 ** (op.index + 1) if op.kind is F else 1 + op.index


def on_one_rank(split: float) -> StepPlan:
    def build(domain: DomainPlan, facts: Facts) -> list[list[Op]]:
        encode = [Op(Kind.ENCODE, c) for c in range(3)]
        passes = [Op(F, 0), Op(B, 0), Op(F, 1), Op(B, 1), Op(F, 2), Op(B, 2)]
        return [[*encode, *passes, *(Op(Kind.ENCODE_BACKWARD, c) for c in range(3))]]

    work = [Work("image", m, (0,), (2,)) for m in range(3)]
    plan = make_plan(1, 3, work, build)
    if not split:
        return plan

    def edit(lists: Lists) -> None:
        first, weight = halves_of(Op(B, 1))
        at = lists[0].index(Op(B, 1))
        lists[0][at : at + 1] = [first]
        lists[0].insert(lists[0].index(Op(F, 2)) + 1, weight)

    return with_lists(plan, edit)


@pytest.mark.parametrize("split, most", [(0, 1000), (1, 1100)])
def test_activations_over_their_bound_in_bytes_are_refused(split, most):
    """A split pass keeps its activations until the half for weights: here into the next forward."""
    plan = on_one_rank(split)
    assert what_happens(plan) is None
    assert not problems(with_domain(plan, bounds=(("llm/0", most),)), kept=kept)
    assert problems(with_domain(plan, bounds=(("llm/0", most - 1),)), kept=kept) == [
        f"R6: domain rank 0 holds {most} bytes of activations of llm/0 at forward(2), more than its bound of "
        f"{most - 1}"
    ]


def test_activations_of_encoders_have_bounds_too():
    plan = on_one_rank(0)
    assert not problems(with_domain(plan, bounds=(("image", 1 + 2 + 3),)), kept=kept)
    assert problems(with_domain(plan, bounds=(("image", 5),)), kept=kept) == [
        "R6: domain rank 0 holds 6 bytes of activations of image at encode(2), more than its bound of 5"
    ]


def test_a_bound_is_that_of_one_virtual_stage():
    plan = a_plan(0)
    assert not problems(with_domain(plan, bounds=()))
    held = {virtual_stage: max(_held(plan, virtual_stage)) for virtual_stage in (0, 2)}
    for virtual_stage, most in held.items():
        assert not problems(with_domain(plan, bounds=((f"llm/{virtual_stage}", most),)))
        (text,) = problems(with_domain(plan, bounds=((f"llm/{virtual_stage}", most - 1),)))
        assert f"activations of llm/{virtual_stage}" in text


def _held(plan: StepPlan, virtual_stage: int) -> list[int]:
    live = [0]
    for op in plan.domain.ops[0]:
        if op.virtual_stage == virtual_stage and op.kind in (F, B):
            live.append(live[-1] + (1 if op.kind is F else -1))
    return live


# Encoder batches and rows.


def encoder_batch_of_two(taps: tuple[Point, ...] = ()) -> StepPlan:
    """Rank 0 encodes for microbatches 0 and 1 at once, then for 0 again; rank 1 for microbatch 1."""
    work = [Work("image", (0, 1), (0,), (2, 1)), Work("image", 0, (0,), (1,)), Work("image", 1, (1,), (2,))]
    return make_plan(Shape(2, vpp=2, taps=taps), 2, work, build_in_turn)


@pytest.mark.parametrize("m, batch", [(0, 0), (0, 1), (1, 0)])
def test_a_microbatch_that_ships_before_its_last_encoder_batch_is_refused(m, batch):
    assert not problems(encoder_batch_of_two())
    assert what_happens(encoder_batch_of_two()) is None
    plan = with_lists(
        encoder_batch_of_two(),
        lambda lists: move(lists[0], Op(Kind.ENCODE, batch), Op(Kind.SHIP, m), after=True),
    )
    refused(plan, f"R3: domain rank 0 must run encode({batch}) before ship({m})")


@pytest.mark.parametrize("m", [0, 1])
def test_an_encoder_batch_goes_back_after_the_gradients_of_all_its_microbatches(m):
    wait, back = Op(Kind.WAIT, m, Kind.RETURN), Op(Kind.ENCODE_BACKWARD, 0)
    plan = with_lists(encoder_batch_of_two(), lambda lists: move(lists[0], wait, back, after=True))
    refused(plan, f"R3: domain rank 0 must run {wait} before {back}")


TAPS = (Point("a", 0, 1), Point("b", 2, 0))  # both on domain rank 0


@pytest.mark.parametrize("virtual_stage", [0, 2])
def test_a_return_before_the_backward_of_a_virtual_stage_with_rows_is_refused(virtual_stage):
    """Rows enter at two virtual stages of rank 0; the gradients of a microbatch go back when both have
    theirs.
    """
    plan = encoder_batch_of_two(TAPS)
    assert not problems(plan)
    assert what_happens(plan) is None
    assert plan.domain.virtual_stages_with_rows(0) == (0, 2)
    back, returned = Op(B, 1, virtual_stage=virtual_stage), Op(Kind.RETURN, 1)

    def edit(lists: Lists) -> None:
        lists[0].remove(returned)
        lists[0].insert(lists[0].index(back), returned)
        wait = Op(Kind.WAIT, 1, Kind.SHIP)
        if wait in lists[0][lists[0].index(returned) :]:
            move(lists[0], wait, returned)

    refused(with_lists(plan, edit), f"R3: domain rank 0 must run {back} before {returned}")


def test_rows_are_waited_for_before_each_virtual_stage_that_they_enter():
    wait = Op(Kind.WAIT, 1, Kind.SHIP)
    for virtual_stage in (0, 2):
        plan = with_lists(
            encoder_batch_of_two(TAPS),
            lambda lists, virtual_stage=virtual_stage: move(
                lists[0], wait, Op(F, 1, virtual_stage=virtual_stage), after=True
            ),
        )
        refused(plan, f"R3: domain rank 0 must run {wait} before {Op(F, 1, virtual_stage=virtual_stage)}")


def test_rows_for_another_virtual_stage_of_the_same_rank_are_refused():
    plan = encoder_batch_of_two(TAPS)
    route = plan.domain.routes[0]
    assert {s.point for s in route.segments} == {0, 1, 2}
    wrong = tuple(replace(s, point=2 if s.point == 1 else s.point) for s in route.segments)
    plan = with_domain(plan, routes=(replace(route, segments=wrong), plan.domain.routes[1]))
    assert problems(plan) == [
        "R5: the route of microbatch 0 does not bring each row to the place of its item"
    ]


def test_items_that_overlap_are_refused():
    plan = encoder_batch_of_two()
    items = list(plan.domain.items)
    items[1] = replace(items[1], start=items[3].start)
    (text,) = problems(with_domain(plan, items=tuple(items)))
    assert text.startswith("R5: rows have no place, or that of others: ")
