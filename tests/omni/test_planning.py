from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_policies import own

from dataloader.format import DataError
from dataloader.global_batch import Budget, Lengths
from dataloader.policies import FIRST_FIT_DECREASING, IN_ORDER, LPT, NONE, BalancePolicy
from dataloader.stream import SourceSpec, Stream
from dataloader.tokens import ItemMeta, SampleMeta, fit, length
from omni.training.planner import Boundary, Planner, Policies
from omni.training.sharing import Sharing
from parallel.costs import CostTable, Link, Links, WorkCost
from parallel.layout import Arrangement, Layout, arrange
from parallel.placements import COLOCATED, DISAGGREGATED, STAGE0, PlacementPolicy
from parallel.policies import SharingPolicy, make_pool
from parallel.schemes import sequence_cost
from parallel.tiles import AttentionShape
from parallel.transport_policies import AUTO
from pipeline.builders import ENCODE_FIRST, SchedulePolicy
from pipeline.plan import Chunk, DomainPlan, Kind, StepPlan
from pipeline.verifier import verify

SHARING = own(SharingPolicy)
BEYOND_REPLICAS = [name for name, policy in SHARING.items() if not policy.within_replica]
SCHEDULES = list(own(SchedulePolicy).values())
PLACEMENTS = list(own(PlacementPolicy).values())


def policies_of(balance: BalancePolicy, schedule: SchedulePolicy) -> Policies:
    return Policies(balance, FIRST_FIT_DECREASING, IN_ORDER, schedule)


POLICIES = [policies_of(balance, schedule) for balance in (NONE, LPT) for schedule in SCHEDULES]
SOURCES = {"pairs": SourceSpec(40, 8, 2), "text": SourceSpec(25, 8, 1)}
COMPONENTS = ("ear", "eye", "llm")
BUDGET = Budget(microbatch_tokens=40, step_tokens=150, step_samples=None, on_long="error")
LINK = Link(100, 10**12)
UNIT = 4  # tokens of an item for each row


def meta_of(source: str, sample: int) -> SampleMeta:
    random = Random(f"{source}/{sample}")
    text = random.randint(0, 12)
    items = []
    if source == "pairs":
        for at in sorted(random.randint(0, text) for _ in range(random.randint(0, 3))):
            rows = random.randint(1, 5)
            items.append(ItemMeta(random.choice(("image", "audio")), UNIT * rows, rows, at, ()))
    return SampleMeta(sample, source, text, tuple(items), 100)


def lengths_of(metas: Callable[[str, int], SampleMeta]) -> Lengths:
    def lengths(source: str, ids: np.ndarray, budget: int, policy: str) -> np.ndarray:
        dropped = "drop" if policy == "error" else policy
        kept = [fit(metas(source, i), budget, dropped) for i in ids.tolist()]
        return np.array([length(meta) if meta else 0 for meta in kept])

    return lengths


def table(stages: int) -> CostTable:
    parts = {f"llm/{stage}": WorkCost(2_000_000, 1_000, 10, exchanges=2) for stage in range(stages)}
    parts |= {
        "eye": WorkCost(1_000_000, 3_000, 10, exchanges=2),
        "ear": WorkCost(500_000, 100, 10, exchanges=2),
    }
    return CostTable(4, parts, Links(LINK, LINK), 64)


def sharing_of(world: Arrangement, llm_sp: str, encoder_sp: str, budget: Budget) -> dict:
    """How each component shares sequences, as a run's configuration would have it."""
    costs = table(world.llm.pp)
    out = {}
    for name in COMPONENTS:
        shape = AttentionShape(4, 2 if name == "llm" else 4, causal=name == "llm")
        cost = sequence_cost(costs, "llm/0" if name == "llm" else name, shape, 16, LINK)
        policy = SHARING[llm_sp if name == "llm" else encoder_sp]
        if name == "llm":
            over = world.llm.cp if policy.within_replica else world.pool
            # Room for sequences that a policy leaves whole, or cuts unevenly.
            out[name] = Sharing(policy, make_pool(cost, over, 1, 2 * budget.microbatch_tokens), world.pool)
        else:
            slots = len(world.slots(name))
            whole = slots == 1 or not policy.cuts
            out[name] = Sharing(policy, make_pool(cost, slots, UNIT), slots, whole=whole)
    return out


