"""Which microbatches of a step share their items: sharing must pay for the barrier that it is."""

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest
from own_policies import own
from planners import planner, policies_of
from small import overrides, write_mixed
from work_costs import work_cost

from dataloader.balance.simple import LPT
from dataloader.global_batch import Budget
from dataloader.tokens import ItemMeta, SampleMeta
from omni.compose import compose_config
from omni.planning.planner import Planner
from omni.planning.pools import without_effect
from omni.planning.prepare import prepare_run
from omni.planning.sharing import Sharing, make_encoder_batches, make_even_encoder_batches, worth_sharing
from parallel.cluster import Link, Links
from parallel.costs import CostTable, WorkCost
from parallel.layout import Layout, arrange
from parallel.placements import COLOCATED
from parallel.policies import SharingPolicy, make_pool
from parallel.schemes import sequence_cost
from parallel.tiles import AttentionShape
from pipeline.builders import SchedulePolicy
from pipeline.domain_plan import EncoderBatch, PlannedItem
from pipeline.plan import StepPlan

RANKS, UNIT = 8, 4
LINK = Link(2_000, 10**11)
TABLE = CostTable(0, {"eye": work_cost(10**9, 10**6, 0, exchanges=4)}, Links(LINK, LINK), row_bytes=64)
COST = sequence_cost(TABLE, "eye", AttentionShape(8, 8), 128, LINK)
TP_GROUPS = {"eye": [(rank,) for rank in range(RANKS)]}


def sharing_by(policy: str) -> Sharing:
    chosen = own(SharingPolicy)[policy]
    return Sharing(chosen, make_pool(COST, RANKS, UNIT), RANKS, whole=not chosen.cuts)


