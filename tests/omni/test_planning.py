from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, product
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planners import (
    BUDGET,
    POLICIES,
    SCHEDULES,
    SHARING,
    SOURCES,
    UNIT,
    colocated,
    meta_of,
    planner,
    plans_of_all_domains,
    policies_of,
    settings_of_planners,
    table,
)

from dataloader.balance.simple import LPT, NONE
from dataloader.format import DataError
from dataloader.global_batch import Budget
from dataloader.pairing import PairingPolicy
from dataloader.pairing.simple import IN_ORDER, pair_in_order
from dataloader.stream import SourceSpec, Stream
from dataloader.tokens import ItemMeta, SampleMeta, length
from omni.config import ConfigError
from omni.llm_config import LLMConfig
from omni.llm_sections import MoEConfig
from omni.models.llm import llm_work
from omni.planning.planner import Planner
from omni.planning.work import collective_group_size
from parallel.layout import Layout, arrange
from parallel.placements import COLOCATED, DISAGGREGATED, STAGE0, PlacementPolicy
from pipeline.builders import AUTO, ENCODE_FIRST, JOINT, JOINT_UNIFORM, JOINT_ZERO_BUBBLE_H1, ONE_F_ONE_B
from pipeline.builders.passes import held_at_most
from pipeline.builders.schedule import candidates_of
from pipeline.costs import plan_memory, simulate
from pipeline.domain_plan import DomainPlan, EncoderBatch
from pipeline.ops import Kind, Op
from pipeline.plan import StepPlan
from pipeline.rules.memory import peaks


def trained_on(plans: Iterable[StepPlan]) -> Counter:
    """The samples that microbatches really contain."""
    return Counter(
        (plan.domain.samples[i].source, plan.domain.samples[i].id)
        for plan in plans
        for batch in plan.domain.microbatches
        for i in batch.samples
    )


def taken_by(plan: StepPlan) -> Counter:
    """The samples that the step takes of the stream."""
    return Counter((plan.taken.sources[n], i) for n, i in zip(plan.taken.source, plan.taken.ids, strict=True))


def in_order(plan: StepPlan) -> list[tuple[str, int]]:
    """The samples that the step takes, in the order of the stream."""
    samples = (plan.taken.sample(number, ()) for number in range(len(plan.taken)))
    return [(sample.source, sample.id) for sample in samples]


def kinds_of_ops(plans: Iterable[StepPlan]) -> set[Kind]:
    return {op.kind for plan in plans for ops in plan.domain.ops for op in ops}


def packed_tokens(domain: DomainPlan, microbatch: int, budget: Budget) -> list:
    """What stands at each position of a pack: (sample, item) on the rows of an item, else None."""
    out: list = []
    for i in domain.microbatches[microbatch].samples:
        meta = planner(budget=budget).world.meta(domain.samples[i].source, domain.samples[i].id)
        out.append(None)  # bos
        for text in range(meta.text_tokens + 1):
            for number, item in enumerate(meta.items):
                if item.at == text:
                    out += [(i, number)] * item.rows + [None]
            if text < meta.text_tokens:
                out.append(None)
    return out


def domains_of(chosen: dict, cursor: int) -> list[DomainPlan]:
    """What all domains of a planner plan for step 5."""
    return [plan.domain for plan in plans_of_all_domains(planner(**chosen), 5, cursor)]


@settings(deadline=None, max_examples=60)
@given(settings_of_planners(), st.integers(0, 500))
def test_every_sample_of_the_step_is_in_exactly_one_microbatch(chosen, cursor):
    plans = plans_of_all_domains(planner(**chosen), 5, cursor)
    for plan in plans:
        places = Counter(i for batch in plan.domain.microbatches for i in batch.samples)
        assert places == Counter(range(len(plan.domain.samples)))
        assert (plan.step, plan.taken.cursor, plan.cost_table) == (5, cursor, 4)
    assert trained_on(plans) == taken_by(plans[0])
    assert sum(len(plan.domain.samples) for plan in plans) == len(plans[0].taken)