def colocated(dp: int = 1, pp: int = 1) -> Arrangement:
    return arrange(Layout(dp=dp, pp=pp), {"eye": 1, "ear": 1}, COLOCATED, 0)


def planner(
    dp: int = 1,
    pp: int = 1,
    *,
    world: Arrangement | None = None,
    llm_sp: str = "uniform",
    encoder_sp: str = "none",
    **changes: object,
) -> Planner:
    world = world or colocated(dp, pp)
    return replace(
        Planner(
            stream=Stream(SOURCES, seed=3),
            metas=meta_of,
            lengths=lengths_of(changes.get("metas", meta_of)),
            encoders={"image": "eye", "audio": "ear"},
            components=COMPONENTS,
            arrangement=world,
            llm="llm",
            sharing=sharing_of(world, llm_sp, encoder_sp, changes.get("budget", BUDGET)),
            boundary=Boundary(AUTO, 2, 64, Links(Link(10, 10**9), Link(1000, 10**8))),
            feeds=(),
            policies=policies_of(LPT, ENCODE_FIRST),
            budget=BUDGET,
            table=table(world.llm.pp),
            frozen=lambda step: (),
        ),
        **changes,
    )


def trained_on(plan: StepPlan) -> Counter:
    """The samples that microbatches really contain."""
    return Counter(
        (plan.samples[i].source, plan.samples[i].id)
        for domain in plan.domains
        for batch in domain.microbatches
        for i in batch.samples
    )


def kinds_of_ops(plan: StepPlan) -> set[Kind]:
    return {op.kind for domain in plan.domains for ops in domain.ops for op in ops}


def packed_tokens(plan: StepPlan, domain: DomainPlan, microbatch: int, budget: Budget) -> list:
    """What stands at each position of a pack: (sample, item) on the rows of an item, else None."""
    out: list = []
    for i in domain.microbatches[microbatch].samples:
        meta = planner(budget=budget).meta(plan.samples[i].source, plan.samples[i].id)
        out.append(None)  # bos
        for text in range(meta.text_tokens + 1):
            for number, item in enumerate(meta.items):
                if item.at == text:
                    out += [(i, number)] * item.rows + [None]
            if text < meta.text_tokens:
                out.append(None)
    return out


def budgets(least: int) -> st.SearchStrategy[Budget]:
    on_long = st.sampled_from(("drop", "truncate"))
    return st.builds(
        Budget, st.integers(max(least, 36), 80), st.integers(1, 300), st.none(), on_long
    ) | st.builds(Budget, st.integers(max(least, 8), 80), st.none(), st.integers(1, 20), on_long)


