"""The levels of a plan: what ranks of the world, of a group of domains and of a domain have in common."""

from collections import Counter
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_policies import own
from planners import (
    BUDGET,
    UNIT,
    colocated,
    lengths_of,
    meta_of,
    planner,
    plans_of_all_domains,
    policies_of,
    settings_of_planners,
)

from dataloader.balance import BalancePolicy
from dataloader.balance.simple import LPT, NONE
from dataloader.dealing import DealPolicy, deal
from dataloader.global_batch import Budget
from dataloader.stream import SourceSpec, Stream
from dataloader.tokens import ItemMeta, SampleMeta, length
from pipeline.builders import ENCODE_FIRST
from pipeline.domain_plan import PlannedSample
from pipeline.plan import StepPlan, Taken

BALANCES, DEALS = own(BalancePolicy), own(DealPolicy)
LONG_STEP = replace(BUDGET, step_tokens=None, step_samples=30)


def of_domains(plan: StepPlan) -> list[list[int]]:
    """The samples that a plan's group gives each of its domains, by number in the step."""
    return [sorted(n for replica in replicas for n in replica) for replicas in plan.group.replicas]


def named(sample: PlannedSample) -> tuple[str, int, int]:
    """What the world's level knows of a sample, too."""
    return sample.source, sample.id, sample.length


def taken_at(taken: Taken, number: int) -> tuple[str, int, int]:
    return named(taken.sample(number, ()))