@settings(deadline=None, max_examples=60)
@given(settings_of_planners(), st.integers(0, 500))
def test_no_microbatch_exceeds_its_budget(chosen, cursor):
    world, most = chosen["world"], chosen["budget"].microbatch_tokens
    for domain in domains_of(chosen, cursor):
        for batch in domain.microbatches:
            assert batch.layout.lengths == tuple(domain.samples[i].length for i in batch.samples)
            tokens = sum(batch.layout.lengths)
            held = [batch.layout.local_tokens(cp_rank) for cp_rank in range(world.pool)]
            if SHARING[chosen["llm_sp"]].finds_room:
                assert 0 < tokens <= most * world.pool or len(batch.samples) == 1
                assert max(held) <= max(most, -(-tokens // world.pool))
            else:
                assert 0 < tokens <= most * world.replicas
                assert max(held) <= (most if chosen["llm_sp"] == "uniform" else 2 * most)
            work = [batch.share(cp_rank) for cp_rank in range(world.pool)]
            assert [share.tokens for share in work] == held
            assert sum(share.squares for share in work) == sum(n * n for n in batch.layout.lengths)
            if chosen["llm_sp"] == "uniform":
                # Each replica has its own pack, cut evenly over its cp ranks.
                for first in range(0, world.pool, world.llm.cp):
                    assert sum(held[first : first + world.llm.cp]) <= most
                for shards, n in zip(batch.layout.shards, batch.layout.lengths, strict=True):
                    assert {piece.length for piece in shards} <= {n // world.llm.cp, -(-n // world.llm.cp)}
                    assert len({piece.cp_rank // world.llm.cp for piece in shards}) == 1


@settings(deadline=None, max_examples=60)
@given(settings_of_planners(), st.integers(0, 500))
def test_items_start_where_their_rows_stand(chosen, cursor):
    for domain in domains_of(chosen, cursor):
        for m, batch in enumerate(domain.microbatches):
            tokens = packed_tokens(domain, m, chosen["budget"])
            assert len(tokens) == sum(batch.layout.lengths)
            items = [item for item in domain.items if item.microbatch == m]
            for item in items:
                rows = tokens[item.start : item.start + item.rows]
                assert rows == [(item.sample, item.index)] * item.rows
            assert sum(item.rows for item in items) == sum(token is not None for token in tokens)


@settings(deadline=None, max_examples=60)
@given(settings_of_planners(), st.integers(0, 500))
def test_encoder_batches_hold_every_item_once_and_add_up(chosen, cursor):
    world = chosen["world"]
    for domain in domains_of(chosen, cursor):
        items = domain.items
        held = [number for encoder_batch in domain.encoder_batches for number in encoder_batch.items]
        assert sorted(held) == list(range(len(items)))
        for encoder_batch in domain.encoder_batches:
            assert {items[i].component for i in encoder_batch.items} == {encoder_batch.component}
            assert {items[i].microbatch for i in encoder_batch.items} == set(encoder_batch.microbatches)
            assert list(encoder_batch.microbatches) == sorted(set(encoder_batch.microbatches))
            assert encoder_batch.layout.lengths == tuple(items[i].tokens for i in encoder_batch.items)
            assert encoder_batch.tp == world.encoder_tp[encoder_batch.component]
            put_out = Counter()
            for block in (block for blocks in encoder_batch.outputs for block in blocks):
                rows = range(block.first, block.first + block.rows)
                put_out.update((block.item, block.point, row) for row in rows)
            assert put_out == Counter(
                (i, 0, row) for i in encoder_batch.items for row in range(items[i].rows)
            )
            tp_groups = world.tp_groups(encoder_batch.component)
            everyone = tuple(rank for tp_group in tp_groups for rank in tp_group)
            assert encoder_batch.ranks in (*tp_groups, everyone)
            is_shared = encoder_batch.layout.is_cut
            assert is_shared == (encoder_batch.layout.num_cp_ranks > 1)
            assert not (is_shared and chosen["encoder_sp"] == "none")
            for shards, tiles in zip(encoder_batch.layout.shards, encoder_batch.tiles, strict=True):
                assert all(shard.start % UNIT == 0 for shard in shards), "cut between rows"
                assert bool(tiles) == (len(shards) > 1)


def rows_of(encoder_batch: EncoderBatch, domain: DomainPlan) -> list[tuple[int, tuple[int, int]]]:
    """(rank, (microbatch, packed position)) of every row of an encoder batch, one at a time, in each rank's
    order.
    """
    out = []
    for tp_group in range(encoder_batch.layout.num_cp_ranks):
        rows = []
        for number, shards in zip(encoder_batch.items, encoder_batch.layout.shards, strict=True):
            item = domain.items[number]
            for shard in shards:
                if shard.cp_rank == tp_group:
                    first, stop = shard.start // UNIT, (shard.start + shard.length) // UNIT
                    rows += [(item.microbatch, item.start + row) for row in range(first, stop)]
        share, rest = divmod(len(rows), encoder_batch.tp)
        ranks = encoder_batch.ranks[tp_group * encoder_batch.tp : (tp_group + 1) * encoder_batch.tp]
        holders = [rank for t, rank in enumerate(ranks) for _ in range(share + (t < rest))]
        out += list(zip(holders, rows, strict=True))
    return out


def holders_of(domain: DomainPlan, microbatch: int) -> list[tuple[int, int]]:
    """(domain rank of the first stage, index among its tokens) of every packed token."""
    layout = domain.microbatches[microbatch].layout
    filled: Counter = Counter()
    tokens = []
    for shards in layout.shards:
        for shard in shards:
            for _ in range(shard.length):
                tokens.append((shard.cp_rank, filled[shard.cp_rank]))
                filled[shard.cp_rank] += 1
    share = {cp_rank: max(1, -(-filled[cp_rank] // domain.tp)) for cp_rank in range(domain.pool)}
    return [(cp_rank * domain.tp + at // share[cp_rank], at % share[cp_rank]) for cp_rank, at in tokens]


@settings(deadline=None, max_examples=60)
@given(settings_of_planners(), st.integers(0, 500))
def test_routes_take_each_row_from_its_encoder_to_its_position(chosen, cursor):
    for domain in domains_of(chosen, cursor):
        for m in range(len(domain.microbatches)):
            # The rows of a rank lie batch by batch, item by item, with those for other microbatches.
            holders = holders_of(domain, m)
            wanted, filled = set(), Counter()
            for encoder_batch in domain.encoder_batches:
                for rank, (of, position) in (
                    rows_of(encoder_batch, domain) if m in encoder_batch.microbatches else ()
                ):
                    if of == m:
                        wanted.add((rank, filled[rank], *holders[position]))
                    filled[rank] += 1
            route = domain.routes[m]
            assert (route is None) == (not wanted)
            if route is not None:
                moves = [
                    (s.source, s.source_start + i, s.destination, s.destination_start + i)
                    for s in route.segments
                    for i in range(s.length)
                ]
                assert len(moves) == len(wanted)
                assert set(moves) == wanted
                assert (route.transport == "local") == route.is_local


@settings(deadline=None, max_examples=100)
@given(settings_of_planners(), st.integers(0, 500))
def test_every_plan_passes_the_verifier(chosen, cursor):
    planning = planner(**chosen)
    for plan in plans_of_all_domains(planning, 5, cursor):
        planning.verify(plan)
        domain = plan.domain
        layout = planning.domain.arrangement.llm
        schedules = candidates_of(chosen["policies"].schedule, layout.vpp, layout.pp)
        for team in domain.teams:
            for number in domain.holds[team]:
                most = max(schedule.in_flight(domain, number) for schedule in schedules)
                assert most_in_flight(domain.ops[team], number) <= most


def most_in_flight(ops: Sequence[Op], virtual_stage: int) -> int:
    """The most microbatches that have passed a virtual stage forward and not back."""
    here = [op for op in ops if op.virtual_stage == virtual_stage]
    steps = [(op.kind is Kind.FORWARD) - (op.kind is Kind.BACKWARD and op.makes_weight) for op in here]
    return max(accumulate(steps), default=0)


def test_replicas_of_a_domain_pass_their_packs_together():
    world = arrange(Layout(tp=2, dp=4), {"eye": 1, "ear": 1}, COLOCATED, 0, replicas=2)
    budget = replace(BUDGET, step_tokens=None, step_samples=9)
    plans = plans_of_all_domains(planner(world=world, budget=budget), 1, 0)
    assert len(plans) == 2
    for domain in (plan.domain for plan in plans):
        assert (domain.pool, domain.tp, domain.collective_group) == (2, 2, 2)
        cp_ranks = [{s.cp_rank for s in batch.layout.shards for s in s} for batch in domain.microbatches]
        assert cp_ranks[0] == {0, 1}
        assert all(of <= {0, 1} for of in cp_ranks)


def test_ranks_that_the_statements_of_layers_connect_are_one_collective_group():
    sizes = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64}

    def collective_group(layout: Layout, pool: int = 1, replicas: int = 1, experts: int = 0) -> int:
        world = arrange(layout, {}, COLOCATED, 0, replicas)
        # The first virtual stage is dense: the last alone says that experts connect ranks.
        moe = MoEConfig(experts=experts, ffn=32, dense_layers=2)
        return collective_group_size(llm_work(LLMConfig(**sizes, moe=moe), 64, layout, 4), world, pool)

    assert collective_group(Layout(dp=2, pp=2)) == 1
    assert collective_group(Layout(tp=2, pp=2, dp=2)) == 2
    assert collective_group(Layout(tp=2, cp=2, dp=2), pool=2) == 4
    assert collective_group(Layout(cp=2, dp=2), pool=2, replicas=2) == 4
    assert collective_group(Layout(tp=2, dp=2), pool=2, replicas=2) == 4
    assert collective_group(Layout(tp=2, dp=4, pp=2, ep=4), experts=4, replicas=2) == 4
    assert collective_group(Layout(tp=2, cp=3, dp=2, ep=4), pool=3, experts=4, replicas=2) == 12


def test_components_live_where_their_placement_says():
    def homes(placement: PlacementPolicy, beside: int = 0) -> tuple:
        world = arrange(Layout(tp=2, pp=2, dp=2), {"eye": 2, "ear": 1}, placement, beside)
        return planner(world=world).next_step(1, 0, 0).domain.homes

    assert homes(COLOCATED) == ((0, 4), (0, 4), (0, 4))
    assert homes(STAGE0) == ((0, 2), (0, 2), (0, 4))
    assert homes(DISAGGREGATED, 4) == ((4, 6), (4, 6), (0, 4))


def test_long_items_are_shared_where_the_policy_says_so():
    def meta(source, sample):
        return SampleMeta(sample, source, 1, (ItemMeta("image", 4000, 1000, 0, ()),), 0)

    budget = Budget(2000, None, 1, "error")
    world = arrange(Layout(pp=2), {"eye": 1, "ear": 1}, COLOCATED, 0)
    for schedule in SCHEDULES:
        policies = policies_of(LPT, schedule)
        own, shared = (
            planner(world=world, metas=meta, budget=budget, encoder_sp=policy, policies=policies)
            .next_step(1, 0, 0)
            .domain.encoder_batches
            for policy in ("none", "all")
        )
        # A schedule that places encoder batches may choose the second stage, which waits for the first.
        places = schedule.encoder_batches or schedule.candidates
        assert [encoder_batch.ranks for encoder_batch in own] in ([[(0,)], [(1,)]] if places else [[(0,)]])
        assert [
            (encoder_batch.ranks, encoder_batch.layout.num_cp_ranks, encoder_batch.rows)
            for encoder_batch in shared
        ] == [((0, 1), 2, (500, 500))]


@pytest.mark.parametrize("vpp, pp", [(1, 3), (2, 2)])
@pytest.mark.parametrize("single_queue", [False, True])
def test_auto_takes_what_the_best_of_its_candidates_takes(vpp, pp, single_queue):
    world = arrange(Layout(pp=pp, vpp=vpp), {"eye": 1, "ear": 1}, COLOCATED, 0)

    def taken(schedule):
        own = planner(
            world=world,
            policies=policies_of(LPT, schedule),
            single_queue=single_queue,
            table=table(pp * vpp),
            budget=Budget(36, 300, None, "drop"),
        )
        return simulate(own.next_step(1, 0, 0).domain, own.domain.table, single_queue).makespan_ns

    candidates = candidates_of(AUTO, vpp, 2)
    assert len(candidates) > 1
    assert taken(AUTO) == min(map(taken, candidates))


def test_auto_takes_the_quickest_plan_that_fits_and_names_its_schedule():
    world = arrange(Layout(pp=3), {"eye": 1, "ear": 1}, COLOCATED, 0)
    own = planner(
        world=world, policies=policies_of(LPT, AUTO), table=table(3), budget=Budget(36, 300, None, "drop")
    )
    refused = ["zero_bubble_h1_5", "joint_zero_bubble_h1_5"]  # tried where those of H2 do not fit

    def taken():
        fitting = replace(own, beyond=lambda plan, closely=True: int(plan.domain.schedule in refused))
        return fitting.next_step(1, 0, 0).domain

    makespans = []
    for _ in candidates_of(AUTO, 1, 4):
        chosen = taken()
        assert chosen.schedule not in refused
        makespans.append(simulate(chosen, own.domain.table).makespan_ns)
        refused.append(chosen.schedule)
    assert makespans == sorted(makespans)
    assert sorted(refused[2:]) == sorted(policy.name for policy in candidates_of(AUTO, 1, 4))
    held = {name: 9 - (name == refused[4]) for name in refused}
    own = replace(own, beyond=lambda plan, closely=True: held.get(plan.domain.schedule, 10))
    least = own.next_step(1, 0, 0).domain
    assert least.schedule == refused[4], "where none fits, the one that holds least goes on to be refused"


def test_a_plan_that_holds_too_much_looked_at_closely_is_planned_otherwise():
    """By likely ranks each candidate fits, and closely one alone does that is planned instead of another."""
    world = arrange(Layout(pp=3), {"eye": 1, "ear": 1}, COLOCATED, 0)
    own = planner(
        world=world, policies=policies_of(LPT, AUTO), table=table(3), budget=Budget(36, 300, None, "drop")
    )
    fits = "zero_bubble_h1_5"
    own = replace(own, beyond=lambda plan, closely=True: int(closely and plan.domain.schedule != fits))
    assert own.next_step(1, 0, 0).domain.schedule == fits


@pytest.mark.parametrize("pp", [1, 3])
def test_where_no_candidate_fits_a_step_has_as_few_rounds_as_do(pp):
    costs = table(pp)
    eye = replace(costs.parts["eye"], kept_token=100)
    own = planner(
        world=arrange(Layout(pp=pp), {"eye": 1, "ear": 1}, COLOCATED, 0),
        policies=policies_of(LPT, AUTO),
        table=replace(costs, parts={**costs.parts, "eye": eye}),
        budget=Budget(36, 1200, None, "drop"),
    )

    def held(plan):
        kept = plan_memory(plan.domain, own.domain.table)
        of_eye = replace(plan, domain=replace(plan.domain, bounds=(("eye", 0),)))
        return max(peak.bytes for peak in peaks(of_eye, kept))

    def planned(most):
        return replace(own, beyond=lambda plan, closely=True: ceil(held(plan) - most)).next_step(1, 0, 0)

    quickest = own.next_step(1, 0, 0)
    assert quickest.domain.rounds == 1
    fewer, more = planned(0.7 * held(quickest)), planned(0.3 * held(quickest))
    assert 1 < fewer.domain.rounds < more.domain.rounds
    for plan, share in ((fewer, 0.7), (more, 0.3)):
        assert held(plan) <= share * held(quickest)
        own.verify(plan)
    just_in_time = replace(own, domain=replace(own.domain, schedule=ONE_F_ONE_B)).next_step(1, 0, 0)
    takes = [simulate(plan.domain, own.domain.table).makespan_ns for plan in (quickest, fewer, just_in_time)]
    assert takes == sorted(takes)
    never = planned(0)
    assert held(never) <= held(more), "the one that holds least goes on to be refused"


def test_auto_holds_twice_the_activations_only_where_it_is_known_what_fits():
    deep = {"zero_bubble_h2", "joint_zero_bubble_h2"}
    assert deep <= {policy.name for policy in candidates_of(AUTO, 1, 4)}
    assert not deep & {policy.name for policy in candidates_of(AUTO, 1, 4, guarded=False)}
    world = arrange(Layout(pp=4), {"eye": 1, "ear": 1}, COLOCATED, 0)
    own = planner(
        world=world, policies=policies_of(LPT, AUTO), table=table(4), budget=Budget(30, 400, None, "drop")
    )
    assert own.next_step(1, 0, 0).domain.schedule in deep
    unguarded = replace(own, domain=replace(own.domain, guarded=False))
    assert unguarded.next_step(1, 0, 0).domain.schedule not in deep


def test_auto_holds_half_as_much_more_where_twice_the_activations_do_not_fit():
    world = arrange(Layout(pp=4), {"eye": 1, "ear": 1}, COLOCATED, 0)
    own = planner(
        world=world, policies=policies_of(LPT, AUTO), table=table(4), budget=Budget(30, 400, None, "drop")
    )

    def most(plan):
        return max(held_at_most(ops)[part] for part, ops in enumerate(plan.domain.ops[:4]))

    chosen = replace(own, beyond=lambda plan, closely=True: most(plan) - 5).next_step(1, 0, 0)
    assert chosen.domain.schedule in ("zero_bubble_h1_5", "joint_zero_bubble_h1_5")
    assert most(chosen) == 5
    own.verify(chosen)


@pytest.mark.parametrize("schedule", [ENCODE_FIRST, ONE_F_ONE_B, JOINT_UNIFORM, JOINT, JOINT_ZERO_BUBBLE_H1])
def test_microbatches_are_in_the_order_that_suits_the_schedule(schedule):
    def samples(pairing):
        own = planner(
            world=arrange(Layout(pp=2), {"eye": 1, "ear": 1}, COLOCATED, 0),
            policies=replace(policies_of(LPT, schedule), pairing=pairing),
            table=table(2),
            budget=Budget(30, 300, None, "drop"),
        )
        plan = own.next_step(1, 0, 0)
        own.verify(plan)
        return [[plan.domain.samples[i].id for i in batch.samples] for batch in plan.domain.microbatches]

    backwards = PairingPolicy("either", pair_in_order, filled=(lambda *of: pair_in_order(*of)[::-1],))
    assert samples(backwards) == samples(IN_ORDER)[:: -1 if schedule.fills_gaps else 1]


def test_of_several_orders_for_schedules_that_fill_gaps_the_quickest_is_taken():
    def in_order(*of):
        return pair_in_order(*of)

    def backwards(*of):
        return pair_in_order(*of)[::-1]

    def step_ns(*filled, step):
        pairing = PairingPolicy("either", pair_in_order, filled=filled)
        own = planner(
            world=arrange(Layout(pp=4), {"eye": 1, "ear": 1}, COLOCATED, 0),
            policies=replace(policies_of(LPT, JOINT), pairing=pairing),
            table=table(4),
            budget=Budget(30, 400, None, "drop"),
        )
        plan = own.next_step(step, 400 * step, 0)
        own.verify(plan)
        return simulate(plan.domain, own.domain.table).makespan_ns

    pairs = [(step_ns(in_order, step=step), step_ns(backwards, step=step)) for step in range(1, 5)]
    assert any(first > second for first, second in pairs)
    both = [step_ns(in_order, backwards, step=step) for step in range(1, 5)]
    assert both == [min(two) for two in pairs]


def test_a_bound_on_activations_of_encoders_is_kept_by_joint_schedules_and_refuses_others():
    world = arrange(Layout(pp=2), {"eye": 1, "ear": 1}, COLOCATED, 0)

    def bounded(schedule, most):
        costs = table(2)
        eye = replace(costs.parts["eye"], kept_token=100)
        return planner(
            world=world,
            policies=policies_of(LPT, schedule),
            table=replace(costs, parts={**costs.parts, "eye": eye}),
            budget=Budget(36, 300, None, "drop"),
            encoder_bytes=most,
        )

    roomy = bounded(JOINT, 10**12)
    plan = roomy.next_step(1, 0, 0)
    kept = plan_memory(plan.domain, roomy.domain.table)
    sizes = [
        kept(encoder_batch.ranks[0], Op(Kind.ENCODE, c))
        for c, encoder_batch in enumerate(plan.domain.encoder_batches)
    ]
    most = max(max(sizes), sum(sizes) // 3)
    tight = bounded(JOINT, most)
    tight.verify(tight.next_step(1, 0, 0))
    first = bounded(ENCODE_FIRST, most)
    with pytest.raises(ConfigError, match=rf"pipeline\.encoder_bytes={most}: rank \d+ would hold .* or more"):
        first.verify(first.next_step(1, 0, 0))


@pytest.mark.parametrize(("stages", "link"), [(2, "inside"), (4, "across")])
def test_before_routes_are_planned_rows_travel_over_the_slowest_link_of_their_domain(stages, link):
    """The made-up nodes are of two ranks."""
    told = []

    def decide(domain, facts):
        _, message_ns = facts.costs
        told.extend((domain, m, message_ns(Op(Kind.SHIP, m))) for m in range(len(domain.microbatches)))
        return JOINT.decide(domain, facts)

    own = planner(pp=stages, policies=policies_of(LPT, replace(JOINT, decide=decide)))
    own.next_step(1, 0, 0)
    assert told
    for domain, m, ns in told:
        rows = sum(item.rows for item in domain.items if item.microbatch == m)
        link_of = getattr(own.domain.transport.links, link)
        assert ns == link_of.message_ns(rows * own.domain.table.row_bytes // stages)


def test_a_bound_on_activations_of_encoders_has_a_say_in_who_encodes_what(monkeypatch):
    """Whatever the bound, no more steps are refused than if encoder batches were dealt by their time
    alone.
    """
    world = arrange(Layout(dp=2, pp=2), {"eye": 1, "ear": 1}, COLOCATED, 0, replicas=2)
    costs = table(2)
    eye = replace(costs.parts["eye"], kept_token=100)

    def refused(most):
        own = planner(
            world=world,
            policies=policies_of(LPT, JOINT),
            table=replace(costs, parts={**costs.parts, "eye": eye}),
            budget=Budget(36, 300, None, "drop"),
            encoder_bytes=most,
        )
        found, cursor = 0, 0
        for step in range(1, 5):
            plan = own.next_step(step, cursor, 0)
            cursor = plan.taken.next_cursor
            try:
                own.verify(plan)
            except ConfigError:
                found += 1
        return found

    bounds = range(1600, 3200, 200)
    heeded = [refused(most) for most in bounds]
    monkeypatch.setattr("pipeline.builders.joint.order.within", lambda dealt, *of: list(dealt))
    unheeded = [refused(most) for most in bounds]
    assert all(a <= b for a, b in zip(heeded, unheeded, strict=True))
    assert sum(heeded) < sum(unheeded)


# The same samples, whoever computes them.

WORLDS = [
    colocated(1, 1),
    colocated(2, 1),
    colocated(3, 2),
    arrange(Layout(tp=2, cp=2, dp=2, pp=2), {"eye": 2, "ear": 4}, COLOCATED, 0, replicas=2),
    arrange(Layout(dp=2), {"eye": 1, "ear": 3}, DISAGGREGATED, 3),
    arrange(Layout(dp=2, pp=3), {"eye": 1, "ear": 2}, STAGE0, 0),
]


@pytest.mark.parametrize("on_long", ["drop", "truncate"])
def test_samples_of_a_step_do_not_depend_on_layout_or_policies(on_long):
    budget = replace(BUDGET, microbatch_tokens=20, on_long=on_long)
    cursor = 0
    worlds = list(product(WORLDS, POLICIES))
    choices = list(
        product((("uniform", "none"), ("dynamic", "dynamic")), ((False, 32), (True, 1), (False, 2)))
    )
    for step in (1, 2):
        whole = []
        for number, (world, policies) in [*enumerate(worlds)][step % 2 :: 2]:  # with one of the choices
            (llm_sp, encoder_sp), (single, group_size) = choices[(number // 2 + step) % len(choices)]
            planning = planner(
                world=world,
                llm_sp=llm_sp,
                encoder_sp=encoder_sp,
                policies=policies,
                budget=budget,
                single_queue=single,
                group_size=group_size,
            )
            whole.append(plans_of_all_domains(planning, step, cursor))
        taken = {plan.taken for plans in whole for plan in plans}
        assert len(taken) == 1
        assert all(trained_on(plans) == taken_by(plans[0]) for plans in whole)
        cursor = taken.pop().next_cursor


def test_steps_continue_where_the_last_one_ended_and_lose_nothing():
    budget = replace(BUDGET, microbatch_tokens=20, on_long="drop")
    planning = planner(2, budget=budget)
    cursor, seen = 0, []
    for step in range(1, 12):
        plan = planning.next_step(step, cursor, 0)
        taken = plan.taken
        assert taken.cursor == cursor
        assert taken.next_cursor == cursor + len(taken) + len(taken.skipped)
        at = [planning.world.samples.stream.at(position)[:2] for position in range(cursor, taken.next_cursor)]
        skipped = set(taken.skipped)
        assert [passed for passed in at if passed not in skipped] == in_order(plan)
        assert taken_by(plan) + Counter(taken.skipped) == Counter(at)
        seen += at
        cursor = taken.next_cursor
    assert seen == [planning.world.samples.stream.at(position)[:2] for position in range(cursor)]


def test_a_step_takes_as_many_tokens_as_fit():
    planning = planner()
    cursor = 0
    for step in range(1, 10):
        taken = planning.next_step(step, cursor, 0).taken
        assert taken.tokens == sum(taken.lengths) <= 150
        following = length(meta_of(*planning.world.samples.stream.at(taken.next_cursor)[:2]))
        assert taken.tokens + following > 150
        cursor = taken.next_cursor


def test_a_step_takes_at_least_one_sample_however_small_its_budget():
    plan = planner(budget=replace(BUDGET, step_tokens=1)).next_step(1, 0, 0)
    assert len(plan.taken) == len(plan.domain.samples) == 1


def test_a_step_of_a_number_of_samples_takes_that_number():
    budget = Budget(microbatch_tokens=20, step_tokens=None, step_samples=7, on_long="drop")
    plans = plans_of_all_domains(planner(3, budget=budget), 1, 0)
    assert [len(plan.taken) for plan in plans] == [7] * 3
    assert sum(len(plan.domain.samples) for plan in plans) == 7
    assert plans[0].taken.next_cursor == 7 + len(plans[0].taken.skipped)


@pytest.mark.parametrize("on_long", ["drop", "truncate"])
def test_a_step_has_all_samples_it_was_asked_for_where_the_data_are_fewer(on_long):
    """The 65 samples of the stream come again and again: each of the step's is planned where it comes."""
    budget = Budget(microbatch_tokens=20, step_tokens=None, step_samples=400, on_long=on_long)
    planning = planner(3, budget=budget, group_size=2)
    assert budget.step_samples > 2 * planning.world.samples.stream.cycle
    plans = plans_of_all_domains(planning, 1, 7)
    assert len(plans[0].taken) == 400
    assert bool(plans[0].taken.skipped) == (on_long == "drop")
    assert trained_on(plans) == taken_by(plans[0])
    assert max(taken_by(plans[0]).values()) > 2
    for plan in plans:
        planning.verify(plan)


# Long samples.


def takes_long(on_long: str) -> list[StepPlan]:
    budget = Budget(microbatch_tokens=16, step_tokens=None, step_samples=20, on_long=on_long)
    return plans_of_all_domains(planner(2, budget=budget), 1, 0)


def test_long_samples_are_dropped_and_named():
    plans = takes_long("drop")
    for plan in plans:
        assert plan.taken.skipped == plans[0].taken.skipped != ()
        assert all(length(meta_of(*skipped)) > 16 for skipped in plan.taken.skipped)
        for sample in plan.domain.samples:
            assert sample.length == length(meta_of(sample.source, sample.id)) <= 16


@pytest.mark.parametrize("on_long", ["drop", "truncate"])
def test_samples_that_are_truncated_are_known_of_a_step(on_long):
    plan = takes_long(on_long)[0]
    taken = plan.taken
    samples = [(taken.sources[source], i) for source, i in zip(taken.source, taken.ids, strict=True)]
    long = [number for number, sample in enumerate(samples) if length(meta_of(*sample)) > 16]
    assert bool(long) == (on_long == "truncate")
    budget = Budget(microbatch_tokens=16, step_tokens=None, step_samples=20, on_long=on_long)
    assert planner(2, budget=budget).world.truncated(taken) == long


def test_long_samples_are_truncated_and_their_cut_items_left_out():
    plans = takes_long("truncate")
    assert sum(len(plan.domain.samples) for plan in plans) == 20
    cut = items = whole = 0
    for domain in (plan.domain for plan in plans):
        metas = [meta_of(sample.source, sample.id) for sample in domain.samples]
        assert all(sample.length <= 16 for sample in domain.samples)
        cut += sum(s.length < length(meta) for s, meta in zip(domain.samples, metas, strict=True))
        planned = Counter(item.sample for item in domain.items)
        assert all(planned[i] <= len(meta.items) for i, meta in enumerate(metas))
        items, whole = items + len(domain.items), whole + sum(len(meta.items) for meta in metas)
    assert cut
    assert items < whole


def test_a_long_sample_is_an_error_where_that_is_the_policy():
    with pytest.raises(DataError, match="the budget is 16"):
        takes_long("error")


# Freezing, small steps, digests, evaluation.


def test_a_frozen_component_runs_no_backward_and_reduces_nothing():
    freezing = planner(2, 2, frozen=lambda step: ("ear", "eye") if step < 3 else ())
    early, late = (plans_of_all_domains(freezing, step, 0) for step in (2, 3))
    kinds = [kinds_of_ops(plans) for plans in (early, late)]
    assert Kind.ENCODE in kinds[0]
    assert not kinds[0] & {Kind.ENCODE_BACKWARD, Kind.RETURN}
    assert kinds[1] >= {Kind.ENCODE_BACKWARD, Kind.RETURN}
    for plans, frozen, encoders in ((early, ("ear", "eye"), []), (late, (), [(0, 0), (1, 0)])):
        for plan in plans:
            domain = plan.domain
            assert plan.frozen == frozen
            assert domain.reductions == (*encoders, (2, 1), (2, 0))
            for team, ops in enumerate(domain.ops):
                reduced = [(op.index, op.virtual_stage) for op in ops if op.kind is Kind.REDUCE]
                assert reduced == [*encoders, *((2, number) for number in domain.holds[team])]
            freezing.verify(plan)


@pytest.mark.parametrize("group_size", [1, 2, 32])
@pytest.mark.parametrize("balance", [NONE, LPT], ids=lambda policy: policy.name)
def test_replicas_without_samples_still_reduce(balance, group_size):
    budget = Budget(microbatch_tokens=40, step_tokens=None, step_samples=2, on_long="error")
    planning = planner(
        5, 2, budget=budget, policies=policies_of(balance, ENCODE_FIRST), group_size=group_size
    )
    plans = plans_of_all_domains(planning, 1, 0)
    assert len(plans[0].taken) == 2
    empty = [plan.domain for plan in plans if not plan.domain.microbatches]
    assert len(empty) == 3
    for domain in empty:
        assert domain.items == domain.encoder_batches == domain.routes == ()
        kinds = [Kind.REDUCE] * 3 + [Kind.WAIT] * 3
        assert all([op.kind for op in ops] == kinds for ops in domain.ops)
    for plan in plans:
        planning.verify(plan)


def test_two_planners_plan_alike():
    one, other = planner(3, 2), planner(3, 2)
    assert one is not other
    for cursor in (0, 17, 400):
        assert digests(one, 2, cursor) == digests(other, 2, cursor)
    for step, cursor in ((3, 0), (2, 1)):
        assert all(a[0] != b[0] for a, b in zip(digests(one, 2, 0), digests(one, step, cursor), strict=True))


def digests(planning: Planner, step: int, cursor: int) -> list[tuple[int, int, int]]:
    return [plan.digests for plan in plans_of_all_domains(planning, step, cursor)]


def test_the_digest_does_not_depend_on_the_order_of_mappings():
    parts = table(2).parts
    backwards = planner(
        2,
        2,
        stream=Stream(dict(reversed(SOURCES.items())), seed=3),
        encoders={"audio": "ear", "image": "eye"},
        table=replace(table(2), parts=dict(reversed(parts.items()))),
    )
    assert plans_of_all_domains(backwards, 1, 0) == plans_of_all_domains(planner(2, 2), 1, 0)
    assert digests(backwards, 1, 0) == digests(planner(2, 2), 1, 0)


def test_another_cost_table_is_another_plan():
    renumbered = planner(2, 2, table=replace(table(2), number=5))
    assert renumbered.next_step(1, 0, 0).digests[0] != planner(2, 2).next_step(1, 0, 0).digests[0]


@pytest.mark.parametrize("group_size", [1, 32])
@pytest.mark.parametrize("domains", [1, 2])
def test_evaluation_runs_forward_only_over_the_given_samples(domains, group_size):
    metas = [meta_of("pairs", i) for i in range(10)]
    planning = planner(2, 2, frozen=lambda step: ("eye",), group_size=group_size)
    plans = [planning.evaluation(7, metas, domains, number) for number in range(domains)]
    assert trained_on(plans) == Counter(("pairs", i) for i in range(10))
    assert in_order(plans[0]) == [("pairs", i) for i in range(10)]
    assert not any(plan.train for plan in plans)
    assert not kinds_of_ops(plans) & {
        Kind.BACKWARD,
        Kind.ENCODE_BACKWARD,
        Kind.RETURN,
        Kind.REDUCE,
        Kind.SEND_BACKWARD,
    }
    for plan in plans:
        planning.verify(plan)


def test_costly_samples_are_spread_over_replicas():
    def meta(source, sample):
        return SampleMeta(sample, source, 30 if sample % 2 else 1, (), 0)

    budget = Budget(microbatch_tokens=40, step_tokens=None, step_samples=16, on_long="error")
    spread = []
    for balance in (NONE, LPT):
        policies = policies_of(balance, ENCODE_FIRST)
        stream = Stream({"text": SourceSpec(16, 4, 1)}, seed=0)
        planning = planner(2, metas=meta, budget=budget, policies=policies, stream=stream)
        plans = plans_of_all_domains(planning, 1, 0)
        loads = [sum(sample.length for sample in plan.domain.samples) for plan in plans]
        spread.append(max(loads) - min(loads))
    assert spread[1] == 0 <= spread[0]


def test_cp_ranks_that_share_sequences_pack_together_and_leave_room_to_level():
    """Four replicas of 40 tokens a pass: where all share, packs of several samples have up to 120 tokens,
    whichever replica got them; where none does, one of 40 of each replica passes.
    """
    world, budget = (
        arrange(Layout(dp=4), {"eye": 1, "ear": 1}, COLOCATED, 0, 4),
        Budget(40, None, 24, "truncate"),
    )
    shared, alone = (
        planner(world=world, budget=budget, llm_sp=policy).next_step(1, 0, 0)
        for policy in ("dynamic", "uniform")
    )
    assert taken_by(shared) == taken_by(alone) == trained_on([shared])
    sizes = [sum(of.layout.lengths) for of in shared.domain.microbatches if len(of.samples) > 1]
    assert sizes
    assert max(sizes) <= 120
    tokens = sum(shared.taken.lengths)
    assert len(shared.domain.microbatches) <= -(-tokens // 120) * 4 // 3 + 1
    assert max(sum(of.layout.lengths) for of in alone.domain.microbatches) <= 160