@st.composite
def settings_of_planners(draw) -> dict:
    """Any layout of the LLM, encoders and domains that fit each other, under any policies."""
    tp, cp, dp, pp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2), (1, 1, 2), (1, 2, 3, 4), (1, 2, 3)))
    placement = draw(st.sampled_from(PLACEMENTS))
    beside = draw(st.sampled_from([dp, 2 * dp, 3])) if placement is DISAGGREGATED else 0
    shared = draw(st.sampled_from([k for k in range(1, dp + 1) if dp % k == 0]))
    size = tp * cp * (pp if placement is COLOCATED else 1) * shared
    if beside:
        size = beside if beside % (dp // shared) else beside // (dp // shared)
    slots = [k for k in (1, 2, 3) if size % k == 0]
    encoder_tp = {name: draw(st.sampled_from(slots)) for name in ("eye", "ear")}
    return {
        "world": arrange(Layout(tp, cp, dp, pp), encoder_tp, placement, beside, shared),
        "llm_sp": draw(st.sampled_from(["uniform", "uniform", *SHARING])),
        "encoder_sp": draw(st.sampled_from(["none", "none", *BEYOND_REPLICAS])),
        "policies": draw(st.sampled_from(POLICIES)),
        "single_queue": draw(st.booleans()),
        "budget": draw(budgets(least=0)),
    }


@settings(deadline=None, max_examples=60)
@given(settings_of_planners(), st.integers(0, 500))
def test_every_sample_of_the_step_is_in_exactly_one_microbatch(chosen, cursor):
    plan = planner(**chosen).next_step(5, cursor)
    places = Counter(i for domain in plan.domains for batch in domain.microbatches for i in batch.samples)
    assert places == Counter(range(len(plan.samples)))
    assert len(plan.domains) == chosen["world"].num_domains
    assert (plan.step, plan.cursor, plan.cost_table) == (5, cursor, 4)


@settings(deadline=None, max_examples=60)
@given(settings_of_planners(), st.integers(0, 500))
def test_no_microbatch_exceeds_its_budget(chosen, cursor):
    plan = planner(**chosen).next_step(5, cursor)
    world, most = chosen["world"], chosen["budget"].microbatch_tokens
    for domain in plan.domains:
        for batch in domain.microbatches:
            assert batch.layout.lengths == tuple(plan.samples[i].length for i in batch.samples)
            assert 0 < sum(batch.layout.lengths) <= most * world.replicas
            held = [batch.layout.local_tokens(member) for member in range(world.pool)]
            assert max(held) <= (most if chosen["llm_sp"] == "uniform" else 2 * most)
            work = [batch.work(member) for member in range(world.pool)]
            assert [tokens for tokens, *_ in work] == held
            assert sum(squares for _, squares, _ in work) == sum(n * n for n in batch.layout.lengths)
            if chosen["llm_sp"] == "uniform":
                # Each replica has its own pack, cut evenly over its members.
                for first in range(0, world.pool, world.llm.cp):
                    assert sum(held[first : first + world.llm.cp]) <= most
                for shards, n in zip(batch.layout.shards, batch.layout.lengths, strict=True):
                    assert {piece.length for piece in shards} <= {n // world.llm.cp, -(-n // world.llm.cp)}
                    assert len({piece.rank // world.llm.cp for piece in shards}) == 1


@settings(deadline=None, max_examples=60)
@given(settings_of_planners(), st.integers(0, 500))
def test_items_start_where_their_rows_stand(chosen, cursor):
    plan = planner(**chosen).next_step(5, cursor)
    for domain in plan.domains:
        for m, batch in enumerate(domain.microbatches):
            tokens = packed_tokens(plan, domain, m, chosen["budget"])
            assert len(tokens) == sum(batch.layout.lengths)
            items = [item for item in domain.items if item.microbatch == m]
            for item in items:
                rows = tokens[item.start : item.start + item.rows]
                assert rows == [(item.sample, item.index)] * item.rows
            assert sum(item.rows for item in items) == sum(token is not None for token in tokens)


@settings(deadline=None, max_examples=60)
@given(settings_of_planners(), st.integers(0, 500))
def test_chunks_hold_every_item_once_and_add_up(chosen, cursor):
    plan = planner(**chosen).next_step(5, cursor)
    world = chosen["world"]
    for domain in plan.domains:
        items = domain.items
        held = [number for chunk in domain.chunks for number in chunk.items]
        assert sorted(held) == list(range(len(items)))
        for chunk in domain.chunks:
            assert {(items[i].component, items[i].microbatch) for i in chunk.items} == {
                (chunk.component, chunk.microbatch)
            }
            assert chunk.layout.lengths == tuple(items[i].tokens for i in chunk.items)
            assert chunk.tp == world.encoder_tp[chunk.component]
            assert sum(chunk.rows) == sum(items[i].rows for i in chunk.items)
            slots = world.slots(chunk.component)
            everyone = tuple(rank for slot in slots for rank in slot)
            assert chunk.ranks in (*slots, everyone)
            is_shared = any(len(shards) > 1 for shards in chunk.layout.shards)
            assert is_shared == (chunk.layout.num_ranks > 1)
            assert not (is_shared and chosen["encoder_sp"] == "none")
            for shards, tiles in zip(chunk.layout.shards, chunk.tiles, strict=True):
                assert all(shard.start % UNIT == 0 for shard in shards), "cut between rows"
                assert bool(tiles) == (len(shards) > 1)


def rows_of(chunk: Chunk, domain: DomainPlan) -> list[tuple[int, int]]:
    """(rank, packed position) of every row of a chunk, one at a time, in the order of each rank."""
    out = []
    for slot in range(chunk.layout.num_ranks):
        rows = []
        for number, shards in zip(chunk.items, chunk.layout.shards, strict=True):
            item = domain.items[number]
            for shard in shards:
                if shard.rank == slot:
                    first, stop = shard.start // UNIT, (shard.start + shard.length) // UNIT
                    rows += range(item.start + first, item.start + stop)
        share, rest = divmod(len(rows), chunk.tp)
        ranks = chunk.ranks[slot * chunk.tp : (slot + 1) * chunk.tp]
        holders = [rank for t, rank in enumerate(ranks) for _ in range(share + (t < rest))]
        out += list(zip(holders, rows, strict=True))
    return out


def holders_of(domain: DomainPlan, microbatch: int) -> list[tuple[int, int]]:
    """(position of the first stage, index among its tokens) of every packed token."""
    layout = domain.microbatches[microbatch].layout
    filled: Counter = Counter()
    tokens = []
    for shards in layout.shards:
        for shard in shards:
            for _ in range(shard.length):
                tokens.append((shard.rank, filled[shard.rank]))
                filled[shard.rank] += 1
    share = {member: max(1, -(-filled[member] // domain.tp)) for member in range(domain.pool)}
    return [(member * domain.tp + at // share[member], at % share[member]) for member, at in tokens]


@settings(deadline=None, max_examples=60)
@given(settings_of_planners(), st.integers(0, 500))
def test_routes_take_each_row_from_its_encoder_to_its_position(chosen, cursor):
    plan = planner(**chosen).next_step(5, cursor)
    for domain in plan.domains:
        for m in range(len(domain.microbatches)):
            # The rows of a rank lie chunk by chunk, item by item.
            holders = holders_of(domain, m)
            wanted, filled = set(), Counter()
            for chunk in domain.chunks:
                for rank, position in rows_of(chunk, domain) if chunk.microbatch == m else ():
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
    plan = planner(**chosen).next_step(5, cursor)
    verify(plan, max_in_flight=chosen["world"].llm.pp, single_fifo=chosen["single_queue"])


def test_replicas_of_a_domain_pass_their_packs_together():
    world = arrange(Layout(tp=2, dp=4), {"eye": 1, "ear": 1}, COLOCATED, 0, replicas=2)
    budget = replace(BUDGET, step_tokens=None, step_samples=9)
    plan = planner(world=world, budget=budget).next_step(1, 0)
    assert len(plan.domains) == 2
    for domain in plan.domains:
        assert (domain.pool, domain.tp, domain.party) == (2, 2, 2)
        members = [{s.rank for s in batch.layout.shards for s in s} for batch in domain.microbatches]
        assert members[0] == {0, 1}
        assert all(of <= {0, 1} for of in members)


def test_ranks_that_share_sequences_or_experts_are_one_party():
    def party(layout: Layout, llm_sp: str = "uniform", replicas: int = 1) -> int:
        world = arrange(layout, {"eye": 1, "ear": 1}, COLOCATED, 0, replicas)
        return planner(world=world, llm_sp=llm_sp).next_step(1, 0).domains[0].party

    assert party(Layout(dp=2, pp=2)) == 1
    assert party(Layout(tp=2, cp=2, dp=2)) == 4
    assert party(Layout(cp=2, dp=2), replicas=2) == 4
    assert party(Layout(tp=2, cp=3, dp=2, ep=4)) == 12
    assert party(Layout(tp=2, dp=2), "dynamic", replicas=2) == 4


def test_components_live_where_their_placement_says():
    def homes(placement: PlacementPolicy, beside: int = 0) -> tuple:
        world = arrange(Layout(tp=2, pp=2, dp=2), {"eye": 2, "ear": 1}, placement, beside)
        return planner(world=world).next_step(1, 0).domains[0].homes

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
            .next_step(1, 0)
            .domains[0]
            .chunks
            for policy in ("none", "all")
        )
        assert [chunk.ranks for chunk in own] == [(0,)]
        assert [(chunk.ranks, chunk.layout.num_ranks, chunk.rows) for chunk in shared] == [
            ((0, 1), 2, (500, 500))
        ]


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
    for step in range(1, 6):
        plans = [
            planner(
                world=world,
                llm_sp=llm_sp,
                encoder_sp=encoder_sp,
                policies=policies,
                budget=budget,
                single_queue=single,
            ).next_step(step, cursor)
            for world in WORLDS
            for llm_sp, encoder_sp in (("uniform", "none"), ("dynamic", "dynamic"))
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
    planned = Counter(item.sample for domain in plan.domains for item in domain.items)
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
        {op.kind for domain in plan.domains for ops in domain.ops for op in ops} for plan in (early, late)
    ]
    assert Kind.ENCODE in kinds[0]
    assert not kinds[0] & {Kind.ENCODE_BACKWARD, Kind.RETURN}
    assert kinds[1] >= {Kind.ENCODE_BACKWARD, Kind.RETURN}
    assert (early.frozen, late.frozen) == (("ear", "eye"), ())
    for plan, reduced in ((early, [2]), (late, [0, 1, 2])):
        for domain in plan.domains:
            for ops in domain.ops:
                assert [op.index for op in ops if op.kind is Kind.REDUCE] == reduced
        verify(plan, max_in_flight=2)


@pytest.mark.parametrize("balance", [NONE, LPT], ids=lambda policy: policy.name)
def test_replicas_without_samples_still_reduce(balance):
    budget = Budget(microbatch_tokens=40, step_tokens=None, step_samples=2, on_long="error")
    plan = planner(5, 2, budget=budget, policies=policies_of(balance, ENCODE_FIRST)).next_step(1, 0)
    assert len(plan.samples) == 2
    empty = [domain for domain in plan.domains if not domain.microbatches]
    assert len(empty) == 3
    for domain in empty:
        assert domain.items == domain.chunks == domain.routes == ()
        assert all([op.kind for op in ops] == [Kind.REDUCE] * 3 for ops in domain.ops)
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


@pytest.mark.parametrize("domains", [1, 2])
def test_evaluation_runs_forward_only_over_the_given_samples(domains):
    metas = [meta_of("pairs", i) for i in range(10)]
    plan = planner(2, 2, frozen=lambda step: ("eye",)).evaluation(7, metas, domains)
    assert trained_on(plan) == Counter(("pairs", i) for i in range(10))
    assert len(plan.domains) == domains
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
    for balance in (NONE, LPT):
        policies = policies_of(balance, ENCODE_FIRST)
        stream = Stream({"text": SourceSpec(16, 4, 1)}, seed=0)
        plan = planner(2, metas=meta, budget=budget, policies=policies, stream=stream).next_step(1, 0)
        loads = [sum(sum(batch.layout.lengths) for batch in domain.microbatches) for domain in plan.domains]
        spread.append(max(loads) - min(loads))
    assert spread[1] == 0 <= spread[0]
