"""Messages within passes: what the verifier refuses of them, held against ranks that interleave at random."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from domain_plans import BUILDERS, Shape, make_plan, one
from edits import Lists, problems, with_lists
from random_domains import for_one_queue, random_domain
from random_ranks import DataError, DeadlockError, RandomRanks

from pipeline.ops import COLLECTIVE, PARTS, PASSES, POINT_TO_POINT, Kind, Op
from pipeline.plan import StepPlan
from pipeline.simulator import run
from pipeline.verifier import violations

SEND = Op(Kind.SEND_FORWARD, 0)
NEXT = Op(Kind.FORWARD, 1)


def a_plan() -> StepPlan:
    """Two stages of two ranks whose layers communicate, one after the other in 1F1B."""
    return make_plan(Shape(2, tp=2, collective_group=2, team=2), 3, [], "one_f_one_b")


def within(plan: StepPlan, op: Op, parts: int, behind: Op) -> StepPlan:
    """The plan with a message of the first team within a pass."""

    def edit(lists: Lists) -> None:
        lists[0].remove(op)
        lists[0].insert(lists[0].index(behind) + 1, replace(op, within=parts))

    return with_lists(plan, edit)


@pytest.mark.parametrize("parts", range(1, PARTS))
def test_what_was_made_before_a_pass_may_go_within_it(parts: int) -> None:
    """A forward takes 800: the next stage begins so many eighths of it later."""
    plan = within(a_plan(), SEND, parts, NEXT)
    assert not [text for text in problems(plan) if not text.startswith("R7")]
    timeline = run(plan.domain, lambda rank, op: 800, lambda op: 8)
    first = next(event for event in timeline.events[1] if event.op.kind is Kind.FORWARD)
    assert first.start_ns == 800 + 100 * parts + 8
    at = plan.domain.ops[0].index(replace(SEND, within=parts))
    assert timeline.ends_ns[0][at] == timeline.ends_ns[0][at - 1] == 1600


@pytest.mark.parametrize(
    "op, parts, behind, said",
    [
        (SEND, 3, Op(Kind.FORWARD, 0), "must run forward(0) before send_forward(0"),
        (SEND, PARTS, NEXT, f"cannot issue send_forward(0, within {PARTS}/{PARTS}) behind forward(1)"),
        (
            SEND,
            3,
            Op(Kind.RECV_BACKWARD, 1),
            "cannot issue send_forward(0, within 3/8) behind recv_backward(1)",
        ),
        (Op(Kind.WAIT, 1, Kind.RECV_BACKWARD), 3, NEXT, "cannot issue wait"),
        (Op(Kind.REDUCE, 0), 3, NEXT, "cannot issue reduce"),
    ],
    ids=["of its own pass", "behind all of it", "behind no pass", "a wait", "a reduction"],
)
def test_what_goes_within_a_pass_is_a_message_made_before_it(
    op: Op, parts: int, behind: Op, said: str
) -> None:
    found = problems(within(a_plan(), op, parts, behind))
    assert any(text.startswith("R3") and said in text for text in found), found


def test_messages_within_a_pass_stand_in_their_order() -> None:
    plan = within(within(a_plan(), SEND, 2, NEXT), Op(Kind.RECV_BACKWARD, 1), 3, NEXT)
    found = problems(plan)
    assert found == [
        "R3: the team of domain ranks 0 to 1 cannot issue send_forward(0, within 2/8) behind "
        "recv_backward(1, within 3/8)"
    ]


def mutated(random: Random, plan: StepPlan) -> StepPlan:
    """A plan with messages that go earlier or later within their passes, or within others."""

    def edit(lists: Lists) -> None:
        for _ in range(random.choice((1, 2, 4))):
            ops = random.choice(lists)
            places = list(_places(ops))
            if places:
                at, least, most = random.choice(places)
                ops[at] = replace(ops[at], within=random.randint(least, most))

    return with_lists(plan, edit)


def _places(ops: list[Op]) -> Iterator[tuple[int, int, int]]:
    """Places of messages behind passes, with the least and the most parts after which they may go: none if
    others behind the pass may not go within it.
    """
    for at, (before, op) in enumerate(pairwise(ops), 1):
        behind = before.kind in PASSES or before.within
        if behind and op.kind in POINT_TO_POINT | COLLECTIVE:
            after = ops[at + 1].within if at + 1 < len(ops) else 0
            yield at, max(before.within, after and 1), after or PARTS - 1


@pytest.mark.parametrize("part", range(4))
def test_whatever_hangs_random_ranks_is_refused(part: int) -> None:
    safe, hung = 0, 0
    for number in range(60):
        random = Random(f"{part}/{number}")
        plan, costs = random_domain(random, BUILDERS[random.choice([*BUILDERS])])
        plan = mutated(random, for_one_queue(plan, costs))
        if not any(op.within for ops in plan.domain.ops for op in ops):
            continue
        refused = list(violations(plan, one, single_fifo=True))
        try:
            RandomRanks(plan, number, single_queue=True).run()
        except (DataError, DeadlockError):
            hung += 1
            assert refused, number
        else:
            safe += not refused
    assert min(safe, hung) > 5, (safe, hung)