def planned(
    policy: str, batches: list[list[int]], at_once: int = 0, costs: Mapping[str, WorkCost] = TABLE.parts
) -> tuple[EncoderBatch, ...]:
    """The encoder batches of a step whose microbatches have items of so many tokens."""
    items = [
        PlannedItem("eye", 0, 0, number, tokens, tokens // UNIT, 0)
        for number, lengths in enumerate(batches)
        for tokens in lengths
    ]
    return make_encoder_batches(
        items,
        TP_GROUPS,
        {"eye": sharing_by(policy)},
        costs,
        [item.microbatch for item in items],
        at_once,
    )


def encode_ns(encoder_batches: tuple[EncoderBatch, ...]) -> int:
    """Time until all ranks have encoded all encoder batches: ranks that share one begin and end it
    together.
    """
    clock = [0] * RANKS
    for encoder_batch in encoder_batches:
        start = max(clock[rank] for rank in encoder_batch.ranks)
        took = max(
            TABLE.parts["eye"].forward_ns(*encoder_batch.share(rank)[:3]) for rank in encoder_batch.ranks
        )
        for rank in encoder_batch.ranks:
            clock[rank] = start + took
    return max(clock)


def heavy_tailed(num_batches: int, items: int, seed: int, spread: float = 1.5) -> list[list[int]]:
    random = Random(seed)
    return [
        [UNIT * round(min(16_000, random.lognormvariate(5, spread)) + 1) for _ in range(items)]
        for _ in range(num_batches)
    ]


def shared(encoder_batches: tuple[EncoderBatch, ...]) -> set[int]:
    return {
        m
        for encoder_batch in encoder_batches
        if len(encoder_batch.ranks) > 1
        for m in encoder_batch.microbatches
    }


@pytest.mark.parametrize("policy", ["dhp", "dynamic", "long_short", "hybrid_pow2"])
@pytest.mark.parametrize("num_batches", [1, 3, 8])
def test_a_step_takes_no_longer_than_with_whole_items(policy, num_batches):
    gains = []
    for seed in range(12):
        batches = heavy_tailed(num_batches, 40, seed)
        whole, chosen = encode_ns(planned("none", batches)), encode_ns(planned(policy, batches))
        assert chosen <= whole, seed
        gains.append(whole / chosen)
    assert sum(gains) / 12 > 1.02, gains


@pytest.mark.parametrize("policy", ["dynamic", "long_short"])
def test_items_of_all_microbatches_at_once_take_no_longer(policy):
    gains, merged = [], 0
    for seed in range(12):
        batches = heavy_tailed(8, 6, seed, 2.0)
        apart, encoder_batches = planned(policy, batches), planned(policy, batches, at_once=1)
        assert sorted(i for encoder_batch in encoder_batches for i in encoder_batch.items) == list(
            range(8 * 6)
        )
        merged += len(encoder_batches) == 1
        assert encode_ns(encoder_batches) <= encode_ns(apart), seed
        gains.append(encode_ns(apart) / encode_ns(encoder_batches))
    assert merged > 6
    assert sum(gains) / 12 > 1.004, gains
    even = [[400] * 16] * 6
    assert planned(policy, even, at_once=1) == planned(policy, even), "which balance whole"


@pytest.mark.parametrize("at_once", [0, 1, 3])
def test_who_shares_an_encoder_batch_has_an_item_to_share(at_once):
    """DHP balances whole items of these steps better than by cost, one by one: none waits for another."""
    sharing, random = Sharing(own(SharingPolicy)["dhp"], make_pool(COST, 2, UNIT), 2), Random(1)
    for seed in range(60):
        lengths = [(m, UNIT * random.randint(1, 4000)) for m in range(3) for _ in range(random.randint(1, 6))]
        items = [PlannedItem("eye", 0, 0, m, tokens, tokens // UNIT, 0) for m, tokens in lengths]
        batches = make_encoder_batches(
            items, {"eye": [(0,), (1,)]}, {"eye": sharing}, TABLE.parts, [m for m, _ in lengths], at_once
        )
        assert all(batch.layout.is_cut == (len(batch.ranks) > 1) for batch in batches), seed


@pytest.mark.parametrize("portions", [2, 4])
def test_what_is_shared_at_once_comes_in_portions_of_about_even_work(portions):
    batches = heavy_tailed(8, 24, 1, 2.0)
    one, several = (planned("dynamic", batches, at_once=count) for count in (1, portions))
    assert len(one) == 1
    assert len(several) == portions
    assert sorted(i for batch in several for i in batch.items) == list(range(8 * 24))
    whole, most = (max(of.share(rank).tokens for of in own for rank in of.ranks) for own in (one, several))
    assert most <= 1.5 * whole / portions
    assert encode_ns(several) < 1.1 * encode_ns(one)


def dear(starting_ns: int) -> dict[str, WorkCost]:
    """Costs of passes that take so much to start."""
    return {"eye": work_cost(10**9, 10**6, starting_ns, exchanges=4)}


@pytest.mark.parametrize(
    ("starting_us", "waves"), [(0, 1), (1, 1), (625, 1), (1_250, 2), (2_500, 4), (7_000, 12), (100_000, 12)]
)
def test_whole_items_are_encoded_in_as_few_encoder_batches_as_starting_them_is_worth(starting_us, waves):
    """Items of 20 ms, two a tp group and wave: 64 times a start of 0.625 ms are those of a wave."""
    batches, costs = [[4000] * 16] * 12, dear(1_000 * starting_us)
    apart = planned("none", batches, costs=costs)
    encoder_batches = planned("none", batches, at_once=1, costs=costs)
    of_tp_group = {
        ranks: [c.microbatches for c in encoder_batches if c.ranks == ranks] for ranks in TP_GROUPS["eye"]
    }
    runs = [tuple(range(first, first + waves)) for first in range(0, 12, waves)]
    assert list(of_tp_group.values()) == [runs] * RANKS
    assert [c.microbatches for c in apart] == [(m,) for m in range(12) for _ in range(RANKS)]
    assert {i: c.ranks for c in encoder_batches for i in c.items} == {
        i: c.ranks for c in apart for i in c.items
    }


def test_waves_that_are_worth_an_encoder_batch_stay_apart_and_small_ones_join_them():
    """A large wave takes a tp group 40 ms, a small one 1.1 ms, of which starting an encoder batch is worth 16
    ms.
    """
    large, small = [4000] * 16, [400] * 16
    batches = [small, small, large, large, small, large, small]
    encoder_batches = planned("none", batches, at_once=1, costs=dear(250_000))
    assert {encoder_batch.microbatches for encoder_batch in encoder_batches} == {(0, 1, 2), (3,), (4, 5, 6)}


def test_starting_encoder_batches_takes_little_of_a_step():
    costs, numbers = dear(500_000), set[int]()
    for seed in range(6):
        batches = heavy_tailed(16, 12, seed, 1.0)
        encoder_batches = planned("none", batches, at_once=1, costs=costs)
        work = sum(costs["eye"].marginal_ns(n, n * n) for of in batches for n in of)
        assert sorted(i for encoder_batch in encoder_batches for i in encoder_batch.items) == list(
            range(16 * 12)
        )
        assert len(encoder_batches) * 500_000 <= max(work / 64, RANKS * 500_000)
        numbers.add(len(encoder_batches))
    assert max(numbers) > 2 * RANKS


@pytest.mark.parametrize(
    ("starting_us", "each"), [(0, 24), (100, 24), (1_250, 19), (7_500, 8), (30_000, 4), (480_000, 1)]
)
def test_encoder_batches_are_as_few_as_starting_them_is_worth(starting_us, each):
    """480 ms of work on each of eight tp groups: 64 encoder batches, each of which takes 7.5 ms to start,
    would be
    8.
    """
    costs = dear(1_000 * starting_us)
    items = [PlannedItem("eye", 0, 0, number // 16, 4000, 1000, 0) for number in range(12 * 16)]
    rest = (TP_GROUPS, {"eye": sharing_by("none")}, costs, [item.microbatch for item in items], 24)
    assert len(make_even_encoder_batches(items, *rest)) == 24 * RANKS
    encoder_batches = make_even_encoder_batches(items, *rest, coarse=1)
    assert len(encoder_batches) == each * RANKS
    assert [i for encoder_batch in encoder_batches for i in encoder_batch.items] == list(range(12 * 16))

    def wasted(count: int) -> float:
        return count * starting_us * 1_000 + 480e6 / count

    assert wasted(each) <= 1.02 * min(map(wasted, range(1, 25)))


def heavy_step(schedule: str, **of_domain: object) -> Planner:
    """A step of two stages and two replicas that share items of very different sizes in four microbatches."""

    def meta(source: str, sample: int) -> SampleMeta:
        return SampleMeta(sample, source, 20, (ItemMeta("image", 400 * 3 ** (sample % 5), 1, 0, ()),), 0)

    world = arrange(Layout(dp=2, pp=2), {"eye": 1, "ear": 1}, COLOCATED, 0, 2)
    policies = policies_of(LPT, own(SchedulePolicy)[schedule])
    budget = Budget(40, None, 8, "error")
    return planner(
        world=world, metas=meta, budget=budget, encoder_sp="dynamic", policies=policies, **of_domain
    )


def even_step(schedule: str, **of_domain: object) -> Planner:
    """Two stages encode 48 equal items of eight microbatches, which take 1,080 ns each."""

    def meta(source: str, sample: int) -> SampleMeta:
        return SampleMeta(sample, source, 20, (ItemMeta("image", 40, 1, 0, ()),) * 6, 0)

    policies, budget = policies_of(LPT, own(SchedulePolicy)[schedule]), Budget(40, None, 8, "error")
    return planner(pp=2, metas=meta, budget=budget, policies=policies, **of_domain)


def waves_of(made: Planner, whole: bool = False) -> set[int]:
    """Of how many microbatches encoder batches have items that ranks share, or that stay whole."""
    encoder_batches = made.next_step(1, 0, 0).domain.encoder_batches
    return {
        len(encoder_batch.microbatches)
        for encoder_batch in encoder_batches
        if (encoder_batch.layout.num_cp_ranks == 1) == whole
    }


def test_schedules_that_encode_ahead_share_items_of_all_microbatches_at_once():
    for name in ("encode_first", "zero_bubble_h1", "joint", "joint_zero_bubble_h1"):
        assert waves_of(heavy_step(name)) == {4}
        assert waves_of(heavy_step(name, encoder_bytes=1)) == {1}, "a bound takes small encoder batches"
    assert waves_of(heavy_step("one_f_one_b")) == waves_of(heavy_step("joint_uniform")) == {1}


def test_schedules_that_encode_all_items_first_encode_whole_ones_of_several_microbatches_together():
    for name, count in (("encode_first", 8), ("zero_bubble_h1", 8), ("one_f_one_b", 1)):
        assert waves_of(even_step(name), whole=True) == {count}
    assert waves_of(even_step("encode_first", encoder_bytes=1), whole=True) == {1}


def test_encoder_batches_are_fewer_but_where_they_are_bounded_or_uniform():
    """Starting one takes 10 ns: 10 each are worth it, of 16."""

    def num_encoder_batches(schedule: str, **of_domain: object) -> int:
        return len(even_step(schedule, **of_domain).next_step(1, 0, 0).domain.encoder_batches)

    assert num_encoder_batches("joint") == num_encoder_batches("joint_zero_bubble_h1") == 20
    assert num_encoder_batches("joint", encoder_bytes=1) == 32
    assert num_encoder_batches("joint_uniform") == 16


def keeping(made: Planner, working: int = 0) -> Planner:
    """A planner of which an encoder keeps a byte of a token, and works with so many."""
    costs = made.domain.table
    eye = replace(costs.parts["eye"], kept_token=1, working_token=working)
    table = replace(costs, parts={**costs.parts, "eye": eye})
    return replace(made, domain=replace(made.domain, table=table))


def most_encoded(plan: StepPlan) -> int:
    """Tokens that a rank encodes at once, at most."""
    batches = plan.domain.encoder_batches
    return max(batch.share(rank).tokens for batch in batches for rank in batch.ranks)


@pytest.mark.parametrize("schedule", ["encode_first", "zero_bubble_h1", "joint", "auto"])
def test_items_are_encoded_at_once_round_by_round_where_devices_hold_no_more(schedule):
    """Rounds of at most two of four microbatches fit."""
    made = keeping(heavy_step(schedule))
    room = most_encoded(made.next_step(1, 0, 0)) // 2 + 1
    made = replace(made, beyond=lambda plan, closely=True: most_encoded(plan) - room)

    def waves(**of_domain: object) -> int:
        return max(waves_of(replace(made, domain=replace(made.domain, **of_domain))))

    assert (waves(), waves(rounds=99)) == (2, 1)
    assert waves(rounds=1) == (1 if schedule == "auto" else 4), "auto may encode just in time"


@pytest.mark.parametrize("schedule", ["encode_first", "zero_bubble_h1", "auto"])
def test_what_is_shared_at_once_comes_in_portions_where_layers_cannot_work_with_all_of_it(schedule):
    """Portions of a third of the tokens fit, or rounds of so many: the former take less time."""
    made = keeping(heavy_step(schedule), working=1)
    room = most_encoded(made.next_step(1, 0, 0)) // 3
    made = replace(made, beyond=lambda plan, closely=True: most_encoded(plan) - room)
    plan = made.next_step(1, 0, 0)
    made.verify(plan)
    assert most_encoded(plan) <= room
    assert plan.domain.rounds == 1
    shared = [batch for batch in plan.domain.encoder_batches if batch.layout.num_cp_ranks > 1]
    assert len(shared) in (4, 8)


def test_more_rounds_or_portions_are_not_tried_where_fewer_brought_nothing():
    """Something else than encoders is always 100 tokens beyond: a step is planned once, and once divided."""
    made, asked = keeping(heavy_step("encode_first"), working=1), list[tuple[int, int]]()

    def beyond(plan: StepPlan, closely: bool = True) -> int:
        asked.append((plan.domain.rounds, len(plan.domain.encoder_batches)))
        return 100

    made = replace(made, beyond=beyond)
    assert most_encoded(made.next_step(1, 0, 0)) > 200
    assert max(rounds for rounds, _ in asked) == 2
    assert len(set(asked)) == 3, "as it is, in two portions, in two rounds"


def test_rounds_are_tried_of_plans_in_no_portions_the_quickest_first(monkeypatch):
    tried = []

    def refusing(planned, replanning, *queue):
        first, second, third = planned[:3]
        in_portions = replace(first, encoder_batches=())
        list(replanning.leaner([(first, 1), (second, 2), (in_portions, 3), (third, 4)]))
        tried[:0] = [first, second, third]
        yield first, 0

    monkeypatch.setattr("omni.planning.domain_planner.quickest_first", refusing)
    monkeypatch.setattr(
        "omni.planning.replanning.rounds_to_try",
        lambda refused, table: tried.extend(plan for plan, _ in refused) or iter(()),
    )
    heavy_step("auto").next_step(1, 0, 0)
    assert tried[3:] == tried[:3]


def test_items_that_balance_over_the_step_stay_whole():
    """In one microbatch alone sharing would pay: three items for eight ranks."""
    batch = [4000, 3000, 2000]
    assert shared(planned("dynamic", [batch])) == {0}
    assert not shared(planned("dynamic", [batch] * 8))


def test_the_microbatch_of_a_giant_is_shared_and_the_others_are_not():
    small = [[400] * 16 for _ in range(6)]
    encoder_batches = planned("dynamic", [*small[:2], [64_000, *small[2]], *small[3:]])
    assert shared(encoder_batches) == {2}
    assert {i for encoder_batch in encoder_batches for i in encoder_batch.items} == set(range(6 * 16 + 1))


def test_all_shares_whatever_it_costs():
    assert shared(planned("all", [[4000, 3000, 2000]] * 8)) == set(range(8))


def step_ns(several, lengths, layouts, sharing):
    """Time of a step that shares `several` microbatches, by hand: whole items to the least loaded rank."""
    total, whole = 0, []
    for m in sorted(lengths):
        if m not in several:
            whole += [sharing.whole_ns(n) for n in lengths[m]]
        if m in several or m == max(lengths):
            loads = [0] * RANKS
            for ns in sorted(whole, reverse=True):
                loads[loads.index(min(loads))] += ns
            total, whole = total + max(loads), []
        if m in several:
            total += sharing.slowest_ns(layouts[m])
    return total


def test_the_choice_is_the_best_number_of_microbatches_from_the_longest_item_on():
    sharing = sharing_by("dynamic")
    numbers = set()
    for seed in range(30):
        lengths = dict(enumerate(heavy_tailed(5, 10 + seed, seed, 1.0)))
        layouts = {m: sharing.layout([of]) for m, of in lengths.items()}
        chosen = worth_sharing(lengths, layouts, sharing)
        numbers.add(len(chosen))
        able = [m for m in lengths if layouts[m].is_cut]
        able.sort(key=lambda m: -max(lengths[m]))
        times = [step_ns(able[:count], lengths, layouts, sharing) for count in range(len(able) + 1)]
        assert chosen == able[: len(chosen)]
        assert times[len(chosen)] == min(times)
    assert len(numbers) > 2


def test_a_policy_without_anybody_to_share_with_is_said(tmp_path):
    write_mixed(tmp_path / "mixed")

    def notes(world, *more):
        config = compose_config(overrides(tmp_path / "mixed", tmp_path / "run", *more))
        return without_effect(prepare_run(config, world).planner.domain.sharing)

    shared = ("layout.domain=2", "llm_sp=dynamic", "encoder_sp=all")
    assert notes(2, *shared) == notes(2) == notes(2, "layout.llm.cp=2", "llm_sp=all") == []
    llm, image = notes(2, *shared[1:])
    assert llm.startswith("llm_sp=dynamic has no effect: nobody to share with")
    assert image.startswith("encoder_sp=all has no effect on image: a domain has one tp group")