@settings(deadline=None, max_examples=60)
@given(settings_of_planners(), st.integers(0, 500))
def test_levels_are_equal_where_they_are_shared_and_cover_all_domains(chosen, cursor):
    planning = planner(**chosen)
    plans = plans_of_all_domains(planning, 5, cursor)
    size, number = chosen["group_size"], chosen["world"].num_domains
    assert len(planning.world.groups) == -(-number // size)
    assert {plan.world for plan in plans} == {plans[0].world}
    assert {plan.digests[0] for plan in plans} == {plans[0].digests[0]}
    covered = []
    for first in range(0, number, size):
        groups = [plan.group for plan in plans[first : first + size]]
        assert set(groups) == {groups[0]}
        assert (groups[0].number, groups[0].first) == (first // size, first)
        assert len(groups[0].replicas) == len(groups)
        covered += [groups[0].first + d for d in range(len(groups[0].replicas))]
    assert covered == list(range(number))
    for domain, plan in enumerate(plans):
        assert plan.number == domain
        names = [(name, of) for name, of, *_ in plan.levels]
        assert names == [("world", 0), ("group", domain // size), ("domain", domain)]
        assert tuple(digest for _, _, digest, _ in plan.levels) == plan.digests
        assert [content for *_, content in plan.levels] == [plan.world, plan.group, plan.domain]


@settings(deadline=None, max_examples=60)
@given(settings_of_planners(), st.integers(0, 500))
def test_groups_divide_the_step_as_dealt_and_domains_have_what_their_group_gives(chosen, cursor):
    plans = plans_of_all_domains(planner(**chosen), 5, cursor)
    taken, size = plans[0].taken, chosen["group_size"]
    dealt = deal(taken.lengths, len(plans), size)
    given_out = Counter()
    for plan in plans:
        own = of_domains(plan)
        mine = own[plan.number - plan.group.first]
        given_out.update(mine)
        assert all(dealt[n] == plan.group.number for domain in own for n in domain)
        assert all(len(replicas) == chosen["world"].replicas for replicas in plan.group.replicas)
        # A domain numbers its samples in the order of the step, and each replica trains on its own.
        assert list(map(named, plan.domain.samples)) == [taken_at(taken, n) for n in mine]
        if chosen["llm_sp"] == "uniform":
            replicas = plan.group.replicas[plan.number - plan.group.first]
            replica_of = {mine.index(n): r for r, of in enumerate(replicas) for n in of}
            for batch in plan.domain.microbatches:
                for sample, shards in zip(batch.samples, batch.layout.shards, strict=True):
                    assert {s.cp_rank // chosen["world"].llm.cp for s in shards} == {replica_of[sample]}
    assert given_out == Counter(range(len(taken)))


@pytest.mark.parametrize("balance", [NONE, LPT], ids=lambda policy: policy.name)
@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5, 32])
def test_what_a_step_trains_on_and_its_order_do_not_depend_on_groups(balance, group_size):
    changes = {"budget": LONG_STEP, "policies": policies_of(balance, ENCODE_FIRST)}
    whole = planner(5, **changes).next_step(1, 3, 0)
    plans = plans_of_all_domains(planner(5, group_size=group_size, **changes), 1, 3)
    assert {plan.taken.ids for plan in plans} == {whole.taken.ids}
    assert {plan.taken for plan in plans} == {whole.taken}
    assert {plan.world for plan in plans} == {whole.world}
    trained = Counter(named(s) for plan in plans for s in plan.domain.samples)
    assert trained == Counter(taken_at(whole.taken, n) for n in range(len(whole.taken)))


@pytest.mark.parametrize("deal_policy", DEALS.values(), ids=list(DEALS))
@pytest.mark.parametrize("world", [2, 3, 8])
def test_a_step_trains_on_the_same_samples_whatever_the_world_the_groups_and_the_policies(world, deal_policy):
    taken = planner(1, budget=LONG_STEP).next_step(1, 7, 0).taken
    choices = zip(cycle(range(1, world + 1)), BALANCES.values(), strict=False)
    for group_size, balance in choices:
        policies = replace(policies_of(balance, ENCODE_FIRST), deal=deal_policy)
        planning = planner(world, budget=LONG_STEP, policies=policies, group_size=group_size)
        plans = list(planning.all_domains(1, 7))
        assert {plan.taken for plan in plans} == {taken}
        trained = Counter(named(s) for plan in plans for s in plan.domain.samples)
        assert trained == Counter(taken_at(taken, n) for n in range(len(taken)))


def test_dealing_by_cost_is_given_what_samples_cost():
    planning = planner(4, 2, budget=LONG_STEP)
    taken = planning.next_step(1, 0, 0).taken
    metas = [meta_of(taken.sources[source], i) for source, i in zip(taken.source, taken.ids, strict=True)]
    costs = planning.domain.costing.costs(metas)
    asked = []

    def deal_all(work, sizes):
        asked.append((work.tolist(), list(sizes)))
        return [0] * len(work)

    world = replace(planning.world, deal=DealPolicy("all", deal_all, by_cost=True), group_size=3)
    replace(planning, world=world).next_step(1, 0, 0)
    encoders = costs.ns[:, 1:].sum(1)
    assert asked == [(np.stack([costs.ns[:, 0], encoders], 1).tolist(), [3, 1])]
    assert encoders.any()


def test_nobody_is_asked_who_gets_what_where_there_is_one_group():
    planning = planner(4, 2, budget=LONG_STEP)
    refuse = DealPolicy("refuse", lambda work, sizes: [], by_cost=True)
    plan = replace(planning, world=replace(planning.world, deal=refuse)).next_step(1, 0, 0)
    assert len(plan.taken) == sum(len(of) for own in plan.group.replicas for of in own)


def test_in_groups_of_one_domain_no_sample_moves_beyond_dealing():
    for balance in (NONE, LPT):
        changes = {"budget": LONG_STEP, "policies": policies_of(balance, ENCODE_FIRST), "group_size": 1}
        plans = plans_of_all_domains(planner(4, **changes), 1, 0)
        dealt = deal(plans[0].taken.lengths, 4, 1)
        for plan in plans:
            assert of_domains(plan) == [[n for n, domain in enumerate(dealt) if domain == plan.number]]


def test_in_one_group_a_policy_of_balance_alone_decides():
    plans = plans_of_all_domains(planner(4, budget=LONG_STEP, policies=policies_of(NONE, ENCODE_FIRST)), 1, 0)
    assert of_domains(plans[0]) == [list(range(domain, 30, 4)) for domain in range(4)]


# A domain's plan does not depend on strangers.


def counting(asked: list[tuple[str, int]]):
    """Metadata that note who asks for them."""

    def metas(source: str, sample: int) -> SampleMeta:
        asked.append((source, sample))
        return meta_of(source, sample)

    return metas


@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_planning_a_domain_asks_for_nothing_of_other_groups(group_size):
    asked: list[tuple[str, int]] = []
    costed: list[int] = []

    def balance(samples, bins):
        costed.append(len(samples))
        return LPT.decide(samples, bins)

    planning = planner(
        6,
        metas=counting(asked),
        lengths=lengths_of(meta_of),
        budget=LONG_STEP,
        group_size=group_size,
        policies=policies_of(BalancePolicy("counting", balance), ENCODE_FIRST),
    )
    for number in range(6):
        asked.clear()
        costed.clear()
        plan = planning.next_step(1, 0, number)
        dealt = deal(plan.taken.lengths, 6, group_size)
        mine = [n for n, group in enumerate(dealt) if group == number // group_size]
        # Once each: the metadata of the group's samples, in the order of the step.
        assert asked == [taken_at(plan.taken, n)[:2] for n in mine]
        assert len(asked) < len(plan.taken)
        # The group's samples over its domains, then those of each domain over its replicas.
        assert costed == [len(mine), *map(len, of_domains(plan))]


def test_strangers_may_be_anything_as_long_as_their_lengths_are_the_same():
    """Other items, other costs: nothing of it reaches the plan of a domain in another group."""

    def altered(meta: SampleMeta) -> SampleMeta:
        rows = length(meta) - 2  # all of it one item of 1 + rows + 1 tokens, where there is room for one
        return SampleMeta(meta.id, meta.source, 0, (ItemMeta("image", UNIT * rows, rows, 0, ()),), 0)

    planning = planner(4, budget=LONG_STEP, group_size=2)
    plans = plans_of_all_domains(planning, 1, 0)
    of_group = [{(s.source, s.id) for p in plans[g : g + 2] for s in p.domain.samples} for g in (0, 2)]
    strangers = of_group[1] - of_group[0]

    def metas(source: str, sample: int) -> SampleMeta:
        meta = meta_of(source, sample)
        changes = (source, sample) in strangers and length(meta) >= 3
        return altered(meta) if changes else meta

    other = planner(4, budget=LONG_STEP, group_size=2, metas=metas)
    assert all(length(metas(*name)) == length(meta_of(*name)) for name in strangers)
    assert [other.next_step(1, 0, number) for number in (0, 1)] == plans[:2]
    assert [other.next_step(1, 0, number).digests for number in (2, 3)] != [p.digests for p in plans[2:]]


def test_a_policy_of_balance_sees_the_costs_of_its_group_alone():
    """Samples of equal length and very different cost: each group balances its own."""

    def metas(source: str, sample: int) -> SampleMeta:
        if sample % 4:
            return SampleMeta(sample, source, 29, (), 0)
        return SampleMeta(sample, source, 8, (ItemMeta("image", UNIT * 20, 20, 0, ()),), 0)

    stream = Stream({"pairs": SourceSpec(32, 8, 1)}, seed=1)
    budget = Budget(microbatch_tokens=40, step_tokens=None, step_samples=32, on_long="error")
    for group_size in (1, 2, 32):
        planning = planner(4, metas=metas, stream=stream, budget=budget, group_size=group_size)
        plans = plans_of_all_domains(planning, 1, 0)
        costly = [sum(length_with_items(s, metas) for s in plan.domain.samples) for plan in plans]
        groups = [costly[first : first + group_size] for first in range(0, 4, group_size)]
        assert sum(costly) == 8
        assert all(max(of) - min(of) <= 1 for of in groups)


def length_with_items(sample: PlannedSample, metas) -> int:
    return len(metas(sample.source, sample.id).items)


# Verification and digests, level by level.


def test_another_cursor_frozen_component_or_order_of_reductions_is_another_world():
    plan = planner(4, 2, group_size=2).next_step(1, 0, 1)
    others = [
        planner(4, 2, group_size=2).next_step(1, 1, 1),
        planner(4, 2, group_size=2, frozen=lambda step: ("eye",)).next_step(1, 0, 1),
        replace(plan, domain=replace(plan.domain, reductions=plan.domain.reductions[::-1])),
        planner(4, 2, group_size=2, budget=replace(BUDGET, step_tokens=149)).next_step(1, 0, 1),
    ]
    assert all(other.digests[0] != plan.digests[0] for other in others[:3])
    assert (others[3].digests[0] != plan.digests[0]) == (others[3].taken != plan.taken)


def test_another_balance_is_another_group_and_another_schedule_another_domain_alone():
    by_cost = planner(4, 2, group_size=2, budget=LONG_STEP)
    in_turn = planner(4, 2, group_size=2, budget=LONG_STEP, policies=policies_of(NONE, ENCODE_FIRST))
    one, other = by_cost.next_step(1, 0, 1), in_turn.next_step(1, 0, 1)
    assert [a == b for a, b in zip(one.digests, other.digests, strict=True)] == [True, False, False]
    queued = planner(4, 2, group_size=2, budget=LONG_STEP, single_queue=True).next_step(1, 0, 1)
    assert [a == b for a, b in zip(one.digests, queued.digests, strict=True)] == [True, True, False]


def test_a_domain_is_planned_alike_wherever_it_stands_in_a_world_of_one_group_or_more():
    """Domains that are dealt the same samples make the same plan of them, but for which nodes rows cross."""
    metas = [meta_of("pairs", i) for i in range(12)]
    alone = planner(world=colocated(1, 2)).evaluation(1, metas, 1)
    in_pair = planner(world=colocated(4, 2), group_size=2).evaluation(1, metas, 1, 0)
    assert replace(alone.domain, routes=()) == replace(in_pair.domain, routes=())
    routes = zip(alone.domain.routes, in_pair.domain.routes, strict=True)
    assert all(one is other or one.segments == other.segments for one, other in routes)
