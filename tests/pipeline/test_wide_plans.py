"""Everything that a plan may say, whether or not a schedule of ours says it yet."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from domain_plans import Shape, Work, make_plan, one
from edits import WIDE_EDITS, problems, what_happens, with_edits
from hypothesis import given, settings
from hypothesis import strategies as st
from random_ranks import RandomRanks
from wide_plans import build_in_turn, random_wide_plan, reduces, with_split_backwards

from parallel.work import Grad
from pipeline.builders import INTERLEAVED
from pipeline.builders.one_queue.serial import serialise
from pipeline.ops import BACKWARDS, ISSUED, Kind, Op
from pipeline.plan import StepPlan
from pipeline.simulator import run
from pipeline.verifier import violations


def serial(plan: StepPlan, seed: int) -> StepPlan:
    """The plan with lists for one queue a rank."""
    costs = Random(seed)
    lists = serialise(plan.domain, lambda rank, op: costs.randint(0, 50), lambda op: costs.randint(0, 20))
    return replace(plan, domain=replace(plan.domain, ops=tuple(map(tuple, lists))))


def test_random_wide_plans_hold_everything():
    seen: Counter[object] = Counter()
    for seed in range(150):
        plan = random_wide_plan(Random(seed))
        domain = plan.domain
        grads = {op.grad for ops in domain.ops for op in ops if op.kind is Kind.BACKWARD}
        halves = {op.grad for ops in domain.ops for op in ops if op.kind is Kind.ENCODE_BACKWARD}
        early = any(
            op.kind is Kind.REDUCE and {after.kind for after in ops[at:]} & BACKWARDS
            for ops in domain.ops
            for at, op in enumerate(ops)
        )
        seen.update(
            [("virtual stages", max(map(len, domain.holds))), ("team", domain.team), ("early", early)]
        )
        seen.update([("split", Grad.INPUT in grads), ("split encoders", Grad.WEIGHT in halves)])
        seen.update([("mixed", len(grads) == 3), ("frozen", *plan.frozen), ("train", plan.train)])
        seen.update([("many", any(len(batch.microbatches) > 1 for batch in domain.encoder_batches))])
        last = domain.num_virtual_stages - 1
        within = [v + 1 in held for held in domain.holds for v in held if v < last]
        seen.update([("hands on within a rank", any(within), all(within))])
        with_rows = max(len(domain.virtual_stages_with_rows(rank)) for rank in range(domain.num_ranks))
        seen.update([("rows at virtual stages of one rank", with_rows)])
    wanted = [("virtual stages", n) for n in (1, 2, 3)] + [
        ("team", 1),
        ("team", 2),
        ("early", True),
        ("split", True),
    ]
    wanted += [("split encoders", True), ("mixed", True), ("frozen", "llm"), ("many", True), ("train", False)]
    wanted += [("hands on within a rank", True, False), ("rows at virtual stages of one rank", 2)]
    assert all(seen[what] >= 5 for what in wanted), seen


@pytest.mark.parametrize("part", range(4))
def test_wide_plans_keep_all_rules_and_run_on_random_ranks(part):
    for number in range(60):
        plan = random_wide_plan(Random(f"{part}/{number}"))
        assert list(violations(plan, one)) == [], number
        RandomRanks(plan, number).run()


@pytest.mark.parametrize("part", range(4))
def test_wide_plans_for_one_queue_keep_all_rules_and_run_on_random_ranks(part):
    for number in range(40):
        before = random_wide_plan(Random(f"{part}/{number}"))
        bounds = tuple((name, 10) for name, _ in before.domain.bounds)
        before = replace(before, domain=replace(before.domain, bounds=bounds))
        after = serial(before, number)
        assert list(violations(after, one, single_fifo=True)) == [], number
        RandomRanks(after, number, single_queue=True).run()
        for old, new in zip(before.domain.ops, after.domain.ops, strict=True):
            assert sorted(map(str, old)) == sorted(str(replace(op, within=0)) for op in new)
            assert [op for op in old if op.kind not in ISSUED] == [op for op in new if op.kind not in ISSUED]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**9))
def test_domains_that_reduce_in_one_order_run_together(seed):
    """Each of them ends alone, so all of them end together: what one verifies is enough for the world."""
    early = random_wide_plan(Random(seed), max_stages=3, most=3)
    late = [[op for op in ops if not reduces(op)] for ops in early.domain.ops]
    for old, new in zip(early.domain.ops, late, strict=True):
        new += [op for op in old if reduces(op)]
    other = replace(early, domain=replace(early.domain, ops=tuple(map(tuple, late))))
    assert list(violations(other, one)) == []
    RandomRanks.together([early, other, early], seed)


@pytest.mark.parametrize("stages, vpp, microbatches", [(2, 2, 4), (4, 2, 8), (2, 3, 6), (4, 3, 8)])
def test_interleaving_takes_the_time_of_the_closed_form(stages, vpp, microbatches):
    """The bubble is that of 1F1B over the virtual stages of a rank (Narayanan et al., 2021, section 2.2)."""
    domain = make_plan(Shape(stages, vpp=vpp), microbatches, [], INTERLEAVED).domain
    timeline = run(domain, lambda r, op: {Kind.FORWARD: 10, Kind.BACKWARD: 20}.get(op.kind, 0), lambda op: 0)
    assert timeline.makespan_ns == microbatches * vpp * 30 + (stages - 1) * 30


def test_a_fold_hands_on_in_the_last_stage_without_a_message():
    domain = make_plan(Shape(3, vpp=2, fold=True), 2, [], build_in_turn).domain
    assert domain.holds == ((0, 5), (1, 4), (2, 3))
    sent = [[op.virtual_stage for op in ops if op.kind is Kind.SEND_FORWARD] for ops in domain.ops]
    assert sent == [[0, 0], [1, 1, 4, 4], [3, 3]]


def test_weight_gradients_of_ranks_that_work_together_are_in_one_order():
    work = [Work("image", m, (0, 1, 2, 3), (2, 3), num_tp_groups=2) for m in range(3)]
    shape = Shape(stages=2, pool=2, tp=2, collective_group=4, team=2)
    plan = make_plan(shape, 3, work, with_split_backwards(build_in_turn, 1))
    assert list(violations(plan, one)) == []
    assert len(plan.domain.ops) == 4
    assert plan.domain.ops[0] == plan.domain.ops[1]


# A list for each team says the same as a list for each of its ranks.


def by_rank(plan: StepPlan) -> StepPlan:
    """The same plan with a list for each rank."""
    domain = plan.domain
    size = domain.team
    ops, holds = (tuple(x for x in of for _ in range(size)) for of in (domain.ops, domain.holds))
    return replace(plan, domain=replace(domain, team=1, holds=holds, ops=ops))


@pytest.mark.parametrize("part", range(2))
def test_teams_take_the_time_of_their_ranks_and_are_serialised_alike(part):
    for number in range(40):
        random = Random(f"teams {part}/{number}")
        plan = random_wide_plan(random)
        if plan.domain.team == 1:
            continue
        times = {}

        def compute(rank: int, op: Op, times: dict = times, random: Random = random) -> int:
            return times.setdefault((rank // 2, op), random.randint(1, 50))

        alone = by_rank(plan).domain
        together, apart = (run(domain, compute, lambda op: 1 + op.index) for domain in (plan.domain, alone))
        assert apart.ends_ns == tuple(ends for ends in together.ends_ns for _ in range(2))
        lists = serialise(plan.domain, compute, lambda op: 1 + op.index)
        domain = replace(plan.domain, ops=tuple(map(tuple, lists)))
        alone = by_rank(replace(plan, domain=domain)).domain
        together, apart = (run(of, compute, lambda op: 1 + op.index, True) for of in (domain, alone))
        assert apart.ends_ns == tuple(ends for ends in together.ends_ns for _ in range(2))


# Any change that the verifier lets pass must be harmless.


@pytest.mark.parametrize("part", range(4))
def test_random_changes_of_wide_plans_that_are_accepted_still_run(part):
    accepted, refused = 0, 0
    for number in range(150):
        random = Random(f"{part}/{number}")
        plan = with_edits(random_wide_plan(random, max_stages=3, most=4), random, WIDE_EDITS)
        if problems(plan, bound=20):
            refused += what_happens(plan, number) is not None
            continue
        accepted += 1
        for seed in range(3):
            assert what_happens(plan, seed) is None, number
    # Both kinds must come up, or this test asks nothing.
    assert accepted > 10
    assert refused > 50


@pytest.mark.parametrize("part", range(2))
def test_whatever_fails_on_random_ranks_is_refused(part):
    for number in range(100):
        random = Random(f"fails {part}/{number}")
        plan = random_wide_plan(random, max_stages=3, most=4)
        if random.random() < 0.5:
            plan = serial(plan, number)
        plan = with_edits(plan, random, WIDE_EDITS)
        if what_happens(plan, number) is not None:
            assert problems(plan, bound=20), number
        elif what_happens(plan, number, single_queue=True) is not None:
            assert problems(plan, bound=20, single_fifo=True), number
